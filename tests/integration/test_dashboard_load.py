"""The dashboard under load, while a consumer works: the benchmark of it, in a small size."""

from pathlib import Path

import pytest
from tests.integration.benchmarks import measured


@pytest.mark.in_turn("long")
def test_every_request_is_answered(postgresql_url: str, tmp_path: Path) -> None:
    """A hundred requests at once, over all pages, are all answered with 200; the consumer goes on
    meanwhile.
    """
    arguments = ["--rounds", "1", "--seconds", "1", "--url", postgresql_url]
    found, _ = measured("dashboard_load", *arguments, file=tmp_path / "found.json")
    for load in found:
        assert load["wrong"] == {}
        assert len(load["took_s"]) >= 100
        assert min(load["beside"]) > 0
