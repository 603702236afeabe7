"""What a run of the tests covers is chosen by the day, evenly."""

import pytest
from tests.turns import in_turn, not_today

TURN = "ONCELY_TEST_TURN"
STORES = ("memory", "sqlite", "postgresql", "mysql", "redis")


@pytest.fixture(autouse=True)
def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run itself covers."""
    monkeypatch.delenv("ONCELY_TEST_ALL", raising=False)


@pytest.mark.parametrize(("count", "days"), [(1, 5), (2, 3)])
def test_every_choice_has_its_turn(count: int, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many days as it takes, whatever the day they begin with; none twice in one."""
    covered: list[str] = []
    for day in range(20_784, 20_784 + days):
        monkeypatch.setenv(TURN, str(day))
        chosen = in_turn("a kill point", STORES, count)
        assert len(set(chosen)) == count
        covered += chosen
    assert set(covered) == set(STORES)


def test_tests_have_their_turn(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many with one mark as the table says, others the next day; one alone, and those without
    the mark, any day.
    """
    items = [
        pytest.Function.from_parent(request.node.parent, name=f"test_{n}", callobj=lambda: None)
        for n in range(7)
    ]
    for item in items[1:]:
        item.add_marker(pytest.mark.in_turn("brokers fail"))
    days = []
    for day in ("20784", "20785"):
        monkeypatch.setenv(TURN, day)
        days.append(not_today(items))
        assert not not_today(items[:2])
    assert [len(day) for day in days] == [3, 3]
    assert set.union(*days) == {*items[1:]}
