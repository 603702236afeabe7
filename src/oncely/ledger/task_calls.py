"""Single calls of tasks, in group commit."""

import asyncio
from contextlib import suppress
from typing import Any

from oncely.core.commands import Command, Outcome
from oncely.ledger.arguments import to_give_back
from oncely.ledger.group_commit import Call, GroupCommit


async def settled(group_commit: GroupCommit, command: Command) -> Outcome:
    """The outcome of `command`. A task that is cancelled ends at once, and abandons it."""
    call, done = _asked(group_commit, command)
    try:
        await done
    except BaseException:
        group_commit.abandon(call)
        raise
    return call.outcome()


async def settled_to_the_end(group_commit: GroupCommit, command: Command) -> Outcome:
    """The same, but a task that is cancelled ends when `command` is carried out, and what it was
    granted is given back.
    """
    call, done = _asked(group_commit, command)
    try:
        stop = await until_done(done)
    except BaseException:
        group_commit.abandon(call)
        raise
    if stop is None:
        return call.outcome()
    with suppress(Exception, asyncio.CancelledError):
        if (giving_back := to_give_back(call.outcome())) is not None:
            await settled_to_the_end(group_commit, giving_back)
    raise stop


async def until_done(future: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait until `future` is done, also where the task is cancelled meanwhile; return the error
    that the task gets for that. The future's own error stays in it.
    """
    stop = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            stop = error
        except Exception:  # noqa: BLE001, S110 - see above.
            pass
    return stop


def _asked(group_commit: GroupCommit, command: Command) -> "tuple[Call, asyncio.Future[None]]":
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(_: Call) -> None:
        if not done.done():
            done.set_result(None)

    if loop not in group_commit.asked:
        # After all tasks that can run now: a worker that wakes for the first would not see more.
        loop.call_soon(_hand_over, group_commit, loop)
        group_commit.asked[loop] = []
    group_commit.asked[loop].append(asked := (Call(command, tell, loop), done))
    return asked


def _hand_over(group_commit: GroupCommit, loop: asyncio.AbstractEventLoop) -> None:
    asked = group_commit.asked.pop(loop, ())
    group_commit.put(*[call for call, done in asked if not done.cancelled()])
    loop.call_later(group_commit.stall_s, group_commit.hurry)
