"""A tool of an agent, called twice."""

import asyncio

from mcp.client import Client
from mcp.server.mcpserver import MCPServer

import oncely
from oncely.adapters.mcp import once_tool

ledger = oncely.open_ledger("memory://")
ledger.migrate()
server = MCPServer("shop")
calls: list[str] = []


@server.tool()
@once_tool(ledger)
def refund(order: str) -> str:
    calls.append(order)
    return "refunded"


async def asked() -> None:
    async with Client(server) as client:
        for _ in range(2):
            result = await client.call_tool("refund", {"order": "o-17"})
            assert result.structured_content == {"result": "refunded"}, result


asyncio.run(asked())
assert calls == ["o-17"], calls
