"""The Python of a page, section by section: tests run what it says on real servers."""

import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.conditions import wait_until
from tests.processes import exit_of, forked

from oncely.core.message import Message

_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"

Handle = Callable[[Message], object]


class Page:
    """A page of docs/how-to; places that it names are replaced by those of the test."""

    def __init__(self, name: str, places: Mapping[str, str]) -> None:
        self._text = (_HOW_TO / f"{name}.md").read_text()
        self._places = places

    def run(
        self, heading: str, names: Mapping[str, Any], block: int | None = None
    ) -> dict[str, Any]:
        """What is defined when the blocks under a heading, or one, have run after `names`."""
        _, found, rest = self._text.partition(f"# {heading}\n")
        assert found, f"the page has no heading {heading!r}"
        section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
        blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        code = "\n".join(blocks) if block is None else blocks[block]
        for there, here in self._places.items():
            code = code.replace(there, here)
        after = {**names}
        exec(compile(code, f"<{heading}>", "exec"), after)
        return after


class Broker:
    """Deliveries that come again until they are acknowledged, to whichever worker is free."""

    def __init__(self, messages: list[Message]) -> None:
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        for message in messages:
            self._waiting.put(message)
        self._unacknowledged = len(messages)
        self._lock = threading.Lock()

    def drain(self, handle: Handle) -> None:
        """What one worker does, until all is acknowledged: an error gives the message back."""

        def is_done() -> bool:
            self._deliver_next(handle)
            return not self._unacknowledged

        wait_until(is_done, lambda: f"{self._unacknowledged} were never acknowledged", pause_s=0.0)

    def _deliver_next(self, handle: Handle) -> None:
        with suppress(queue.Empty):
            message = self._waiting.get(timeout=0.02)
            try:
                handle(message)
            except Exception:  # noqa: BLE001 - whatever it is, the message is delivered again.
                self._waiting.put(message)
            else:
                with self._lock:
                    self._unacknowledged -= 1

    def drain_by(self, handles: list[Handle]) -> None:
        """A worker for each, at once."""
        errors: list[BaseException] = []

        def work(handle: Handle) -> None:
            try:
                self.drain(handle)
            except BaseException as error:  # noqa: BLE001 - raised below.
                errors.append(error)

        threads = [threading.Thread(target=work, args=[handle]) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Charges:
    """Effects that are counted; every `fails`-th message fails once before it succeeds."""

    def __init__(self, fails: int = 7) -> None:
        self.done: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._fails = fails
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> str:
        with self._lock:
            number = int(message.id.rpartition("-")[2])
            if number % self._fails == 0 and message.id not in self._failed:
                self._failed.add(message.id)
                raise TimeoutError("the bank is away")
            self.done[message.id] += 1
            return f"receipt for {message.id}"


def dies(call: Callable[[Callable[[Message], object]], object]) -> None:
    """In a process of its own, `call` with a charge that kills whoever makes it."""
    assert exit_of(forked(lambda: call(lambda _: os._exit(9)))) == 9


def deliveries(count: int, copies: int = 3) -> list[Message]:
    """Each message several times, the copies apart from each other."""
    return [Message(f"order-{n}", b'{"cents": 99}') for _ in range(copies) for n in range(count)]
