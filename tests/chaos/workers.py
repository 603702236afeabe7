"""Workers: processes that are killed, frozen and stopped, and started again."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.worker import LEASE_S, Task
from tests.conditions import LIMIT_S

COUNT = 3
_ROOT = Path(__file__).parents[2]
_FROZEN_S = 1.5 * LEASE_S
_LOG_TAIL = 4000
# Not from here: whoever is frozen is to go on, and see that its input has ended, even if the test
# dies meanwhile.
_FREEZE = 'kill -s STOP "$1"; sleep "$2"; kill -s CONT "$1"'


class Workers:
    """Processes that are of which another takes the place of each that ends."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._log = Path(task.folder) / "workers.err"
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all."""
        self.all = [self._started(place) for place in range(COUNT)]

    def at_work(self) -> list[int]:
        """The places of those that have taken effect."""
        folder = Path(self._task.folder)
        return [n for n, each in enumerate(self.all) if any(folder.glob(f"*-{each.pid}.log"))]

    def check(self) -> None:
        """Raises AssertionError where one has ended by itself: none gives up, whatever is away."""
        ended = [process.returncode for process in self.all if process.poll() is not None]
        assert not ended, f"workers have ended, {ended}:\n{self.last_words()}"

    def kill(self, place: int) -> None:
        """Kill one; another takes its place."""
        self.all[place].kill()
        self._replace(place)

    def freeze(self, place: int) -> None:
        """Stop one for longer than its leases last, and let it go on."""
        pid, frozen_s = str(self.all[place].pid), str(_FROZEN_S)
        subprocess.run(
            ["/bin/sh", "-c", _FREEZE, "freeze", pid, frozen_s], check=True, start_new_session=True
        )

    def stop(self, place: int) -> None:
        """Tell one to stop; another takes its place."""
        self._end([self.all[place]])
        self._replace(place)

    def drain(self) -> None:
        """Tell all to stop, and start others that drain the queues."""
        self._end(self.all)
        self.close()
        self._task = self._task._replace(drain="drain")
        self.start()

    def are_done(self) -> bool:
        """Whether these have ended. Raises AssertionError where one has not ended well."""
        codes = [process.poll() for process in self.all]
        assert not any(codes), f"workers have ended, {codes}:\n{self.last_words()}"
        return None not in codes

    def close(self) -> None:
        """Leave none."""
        for process in self.all:
            process.kill()
            process.communicate()

    def last_words(self) -> str:
        """What they said last."""
        return self._log.read_text(errors="replace")[-_LOG_TAIL:]

    def _started(self, place: int) -> "subprocess.Popen[bytes]":
        task = self._task._replace(place=str(place))
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker", *task],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stderr=log,
            )

    def _replace(self, place: int) -> None:
        """Start another for one that has ended."""
        self.all[place].communicate()
        self.all[place] = self._started(place)

    def _end(self, processes: "Sequence[subprocess.Popen[bytes]]") -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            self._wait_for(process)

    def _wait_for(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a worker does not end:\n{self.last_words()}") from None
        assert code == 0, f"a worker has ended by itself:\n{self.last_words()}"
