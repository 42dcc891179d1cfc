"""An MCP server on stdin and stdout, or with a port over HTTP, whose tool adds."""

import sys

try:
    from mcp.server import MCPServer
except ImportError:  # until mcp 2
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail always."""
    raise ValueError("no luck")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    elif hasattr(server.settings, "port"):
        server.settings.port = int(sys.argv[1])
        server.run("streamable-http")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
