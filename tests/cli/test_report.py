"""`oncely report`: the page, as a browser shows it."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from tests.cli.conftest import OnFile, ran_here, with_real_input
from tests.server_fixtures import available
from tests.servers import MissingProgram

from oncely import Key
from oncely.archive.writing import archive
from oncely.report.page import page
from oncely.spark.operations.measures import Measures
from oncely.spark.session import make_active

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from selenium.webdriver import Chrome
    from tests.cli.conftest import InProcess, Main, Project

HOSTILE = "<script>alert(1)</script>"
PLOTS = ["over-time", "distance", "attempts", "handling", "states", "in-doubt"]
LEGEND_PT = 60
"""What a legend has in the same colours as the bars is shorter."""
DAY_S = 86_400
SHOTS = os.environ.get("ONCELY_TEST_SCREENSHOTS")
"""A folder for pictures of the page, for people to look at."""

_CONTRAST = """
function luminance(colour) {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
    const c = part / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
}
function contrast(a, b) {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}
const card = getComputedStyle(document.querySelector("figure")).backgroundColor;
const texts = [...document.querySelectorAll("svg text, p, h2, dt, dd")];
return Math.min(...texts.map(text => {
  const style = getComputedStyle(text);
  return contrast(text instanceof SVGElement ? style.fill : style.color, card);
}));
"""


def open_browser() -> "Chrome":
    """Chromium without a window. Raises MissingProgram."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise MissingProgram(
            "Chromium is not installed; type: apt-get install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1100,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, Service(driver))


@pytest.fixture(scope="module")
def browser() -> Iterator["Chrome"]:
    """Where Chromium is missing, the test is skipped, or fails in CI."""
    browser = available(open_browser)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, shared_spark: "SparkSession") -> Path:
    """The page of a ledger in which everything is, and of its archive."""
    make_active(shared_spark)
    folder = tmp_path_factory.mktemp("report")
    at = OnFile(folder / "ledger.db")
    for number in range(5):
        at.complete("billing", f"old-{number}")
    at.age(40 * DAY_S)
    archive(at.ledger, str(folder / "archive"), "30d")
    at.claim("billing", "<b>doubtful</b>")
    at.claim(HOSTILE, "doubtful")
    for number in range(20):
        at.complete("billing", f"order-{number}")
    at.age(2 * 3_600)
    for number in range(4):
        at.ledger.claim(Key("billing", f"order-{number}"))
    at.fail("billing", "failed", final=True)
    at.fail("billing", "to-be-tried")
    at.claim(HOSTILE, "live")
    at.ledger.close()
    with chdir(folder):
        ran = ran_here(
            *("report", "--ledger", "sqlite:///ledger.db", "--json"),
            *("--archive", "archive", "--to", "report.html"),
        )
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert (said["records"], said["duplicates"]) == (30, 4)
    assert said["standings"]["billing"] == {
        "completed": 25,
        "in_doubt": 1,
        "exhausted": 1,
        "failed": 1,
    }
    assert said["standings"][HOSTILE] == {"in_doubt": 1, "held": 1}
    return folder / "report.html"


@pytest.fixture
def opened(browser: "Chrome", report: Path) -> "Chrome":
    """The page in a browser."""
    browser.get(report.as_uri())
    return browser


def keep_picture(browser: "Chrome", name: str) -> None:
    """Take one of the whole page, where somebody wants to look."""
    if SHOTS:
        browser.set_window_size(1100, 3400)
        browser.save_screenshot(f"{SHOTS}/report-{name}.png")


