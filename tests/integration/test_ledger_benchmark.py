"""The benchmark of the ledger, in a small size."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.benchmarks import measured
from tests.server_fixtures import available
from tests.servers import MissingProgram
from tests.turns import in_turn


@pytest.mark.in_turn("long")
@pytest.mark.parametrize(
    "store", in_turn("benchmark of the ledger", ("sqlite", "postgresql", "mariadb", "redis"))
)
def test_every_way_is_measured(store: str, tmp_path: Path) -> None:
    """The statements that a store sends can be recorded, and write all rows when they are sent
    again without the ledger; each way has a rate.
    """

    def cells() -> Any:
        arguments = ["--stores", store, "--rounds", "1", "--seconds", "0.02"]
        found, said = measured("ledger", *arguments, file=tmp_path / "found.json")
        if "is left out" in said:
            raise MissingProgram(said)
        return found

    rates = {cell["load"]: cell["rate"] for cell in available(cells)}
    assert min(rates.values()) > 0
    ways = [name.partition(",")[0] for name in rates]
    assert {"batches of 1", "same statements", "by hand"} <= {*ways}
