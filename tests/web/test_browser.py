"""The dashboard in Chromium: legible, to be used by keyboard and screen reader, alive."""

import hashlib
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from selenium.common.exceptions import (
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from tests.browsers import open_browser
from tests.conditions import LIMIT_S
from tests.records import granted
from tests.server_fixtures import available
from tests.turns import in_turn
from tests.web.conftest import HOSTILE, PAGES, Trouble, as_user

from oncely import Key, Ledger, Message, ops
from oncely.core.activity import Run, Worker
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.testing import ManualClock
from oncely.web import contents, dashboard
from oncely.web.rendering import render
from oncely.web.report import report

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

AXE = "axe-core@4.14.1"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDTHS = {360: 740, 1440: 900}
RATES = ops.Rates(1, 0, 0, 0, 0, None, None, None)
DEADLINE_S = 120


@pytest.fixture(scope="module")
def browser() -> Iterator["Chrome"]:
    """Where Chromium is missing, the test is skipped, or fails in CI."""
    browser = available(open_browser)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def axe(request: pytest.FixtureRequest) -> str:
    """The source of axe-core, which looks for what keeps people out; fetched once by npm."""
    assert request.config.cache is not None
    file = request.config.cache.mkdir("axe-core") / f"{AXE}.js"
    if not file.exists():
        _fetch(file)
    source = file.read_bytes()
    assert hashlib.sha256(source).hexdigest() == AXE_SHA256
    return source.decode()


def _fetch(file: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("axe-core is fetched by npm, which is not installed")
    folder = file.parent
    command = ["npm", "pack", "--silent", AXE]
    fetched = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"npm could not fetch {AXE}: {fetched.stderr.strip()[-200:]}")
    with tarfile.open(folder / fetched.stdout.split()[-1]) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        file.write_bytes(source.read())


@contextmanager
def served(trouble: Trouble, auth: Any) -> Iterator[str]:
    """The dashboard on a free port; its address."""
    app = dashboard(
        trouble.ledger,
        auth=auth,
        name="postgresql://oncely:***@db/ledger",
        probes={"billing": lambda _: "unknown"},
    )
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    # What the browser asks before the server runs waits for it, and is not refused.
    listening.listen()
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trouble]:
    """A ledger with something on every page, and texts that are long or hostile."""
    file = tmp_path_factory.mktemp("crowd") / "ledger.db"
    store = SqlStore(sqlite_engine(file), clock=(clock := ManualClock()))
    store.migrate()
    trouble = Trouble(store, clock)
    claim = granted(trouble.ledger.claim(Key("billing", "order-0"), "60s"))
    trouble.ledger.keep_step(claim, "charge", {"receipt": 7})
    trouble.doubt("order-1", "order-2", "a-rather-long-message-id-" * 6)
    trouble.doubt(HOSTILE, consumer="notification-service-of-the-shop")
    trouble.fail(Message("order-3", b'{"to": "anna"}', "order.placed", {"trace": "on"}))
    trouble.fail(Message(HOSTILE, HOSTILE.encode(), "order.placed"), error=f"{HOSTILE} " * 20)
    trouble.defer("order-5")
    trouble.wait(Message("order-4", b"{}", "order.placed"))
    clock.advance(300)
    _busy(trouble.ledger)
    yield trouble
    trouble.ledger.close()


