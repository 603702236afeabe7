"""An MCP server with tools that move money: each run is a line of a file."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer

import oncely
from oncely.adapters.mcp import once_tool


def user_of(context: Any) -> str:
    return str(context.request_context.meta["user"])


def made(folder: Path, ledger: oncely.Ledger) -> MCPServer:
    """A server whose tools keep what they did in `folder`."""
    server = MCPServer("shop")

    def note(line: str) -> str:
        with (folder / "done.txt").open("a") as file:
            file.write(f"{line}\n")
        return line

    @server.tool()
    @once_tool(ledger, lease="1s")
    def refund(order: str, amount: int) -> str:
        """Give money back."""
        line = note(f"refund {order} {amount}")
        if (folder / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if amount > 100:
            raise TimeoutError("the bank does not answer")
        return line

    @server.tool()
    @once_tool(
        ledger,
        consumer="mails",
        key=lambda to, text="": to,
        scope=user_of,
    )
    async def mail(to: str, context: Context, text: str = "") -> dict[str, str]:
        """Send a mail."""
        return {"sent": note(f"mail {to} {text}")}

    return server


if __name__ == "__main__":
    kept = oncely.open_ledger(f"sqlite:///{sys.argv[1]}/ledger.db")
    kept.migrate()
    made(Path(sys.argv[1]), kept).run()
