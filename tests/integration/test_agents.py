"""Tools of an MCP server, called by a client of the SDK."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult
from tests.conditions import wait_until
from tests.integration import tool_server

import oncely

Call = Callable[..., CallToolResult]


def said(result: CallToolResult) -> str:
    [content] = result.content
    return getattr(content, "text", "")


def call(server: Any, tool: str, arguments: dict[str, Any], **meta: Any) -> CallToolResult:
    async def asked() -> CallToolResult:
        async with Client(server) as client:
            return await client.call_tool(tool, arguments, meta=meta or None)  # type: ignore[arg-type]

    return asyncio.run(asked())


def done(folder: Path) -> list[str]:
    file = folder / "done.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_call_runs_once(tmp_path: Path, ledger: oncely.Ledger) -> None:
    """By the client's key or by the arguments; the same key with others is told in words."""
    server = tool_server.made(tmp_path, ledger)
    for _ in range(2):
        assert said(call(server, "refund", {"order": "o", "amount": 1})) == "refund o 1"
        named = call(server, "refund", {"order": "o", "amount": 1}, idempotencyKey="k-1")
        assert said(named) == "refund o 1"
    assert done(tmp_path) == ["refund o 1"] * 2
    other = call(server, "refund", {"order": "o", "amount": 2}, idempotencyKey="k-1")
    assert other.is_error
    assert "another call of 'refund' had this key" in said(other)
    assert len(done(tmp_path)) == 2


def test_unanswered_call_is_in_doubt(tmp_path: Path, ledger: oncely.Ledger) -> None:
    """The tool raises a timeout after the refund: the model is told at once, and each time."""
    server = tool_server.made(tmp_path, ledger)
    for _ in range(2):
        told = said(call(server, "refund", {"order": "o", "amount": 101}))
        assert "Nobody knows whether 'refund' happened" in told
    assert done(tmp_path) == ["refund o 101"]


def test_scope_and_key(tmp_path: Path, ledger: oncely.Ledger) -> None:
    """A tool's own Context is given to it; callers of two scopes do not meet."""
    server = tool_server.made(tmp_path, ledger)
    for user in ("anna", "ben", "anna"):
        result = call(server, "mail", {"to": "x@y"}, user=user)
        assert result.structured_content == {"sent": "mail x@y "}
    assert done(tmp_path) == ["mail x@y "] * 2
    assert {key.consumer for key in (each.key for each in ledger.scan())} == {"mails"}


def test_schema_shows_the_tools_own_arguments(tmp_path: Path, ledger: oncely.Ledger) -> None:
    async def listed() -> dict[str, list[str]]:
        async with Client(tool_server.made(tmp_path, ledger)) as client:
            tools = (await client.list_tools()).tools
            return {each.name: [*each.input_schema["properties"]] for each in tools}

    assert asyncio.run(listed()) == {"refund": ["order", "amount"], "mail": ["to", "text"]}


def test_killed_call_is_in_doubt(tmp_path: Path) -> None:
    """The process dies after the refund: a model that asks again is told not to repeat it."""
    program = ["-m", "tests.integration.tool_server", str(tmp_path)]
    server = StdioServerParameters(command=sys.executable, args=program, cwd=Path.cwd())
    (tmp_path / "die").touch()
    asked = ("refund", {"order": "o", "amount": 1})
    with suppress(Exception):  # How the SDK tells that the server is gone is its own.
        call(stdio_client(server), *asked)
    assert done(tmp_path) == ["refund o 1"]
    (tmp_path / "die").unlink()
    answers: list[str] = []

    def is_decided() -> bool:
        answers.append(said(call(stdio_client(server), *asked)))
        return "is at work on this call" not in answers[-1]

    wait_until(is_decided)
    assert "Nobody knows whether 'refund' happened" in answers[-1]
    assert done(tmp_path) == ["refund o 1"]
