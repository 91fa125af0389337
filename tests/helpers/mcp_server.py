"""An MCP server of the official package over stdio: it adds numbers, with an optional delay, and returns an image."""

from __future__ import annotations

import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def dot() -> Image:
    """Draws a dot."""
    return Image(data=b"pixels", format="png")


if __name__ == "__main__":
    server.run("stdio")