def _busy(ledger: Ledger) -> None:
    """Workers, runs, an audit and a message that was refused."""
    for number in range(3):
        ledger.complete(granted(ledger.claim(Key("billing", f"done-{number}"))))
    ledger.fail(granted(ledger.claim(Key("billing", "again"))), HOSTILE, final=True)
    ops.reset(ledger, ops.find(ledger, "again"), by=HOSTILE, why="paid by hand " * 20)
    refused = WaitingMessage("r1", "mails", Message("r1"), Key("shop", "r"), is_set_aside=True)
    ledger.mailbox.keep([refused])
    ledger.recorder.tell()
    silent = Worker("w1", "consumer", HOSTILE, "shop-2", 4711, "1.0", 0.0, 0.0, 2)
    ledger.operations.keep_worker(silent, [])
    # Killed long ago, with claims of messages that are in doubt now.
    killed = silent._replace(id="w2", consumer="billing")
    ledger.operations.keep_worker(killed, [])
    totals = {"received": 48_000, "handled": 47_988, "quarantined": {"missing_id": 7, "odd": 5}}
    ledger.operations.keep_run(Run("r1", "nightly", "billing", 1.0, 61.0, totals))
    ledger.operations.keep_run(Run("r2", HOSTILE, "billing", 2.0, None, {}, "no disk " * 40))


@pytest.fixture(scope="module")
def site(crowd: Trouble) -> Iterator[str]:
    """The dashboard for an operator."""
    with served(crowd, as_user()) as url:
        yield url


def paths(crowd: Trouble, name: str) -> Sequence[str]:
    """Some of all pages, those of one message and one letter too."""
    letter = next(iter(crowd.ledger.dead())).id
    one = "/message?consumer=billing&id=order-1"
    every = [*PAGES, f"/letter?id={letter}", one, "/message?id=order-5", "/messages?state=odd"]
    return in_turn(f"pages, {name}", every, count=4)


@pytest.fixture(params=in_turn("colours", ("light", "dark")))
def scheme(request: pytest.FixtureRequest, browser: "Chrome") -> str:
    """The colours that the browser's user prefers."""
    feature = {"name": "prefers-color-scheme", "value": request.param}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    return str(request.param)


@pytest.fixture(params=[*WIDTHS])
def width(request: pytest.FixtureRequest, browser: "Chrome") -> int:
    """Of the window, from a small telephone to a screen."""
    size = {"width": request.param, "height": WIDTHS[request.param]}
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1, "mobile": False}
    )
    return int(request.param)


def violations(browser: "Chrome", axe: str) -> list[tuple[str, list[str]]]:
    """What axe-core finds wrong with the page that is open."""
    browser.execute_script(axe)
    result = browser.execute_async_script(
        "axe.run({runOnly: arguments[0]}).then(arguments[1])", RULES
    )
    assert len(result["passes"]) > 20
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in result["violations"]]


def patiently(browser: "Chrome") -> "WebDriverWait[Chrome]":
    """Waits for what a page shows, also while one page takes the place of another."""
    gone = [StaleElementReferenceException, NoSuchElementException]
    return WebDriverWait(browser, LIMIT_S, ignored_exceptions=gone)


def test_nobody_is_kept_out(
    browser: "Chrome", axe: str, site: str, crowd: Trouble, scheme: str, width: int
) -> None:
    """axe-core finds no violation of WCAG 2.2 A and AA on a page, light or dark, narrow or
    wide; nothing but tables is wider than the window; the console has no complaint.
    """
    found = {}
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    for path in paths(crowd, f"{width}"):
        browser.get(site + path)
        found[path] = violations(browser, axe)
        page_width = browser.execute_script("return document.documentElement.scrollWidth")
        assert page_width <= width, path
    assert {path: each for path, each in found.items() if each} == {}
    complaints = browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert [each["message"] for each in complaints if "400 (" not in each["message"]] == []


def show_a_day(browser: "Chrome", crowd: Trouble, site: str, at: int) -> None:
    """The chart of a day that began then, in the place of a page."""
    began = at // 300 * 300
    points = [ops.Point(began + 300 * place, 200, 5, 30, 1) for place in range(288)]
    found = ops.FoundActivity({}, {"billing": RATES}, points)
    page = render("parts/last_day.html", contents.last_day(crowd.ledger, found, began))
    browser.get(f"{site}/")
    browser.execute_script("document.querySelector('main').innerHTML = arguments[0]", str(page))


