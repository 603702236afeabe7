"""The plugin as users meet it: pytest in a process of its own, which finds it by itself."""

import re
from pathlib import Path

import pytest
from tests.processes import printed

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[2] / "docs"
# Plugins of this environment that are not what is tested here, and warn.
QUIET = ("-p", "no:cacheprovider", "-W", "error")

UNSAFE = """
    import oncely, pytest
    from oncely.testing import POINTS, kill_at, redeliver, reached, runs_once

    ORDER = oncely.Message("order-17")

    @pytest.fixture
    def log(tmp_path):
        log = tmp_path / "log"
        log.touch()
        return log

    def write(log):
        with log.open("a") as file:
            file.write("x")

    @pytest.mark.parametrize("point", POINTS)
    def test_survives(ledger, log, point):
        charge = oncely.once(ledger, consumer="billing", key=lambda order: order.id)(
            lambda order: write(log)
        )
        kill_at(point, charge, ORDER)
        redeliver(charge, ORDER)
        assert log.read_text() == "x"

    def test_charged(log):
        def charge(order):
            write(log)
            reached("charged")
        kill_at("charged", charge, ORDER)
        redeliver(charge, ORDER)
        assert log.read_text() == "x"

    def test_runs_once(log):
        runs_once(lambda order: write(log), ORDER)
"""


def _page() -> str:
    """All the Python of the page, as one file of tests."""
    text = (DOCS / "how-to" / "testing-handlers.md").read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.in_turn("long")
def test_page_runs(pytester: pytest.Pytester) -> None:
    """What the page tells a user to type passes without a warning, and without asyncio plugins."""
    pytester.makepyfile(test_page=_page())
    result = pytester.runpytest_subprocess(*QUIET, "-p", "no:asyncio", "-p", "no:anyio")
    result.assert_outcomes(passed=5 + 1 + 1 + 3 + 3 + 4)


@pytest.mark.in_turn("long")
def test_page_runs_under_xdist(pytester: pytest.Pytester) -> None:
    """Its first example does so in workers of pytest-xdist, which have threads."""
    pytester.makepyfile(test_page=_page())
    result = pytester.runpytest_subprocess(*QUIET, "-n", "2", "-k", "charges_once or charge_once")
    result.assert_outcomes(passed=5 + 1)


def test_unsafe_handlers_fail(pytester: pytest.Pytester) -> None:
    """An effect outside the ledger that repeats is found: by a crash, and by a second delivery."""
    pytester.makepyfile(test_bare=UNSAFE)
    result = pytester.runpytest_subprocess(*QUIET)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_survives[[]before_completed]*",
            "FAILED *::test_charged*",
            "FAILED *::test_runs_once*",
            "E *assert 'xx' == 'x'",
            "E *: <lambda> ran in each of 5 deliveries * it asked no ledger; decorate it *",
        ]
    )


def test_own_fixtures(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """A user's `ledger` goes before the plugin's; a user's `ledger_url` says where that one is."""
    file = tmp_path / "own.db"
    pytester.makepyfile(
        **{
            "mine/conftest.py": """
                import pytest
                @pytest.fixture
                def ledger(): return "mine"
            """,
            "mine/test_mine": "def test_it(ledger): assert ledger == 'mine'",
            "url/test_url": f"""
                import pytest
                @pytest.fixture
                def ledger_url(): return "sqlite:///{file}"
                def test_it(ledger): assert not ledger.problems()
            """,
        }
    )
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=2)
    assert file.exists()


def test_time_ends_with_the_test(pytester: pytest.Pytester) -> None:
    """The time that one test lets pass is not passed for the next."""
    pytester.makepyfile(
        """
        import time
        import oncely, pytest
        from oncely.testing import pass_time

        MEMORY = oncely.open_ledger("memory://")

        @pytest.mark.parametrize("n", range(2))
        def test_passes(ledger, n):
            for each in (ledger, MEMORY):
                assert abs(each.now() - time.time()) < 60
            pass_time("2h")
            for each in (ledger, MEMORY):
                assert 7100 < each.now() - time.time() < 7300
        """
    )
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=2)


def test_ledger_is_closed(pytester: pytest.Pytester) -> None:
    """The ledger of a test is closed when the test is over."""
    pytester.makepyfile(
        """
        closed = []

        def test_one(ledger):
            close = ledger.close
            ledger.close = lambda: (closed.append(ledger), close())

        def test_two():
            assert len(closed) == 1
        """
    )
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=2)


def test_costs_nothing(pytester: pytest.Pytester) -> None:
    """Who does not use the plugin loads nothing of oncely with it."""
    pytester.makepyfile(
        """
        import sys
        def test_it(request):
            assert request.config.pluginmanager.has_plugin("oncely")
            assert not [n for n in sys.modules if n.split(".")[0] in ("oncely", "sqlalchemy")]
        """
    )
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=1)


def test_light_without_pytest() -> None:
    """A program whose handler tells of its points needs neither pytest nor a database for that."""
    program = (
        "import sys; from oncely.testing import reached, POINTS; reached('charged'); "
        "print([n for n in ('pytest', 'sqlalchemy', 'asyncio') if n in sys.modules])"
    )
    assert printed(program) == "[]\n"


def test_suites_show_values(pytester: pytest.Pytester) -> None:
    """A failed assert of a conformance suite shows what it compared, in every suite there is."""
    pytester.makepyfile(
        """
        import importlib, pathlib, oncely.testing
        SUITES = sorted(pathlib.Path(oncely.testing.__file__).parent.glob("*_suite.py"))
        def test_it():
            assert len(SUITES) == 2
            for file in SUITES:
                suite = importlib.import_module(f"oncely.testing.{file.stem}")
                assert type(suite.__loader__).__name__ == "AssertionRewritingHook", file
        """
    )
    pytester.runpytest_subprocess(*QUIET).assert_outcomes(passed=1)
