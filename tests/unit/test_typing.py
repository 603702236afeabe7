"""`once` keeps the types of what it decorates, and what tests call a handler with is checked: mypy
is asked.
"""

import re
from pathlib import Path

import pytest
from mypy import api

REVEALED = {
    "charge": "def (amount: int, *, currency: str =) -> str",
    "charge_async": "def (amount: int) -> typing.Coroutine[Any, Any, str]",
    "Billing().charge": "def (amount: int) -> float",
    "other_names": "def (amount: int)",
    "redeliver(charge, ...)": "str",
    "redeliver(charge_async, ...)": "str",
}

PROGRAM = """\
from oncely import Ledger, once
from oncely.testing import kill_at, redeliver, runs_once

def decorators(ledger: Ledger) -> None:
    @once(ledger, consumer="billing", key=lambda amount, *, currency="": f"{amount}")
    def charge(amount: int, *, currency: str = "EUR") -> str:
        return currency

    @once(ledger, consumer="billing", key=lambda amount: str(amount), keep_result=True)
    async def charge_async(amount: int) -> str:
        return "charged"

    class Billing:
        @once(ledger, consumer="billing", key=lambda self, amount: str(amount))
        def charge(self, amount: int) -> float:
            return 1.5

    @once(ledger, consumer="billing", key=lambda a: str(a), fingerprint=lambda *all: all)
    def other_names(amount: int) -> None: ...

    reveal_type(charge)
    reveal_type(charge_async)
    reveal_type(Billing().charge)
    reveal_type(other_names)
    reveal_type(redeliver(charge, 10, currency="EUR"))
    reveal_type(redeliver(charge_async, 10))
    kill_at("after_claim", charge, 10)
    runs_once(charge_async, 10)
    runs_once(charge, 10, currency="EUR")
    charge("ten")  # wrong
    kill_at("after_claim", charge, "ten")  # wrong
    redeliver(charge)  # wrong
    runs_once(charge, "ten")  # wrong
    once(ledger, consumer="billing", key=lambda amount: 7.5)  # wrong
"""

# Only the types of the package count here, not those of what it is built on.
SETTINGS = """
[mypy]
strict = true
[mypy-sqlalchemy.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says about the program, line by line."""
    folder = tmp_path_factory.mktemp("typing")
    (folder / "mypy.ini").write_text(SETTINGS)
    (folder / "program.py").write_text(PROGRAM)
    output, errors, _ = api.run(_arguments(folder))
    assert not errors
    return output.splitlines()


def _arguments(folder: Path) -> list[str]:
    settings, cache = folder / "mypy.ini", folder / "cache"
    return [f"--config-file={settings}", f"--cache-dir={cache}", str(folder / "program.py")]


def test_types_are_kept(answer: list[str]) -> None:
    """The decorated function has the arguments and the result that it had before."""
    revealed = [re.findall('Revealed type is "(.*)"$', line) for line in answer]
    assert [types[0] for types in revealed if types] == list(REVEALED.values())


def test_misuse_is_found(answer: list[str]) -> None:
    """A wrong argument, and a key that gives no id, are errors; nothing else is."""
    wrong = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    numbers = [re.findall(r"program\.py:(\d+): error: ", line) for line in answer]
    assert sorted({int(found[0]) for found in numbers if found}) == wrong