@pytest.mark.usefixtures("width")
def test_hours_are_legible(browser: "Chrome", crowd: Trouble, site: str) -> None:
    """The hours below the chart stand beside one another, and none is cut off, at any time of day
    and on a telephone, too.
    """
    for number in range(4):
        show_a_day(browser, crowd, site, 1_700_000_000 + number * 3_600)
        left, *ends = browser.execute_script(
            "const box = each => each.getBoundingClientRect();"
            "const words = [...document.querySelectorAll('.axis text')].map(box);"
            "const axis = box(document.querySelector('.axis'));"
            "return [axis.left, ...words.flatMap(each => [each.left, each.right]), axis.right]"
        )
        assert len(ends) in (11, 13)
        assert [left, *ends] == sorted([left, *ends])


@pytest.mark.usefixtures("width")
def test_a_column_says_its_numbers(browser: "Chrome", crowd: Trouble, site: str) -> None:
    """The chart has an axis with values; a column that is touched says what was counted in it, and
    nothing is cut off.
    """
    show_a_day(browser, crowd, site, 1_700_000_000)
    chart = browser.find_element(By.CLASS_NAME, "chart")
    values = [each.text for each in chart.find_elements(By.CSS_SELECTOR, ".values span")]
    assert values == ["3,000", "1,500", "0"]
    column = chart.find_elements(By.CLASS_NAME, "column")[2]
    told = column.find_element(By.CLASS_NAME, "told")
    assert not told.is_displayed()
    column.click()
    assert told.is_displayed()
    counted = "2,400 handled, 360 duplicates, 60 failed attempts, 12 in doubt"
    assert told.text.partition(": ")[2] == counted
    assert told.rect["y"] + told.rect["height"] <= column.rect["y"]


BROKEN = """
const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
const broken = [], range = document.createRange();
while (texts.nextNode()) {
  for (const word of texts.currentNode.data.matchAll(/[A-Za-z0-9]{2,16}(?![A-Za-z0-9])/g)) {
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    const tops = new Set([...range.getClientRects()].map(each => Math.round(each.top)));
    if (tops.size > 1) broken.push(word[0]);
  }
}
return broken;
"""


@pytest.mark.usefixtures("width")
def test_words_are_not_broken(browser: "Chrome", site: str) -> None:
    """A name goes on in the next line between its words, and not within one."""
    for path in ("/", "/in-doubt", "/workers", "/consumers", "/outbox"):
        browser.get(site + path)
        assert browser.execute_script(BROKEN) == [], path


WIDER = """
const inside = element => element.closest("pre, thead, .unseen") === null;
return [...document.querySelectorAll("main *")].filter(inside)
  .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1)
  .map(each => each.outerHTML.slice(0, 200));
"""
"""Whatever has to be scrolled sideways to be read, but for a body or traceback."""


@pytest.mark.parametrize("width", [min(WIDTHS)], indirect=True)
@pytest.mark.usefixtures("width")
def test_nothing_is_scrolled_sideways_on_a_telephone(
    browser: "Chrome", site: str, crowd: Trouble
) -> None:
    """Tables are read from top to bottom there, each value beside the word for it."""
    for path in paths(crowd, "a telephone"):
        browser.get(site + path)
        assert browser.execute_script(WIDER) == [], path


