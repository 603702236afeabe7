"""The starter of a pipeline: a file that is delivered twice is handled once."""

from pathlib import Path

import pytest
from tests.examples.running import Starter

PLACES = ("in the input", "already in the ledger")


def report(said: str) -> dict[str, str]:
    """The rows of the table at the end."""
    rows = (line.rstrip().rpartition(" ") for line in said.splitlines())
    return {name.strip(): count for name, _, count in rows}


@pytest.mark.in_turn("a Spark of its own")
def test_spark_pipeline(tmp_path: Path) -> None:
    """Four lines are three letters, whether they come once or again under another name."""
    starter = Starter("spark_pipeline", tmp_path)
    first, again = (report(starter.make()) for _ in range(2))
    kinds = ("received", "handled", *(f"duplicates {place}" for place in PLACES))
    assert [first[kind] for kind in kinds] == ["4", "3", "1", "0"]
    assert [again[kind] for kind in kinds] == ["4", "0", "0", "4"]
    letters = ["letter-1 anna", "letter-2 ben", "letter-3 carla"]
    assert sorted(starter.lines("letters.txt")) == letters
