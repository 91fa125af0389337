"""Tools that a model calls: files in a folder, commands in a container, web pages, web search, skills, MCP servers.

A tool is a `tool.AgentTool`: a name, a JSON schema, and a function that returns text, images and the edit of a file.
`tool.call_tool` runs a call and returns errors as text. The functions that create tools have no state and no user
interface, and every tool keeps to its bounds:

- `file_tools.file_tools(folder, is_writable=…)`: read_file, search_files, edit_file, write_file. ``folder`` is
  resolved. `file_edits.undo_edit` takes an edit back.
- `container.command_tool(image, folder)`: run_command.
- `web_tools.fetch_tool(private_hosts)`, `web_tools.search_tool(address)`: fetch_page, web_search.
- `instructions.read_instructions(folder, skills_folder)`: the text of AGENTS.md for the system message, and the tool
  read_skill.
- `mcp_servers.McpServer`: the tools of an MCP server.
- `toolbox.Toolbox`: the tools that the settings enable, and the user's permanent permissions.

The caller of a tool requests the user's permission first. ``AgentTool.preview`` returns the diff to show.
"""