@pytest.fixture(scope="module")
def report_url(crowd: Trouble, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of that ledger, as a file."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    found = ops.overview(crowd.ledger)
    file.write_text(report(crowd.ledger, found, "postgresql://oncely:***@db/ledger"), "utf-8")
    return file.as_uri()


def test_report_keeps_nobody_out(
    browser: "Chrome", axe: str, report_url: str, scheme: str, width: int
) -> None:
    """axe-core finds no violation in the report; nothing is wider than the window; the console has
    no complaint of the style sheet.
    """
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get(report_url)
    for closed in browser.find_elements(By.TAG_NAME, "summary"):
        closed.click()
    assert violations(browser, axe) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    if width == min(WIDTHS):
        assert browser.execute_script(WIDER) == []
    # Its style sheet is the one that the policy allows.
    assert browser.find_element(By.CLASS_NAME, "bar").value_of_css_property("display") == "block"
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_keyboard(browser: "Chrome", site: str, scheme: str) -> None:
    """The first key leads past the links to the content; whatever has the focus shows it; each
    thing that can be used is reached.
    """
    browser.get(f"{site}/in-doubt")
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to the content"
    assert skip.rect["x"] >= 0
    skip.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "main"
    browser.get(f"{site}/in-doubt")
    reached = []
    for _ in range(60):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        element = browser.switch_to.active_element
        if element.tag_name == "body":
            break
        outline = element.value_of_css_property("outline-style")
        assert outline == "solid", element.get_attribute("outerHTML")
        reached.append(element)
    usable = "main a[href], main button, main input:not([type=hidden]), header a"
    assert len(reached) >= len(browser.find_elements(By.CSS_SELECTOR, usable))


def test_decided_within_four_clicks(browser: "Chrome", axe: str, scheme: str) -> None:
    """From the overview, all in doubt are settled by four clicks and a reason; nobody is kept out
    of the pages between.
    """
    trouble = Trouble(MemoryStore(clock := ManualClock()), clock)
    trouble.doubt("order-1", "order-2")
    with served(trouble, as_user()) as url:
        browser.get(url)
        for selector in (".stuck a", "input[name=every]", "button[value=not-happened]"):
            browser.find_element(By.CSS_SELECTOR, selector).click()
        assert violations(browser, axe) == []
        browser.find_element(By.NAME, "why").send_keys("the bank says no")
        browser.find_element(By.CSS_SELECTOR, "main button").click()
        patiently(browser).until(lambda it: "2 settled" in it.find_element(By.TAG_NAME, "h1").text)
        assert violations(browser, axe) == []
        browser.get(f"{url}/in-doubt")
        assert "Waiting for their sender" in browser.find_element(By.TAG_NAME, "main").text
        assert violations(browser, axe) == []
    found = trouble.ledger.counts()
    assert sum(found.values()) == 2
    trouble.ledger.close()


def test_refreshed_in_place(browser: "Chrome", axe: str) -> None:
    """The overview follows the ledger while it stands open; other pages show more in place."""
    trouble = Trouble(MemoryStore(clock := ManualClock()), clock)
    with served(trouble, None) as url:
        browser.get(url)
        assert violations(browser, axe) == []
        assert "Nothing is stuck" in browser.find_element(By.TAG_NAME, "h1").text
        browser.execute_script("window.stays = true")
        trouble.doubt(*(f"order-{number:03}" for number in range(120)))
        wait = patiently(browser)
        wait.until(lambda it: "In doubt 120" in it.find_element(By.ID, "tabs").text)
        assert "120 in doubt" in browser.find_element(By.ID, "live").text
        assert browser.execute_script("return window.stays")
        browser.get(f"{url}/in-doubt")
        browser.execute_script("window.stays = true")
        browser.find_element(By.LINK_TEXT, "Show more").click()
        wait.until(lambda it: "order-119" in it.find_element(By.CLASS_NAME, "rows").text)
        assert browser.execute_script("return window.stays")
        assert "limit=1000" in browser.current_url
    trouble.ledger.close()


def test_no_script_of_others_runs(browser: "Chrome", site: str, crowd: Trouble) -> None:
    """Ids and bodies that are scripts are read, and do not run."""
    letters = [each.id for each in crowd.ledger.dead() if each.key.message_id == HOSTILE]
    for path in ("/in-doubt", "/failed", f"/letter?id={letters[0]}"):
        browser.get(site + path)
        assert "<script>alert('1')</script>" in browser.find_element(By.TAG_NAME, "main").text
        assert browser.find_elements(By.CSS_SELECTOR, "main script, main img") == []