def numbers(browser: "Chrome", plot: str) -> dict[str, list[str]]:
    """The numbers of a plot: for each first cell the other ones."""
    rows = browser.find_elements(By.CSS_SELECTOR, f"#{plot} tbody tr")
    found = [
        [cell.get_attribute("textContent") or "" for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in rows
    ]
    return {first: rest for first, *rest in found}


def check_drawn(browser: "Chrome", plot: str) -> None:
    """It has a size, bars in a colour of the page, the longest longer than anything in a legend, a
    title and named axes.
    """
    svg = browser.find_element(By.CSS_SELECTOR, f"#{plot} .plot svg")
    assert svg.size["width"] > 400
    assert svg.size["height"] > 100
    bars = browser.execute_script(
        "return [...arguments[0].querySelectorAll('path[style*=\"fill: var(--\"]')].filter(path => "
        "{ const box = path.getBBox(); return box.width > 1 && box.height > 1"
        " && Math.max(box.width, box.height) > arguments[1]; }).length",
        svg,
        LEGEND_PT,
    )
    assert bars >= 1
    assert browser.find_element(By.ID, f"{plot}-title").text
    texts = [text.text for text in svg.find_elements(By.TAG_NAME, "text")]
    assert any(word in " ".join(texts) for word in ("messages", "deliveries", "age of the oldest"))


@pytest.mark.parametrize("plot", PLOTS)
def test_every_plot_is_drawn(opened: "Chrome", plot: str) -> None:
    """Each of the page."""
    check_drawn(opened, plot)


def test_nothing_is_loaded_and_nothing_complains(browser: "Chrome", report: Path) -> None:
    """The page asks for no other file, and the console is empty."""
    browser.get_log("performance")  # type: ignore[no-untyped-call]
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get(report.as_uri())
    events = [
        json.loads(line["message"])["message"]
        for line in browser.get_log("performance")  # type: ignore[no-untyped-call]
    ]
    asked = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_names_are_shown_and_not_run(opened: "Chrome") -> None:
    """A consumer that is called like a script, and an id like a tag."""
    assert opened.execute_script("return document.scripts.length") == 0
    assert HOSTILE in numbers(opened, "states")
    labels = [text.text for text in opened.find_elements(By.CSS_SELECTOR, "#states svg text")]
    assert HOSTILE in labels
    assert "<b>doubtful</b>" in opened.find_element(By.ID, "doubtful").text


def test_the_numbers_are_those_of_the_ledger(opened: "Chrome") -> None:
    """Ledger and archive together, each record once."""
    assert numbers(opened, "states")["billing"] == ["25", "0", "0", "1", "1", "1"]
    assert numbers(opened, "attempts")["1"] == ["30"]
    assert numbers(opened, "distance")["1 h to 6 h"] == ["4"]
    assert sum(int(count) for [count] in numbers(opened, "handling").values()) == 21
    over_time = numbers(opened, "over-time").values()
    assert sum(int(messages) for messages, _ in over_time) == 30
    assert sum(int(duplicates) for _, duplicates in over_time) == 4
    doubtful, age = numbers(opened, "in-doubt")["billing"]
    assert doubtful == "1"
    assert age.startswith("2")
    assert age.endswith(" h")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_in_light_and_dark(opened: "Chrome", scheme: str) -> None:
    """All texts, those of the plots too, stand out from what is behind them."""
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    keep_picture(opened, scheme)
    assert opened.execute_script(_CONTRAST) >= 4.5


@with_real_input
@pytest.mark.timeout(1_800)
def test_real_input(project: "Project", in_process: "InProcess", browser: "Chrome") -> None:
    """The page of real deliveries, of which one is in doubt and all others are in the archive."""
    expected = project.read_real_input()
    project.run()
    at = OnFile(project.folder / "out" / "ledger.db")
    [record] = at.ledger.scan(limit=1)
    at.ledger.forget(record.key)
    at.claim("tests", record.key.message_id)
    at.ledger.close()
    at.age(3_600)
    given = ("--ledger", at.url)
    archive_, page_ = project.folder / "archive", project.folder / "report.html"
    moved = in_process("archive", *given, "--to", str(archive_), "--older-than", "1m")
    assert moved.returncode == 0, moved.stderr
    ran = in_process(
        *("report", *given, "--archive", str(archive_), "--to", str(page_), "--json"), timeout=540
    )
    said = json.loads(ran.stdout)
    duplicates = expected["duplicates"] - record.duplicates
    assert (said["records"], said["duplicates"]) == (expected["unique"], duplicates)
    browser.get(page_.as_uri())
    for plot in PLOTS:
        check_drawn(browser, plot)
    completed, *_, failed, exhausted = numbers(browser, "states")["tests"]
    assert (completed, failed, exhausted) == (f"{expected['unique'] - 1:,}", "0", "0")
    over_time = numbers(browser, "over-time").values()
    assert sum(int(copies) for _, copies in over_time) == duplicates
    keep_picture(browser, "real")


def nothing(**known: Any) -> Measures:
    """What an empty ledger adds up to, but for what is known."""
    return Measures(
        **{
            "at": 1.8e9,
            "records": 0,
            "archived": 0,
            "duplicates": 0,
            "step_s": 60.0,
            "over_time": [],
            "distance": None,
            "attempts": [0] * 11,
            "handling": None,
            "standings": {},
            "oldest_in_doubt": [],
            "in_doubt": [],
            **known,
        }
    )


def test_an_empty_ledger_has_a_page() -> None:
    """It says for each plot that there is nothing to draw."""
    shown = page(nothing(), "bill<ing")
    assert shown.count("<p>None.</p>") == len(PLOTS)
    assert "<svg" not in shown
    assert "Messages of bill&lt;ing" in shown


def test_many_consumers_stay_legible() -> None:
    """The largest are drawn; all are in the table; what cannot be seen is written out."""
    names = [f"consumer {number}" for number in range(30)]
    shown = page(nothing(standings={name: {"completed": 1} for name in [*names, "a\u202eb $x$"]}))
    assert "The 11 with the fewest" in shown
    assert all(f"<td>{name}</td>" in shown for name in names)
    assert "\u202e" not in shown
    assert "a\\u202eb $x$" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "none/report.html"], "there is no folder 'none'"),
        (["--to", "."], "is a folder; name a file"),
        ([], "--to"),
        (["--to", "r.html", "--archive", "none"], "--archive: there is no folder 'none'"),
        (["--to", "r.html", "--ledger", "sqlite:///none.db"], "there is no file 'none.db'"),
    ],
)
def test_mistakes(
    at: OnFile,
    main: "Main",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    """A wrong option is told in one line, before Spark starts."""
    monkeypatch.chdir(tmp_path)
    code, err = main("report", *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
