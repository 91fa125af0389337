"""What slash commands do, for every front end; `localllm.tui.commands` has their table."""
