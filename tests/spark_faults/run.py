"""One run: messages go through drivers in all modes at once; these are struck meanwhile."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
from tests.spark_faults.check import BATCHES, PUBLISHED, count_effects, faults, left_of
from tests.spark_faults.driver import Task
from tests.spark_faults.processes import Programs

from oncely.ledger.ledger import open_ledger

_FILES = 3
"""Each is a batch of the stream."""
_COPIES = 0.2
"""Which part of all messages is published for the second time."""
_MOST_DRIVERS = 10
_TABLES = """
    CREATE TABLE transactional (message_id text, fence bigint, attempt bigint, pid bigint);
    CREATE TABLE rows (id text, message_id text, fence bigint);
    CREATE TABLE batches (message_id text, fence bigint, batch_key text);
    CREATE INDEX ON batches (batch_key)
"""
# All tasks of all modes can run at the same time.
_LOCAL = {"spark.master": "local[10,10]"}


class Run:
    """What is drawn follows from `seed`; the rest takes its own time."""

    def __init__(
        self,
        programs: Programs,
        folder: Path,
        ledger_url: str,
        messages: int,
        seed: int,
    ) -> None:
        self.programs = programs
        self.checkpoint = folder / "checkpoint"
        self._folder = folder
        self._ledger_url = ledger_url
        self._messages = messages
        self._random = random.Random(seed)
        self._task = Task(str(folder), ledger_url, str(self.checkpoint), _LOCAL)

    def publish(self) -> None:
        """Make the ledger, the table of effects and the files of messages."""
        ids = [str(number) for number in range(round(self._messages * (1 - _COPIES)))]
        ids += self._random.choices(ids, k=self._messages - len(ids))
        self._random.shuffle(ids)
        (self._folder / PUBLISHED).write_text("\n".join(ids))
        (self._folder / "messages").mkdir()
        for number in range(_FILES):
            lines = [json.dumps({"id": each}) + "\n" for each in ids[number::_FILES]]
            (self._folder / "messages" / f"{number}.json").write_text("".join(lines))
        ledger = open_ledger(self._ledger_url)
        ledger.migrate()
        ledger.close()
        with psycopg.connect(self._ledger_url) as connection:
            connection.execute(_TABLES)

    def tell(self, **changes: Any) -> None:
        """What drivers are told from now on; the names are those of `Task`."""
        self._task = self._task._replace(**changes)

    def driver(self, checkpoint: Path | None = None) -> "subprocess.Popen[bytes]":
        task = self._task._replace(checkpoint=str(checkpoint or self.checkpoint))
        told = [sys.executable, "-m", "tests.spark_faults.driver", json.dumps(task)]
        return self.programs.start(*told)

    def reach(self, driver: "subprocess.Popen[bytes]", share: float) -> None:
        """Wait until about that share of all effects is there, in each mode but batches."""

        def has_come() -> bool:
            assert not driver.poll(), f"the driver has given up:\n{self.programs.last_words()}"
            return all(
                count_effects(mode, self._folder, self._ledger_url) >= effects
                for mode in self._task.modes
                if mode != BATCHES
            )

        effects = round(self._messages * (1 - _COPIES) * share * self._random.uniform(0.8, 1.2))
        self.programs.wait_for(has_come, f"there are no {effects} effects")

    def finish(self, driver: "subprocess.Popen[bytes]") -> None:
        """Until a driver has ended well: one that gives up is started again."""
        for _ in range(_MOST_DRIVERS):
            if self._code(driver) == 0:
                return
            time.sleep(0.5)
            driver = self.driver()
        raise AssertionError(f"no driver ends well:\n{self.programs.last_words()}")

    def _code(self, driver: "subprocess.Popen[bytes]") -> int:
        self.programs.wait_for(lambda: driver.poll() is not None, "a driver does not end")
        return driver.returncode

    def await_open_batch(self, driver: "subprocess.Popen[bytes]") -> None:
        """Wait until a batch is between its offsets and its commit."""

        def is_open() -> bool:
            assert driver.poll() is None, "the driver has ended already"
            return any(
                len(self._numbers(mode, "offsets")) > len(self._numbers(mode, "commits"))
                for mode in self._task.modes
            )

        self.programs.wait_for(is_open, "no batch is open")

    def remove_newest_commit(self) -> None:
        """Forget that the last batch of each mode was committed."""
        for mode in self._task.modes:
            newest = max(self._numbers(mode, "commits"), default=0)
            for name in (f"{newest}", f".{newest}.crc"):
                (self.checkpoint / mode / "commits" / name).unlink(missing_ok=True)

    def remove_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)

    def faults(self) -> list[str]:
        published = (self._folder / PUBLISHED).read_text().split()
        found = []
        for mode in self._task.modes:
            left = left_of(mode, self._folder, self._ledger_url)
            effects = left.effects.values()
            in_doubt = sum(standing.status == "processing" for standing in left.records.values())
            sys.stderr.write(
                f"{mode}: {len({*published})} messages, {sum(map(len, effects))} effects, "
                f"{sum(len(fences) > 1 for fences in effects)} messages more than once, "
                f"{sum(max(fences) > 1 for fences in effects)} taken over, {in_doubt} in doubt\n"
            )
            found += faults(mode, published, left)
        return found

    def _numbers(self, mode: str, name: str) -> list[int]:
        folder = self.checkpoint / mode / name
        return [int(file.name) for file in folder.glob("[0-9]*")] if folder.exists() else []
