"""Each page: what it says of a ledger in trouble, and its twin on the command line."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from typing import NoReturn

import pytest
from tests.bounded import BoundedStore
from tests.docs.commands import typed
from tests.records import granted
from tests.web.conftest import HOSTILE, PAGES, Reader, Trouble, as_user, text

from oncely import Key, Ledger, Message, open_ledger, ops
from oncely.core.errors import StoreUnavailable
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import Listing
from oncely.web import contents, dashboard


def test_overview_of_trouble(filled: Trouble, operator: Reader) -> None:
    """In one line: what is stuck, how many, for how long; each leads to its page."""
    filled.clock.advance(120)
    page = operator.get("/")
    assert "<title>stuck: 2 in doubt (oldest: 1 h 2 min); 1 dead letter; " in page
    assert '<a href="/in-doubt">2 in doubt (oldest: 1 h 2 min)</a>' in page
    assert '<a href="/failed">1 dead letter</a>' in page
    assert '<a href="/outbox">1 deferred message not sent (oldest: 2 min)</a>' in page
    said = text(page)
    assert "in doubt 2 oldest 1 h 2 min waiting for their sender 0 dead letters 1" in said
    assert "waiting to be sent 1 oldest 2 min" in said
    assert "oldest due" not in said
    filled.clock.advance(540)
    assert "waiting for a retry 1 oldest due 1 min ago" in text(operator.get("/"))


def test_tabs_count(operator: Reader) -> None:
    """A tab says how many messages stand on its page, but where the ledger is not asked."""
    for path in PAGES:
        tabs = text(operator.get(path).partition("<main")[0])
        assert "In doubt 2 Failed 1 Waiting 1 Outbox 1 Queues Consumers" in tabs
    assert "In doubt Failed" in text(operator.get("/message", 404, id="none"))


def test_overview_of_peace(trouble: Trouble) -> None:
    """A ledger in which nothing is stuck says so."""
    page = Reader(dashboard(trouble.ledger)).get("/")
    assert "Nothing is stuck" in page
    assert "The ledger has no records yet." in page


def test_nobody_is_told_to_sign_in(trouble: Trouble) -> None:
    """Whoever is not signed in reads that, and not that the dashboard asks nobody."""
    stranger = Reader(dashboard(trouble.ledger, auth=lambda _: None))
    page = text(stranger.client.get("/").text)
    assert "not signed in" in page
    assert "You are not signed in, or may not look at this." in page
    assert "asks nobody" not in page
    assert "asks nobody" in Reader(dashboard(trouble.ledger)).get("/")


def test_refresh_can_be_stopped(operator: Reader) -> None:
    """The overview is refreshed where scripts run, and does not move for whoever wants that."""
    assert 'hx-trigger="every 5s"' in operator.get("/")
    assert "hx-trigger" not in operator.get("/", refresh="off")


def test_failed(filled: Trouble, operator: Reader) -> None:
    """A dead letter is opened with its error, traceback, headers and body."""
    [number] = filled.fail()
    page = operator.get("/failed")
    assert f'<a href="/letter?id={number}">{number}</a>' in page
    opened = text(operator.get("/letter", id=str(number)))
    assert 'Body {"to": "anna"}' in opened
    assert "header trace on" in opened
    assert "Traceback (most recent call last):" in opened
    assert "ValueError: no such customer" in opened


def test_waiting(filled: Trouble, operator: Reader) -> None:
    """What waits for its retry says at what time that is and how far off, and the last line of its
    error.
    """
    page = text(operator.get("/waiting"))
    due = r"order-4 shop order \d{4}-\d\d-\d\d [\d:]+ UTC \(in 10 min\) 1 OSError: the bank is away"
    assert re.search(due, page)
    filled.clock.advance(660)
    assert "overdue for 1 min" in text(operator.get("/waiting"))


def test_buttons_stand_above_their_table(operator: Reader) -> None:
    """The buttons for a group cannot be taken for those of the list below it: each row of buttons
    stands above the table that it is about.
    """
    page = operator.get("/failed")
    places = [
        page.index(text) for text in ("Retry the group", "failed alike", ">Retry…", "order in")
    ]
    assert places == sorted(places)


def test_outbox_and_queues(filled: Trouble, operator: Reader) -> None:
    """The outbox says what waits, for how long, and what sends it; queues are listed."""
    filled.clock.advance(120)
    assert "waiting to be sent 1 oldest 2 min" in text(operator.get("/outbox"))
    assert "oncely relay" in operator.get("/outbox")
    assert "Nothing waits in a queue" in operator.get("/queues")


def test_consumers(operator: Reader) -> None:
    """A row for each, with how long its records are kept."""
    page = text(operator.get("/consumers"))
    assert re.search(r"billing .*2 in doubt of billing", page)
    assert "30 d" in page


def test_message_in_doubt(filled: Trouble, operator: Reader) -> None:
    """One message: record, fence, attempts, steps and result, what waits to be sent."""
    page = text(operator.get("/message", id="order-1", consumer="billing"))
    assert "in doubt for consumer billing" in page
    assert "attempts 1 fence 1" in page
    page = text(operator.get("/message", id="order-5"))
    assert '{"receipt": "order-5"}' in page
    assert "order-5-receipt mails" in page
    page = text(operator.get("/message", id="order-4"))
    assert "in 10 min" in page
    assert "after 1 attempt." in page
    assert "Body {}" in page
    assert '{"to": "anna"}' in text(operator.get("/message", id="order-3"))
    filled.ledger.complete(granted(filled.ledger.claim(Key("billing", "done"))), {"receipt": 7})
    assert 'result {"receipt": 7}' in text(operator.get("/message", id="done"))


def test_story_of_a_dead_letter(trouble: Trouble) -> None:
    """A dead letter stands where its last attempt failed; nothing more of it is due."""
    trouble.wait(Message("order-4", b"{}"))
    trouble.clock.advance(660)
    trouble.fail(Message("order-5", b"{}"))
    chapters = ops.story(trouble.ledger, Key("shop", "order-4")).chapters
    [letter] = [each for each in chapters if each.what == "dead letter"]
    assert letter.at == trouble.ledger.now()
    assert chapters[0].what == "first seen"
    page = text(Reader(dashboard(trouble.ledger)).get("/message", id="order-4"))
    assert re.search(r"\(0 s ago\) dead letter id \d+, attempts 0, error Exhausted", page)


def test_story_of_a_change_of_many(trouble: Trouble) -> None:
    """Each message that was changed together with others tells of it, not only the first."""
    keys = [Key("billing", f"order-{number}") for number in range(3)]
    trouble.doubt(*(key.message_id for key in keys))
    found = [*trouble.ledger.find_many(keys).values()]
    ops.reset(trouble.ledger, found, by="anna", why="the bank is back")
    trouble.clock.advance(60)
    reader = Reader(dashboard(trouble.ledger))
    for key in keys:
        page = text(reader.get("/message", id=key.message_id))
        assert "(1 min ago) retried by anna, why the bank is back" in page


def test_story_of_discarded_letters(trouble: Trouble) -> None:
    """Where a dead letter is gone, it says who has discarded several of its consumer since: of
    these, the audit names the first.
    """
    [_, *others] = trouble.fail(*(Message(f"order-{number}") for number in range(3)))
    ops.discard_letters(trouble.ledger, others, by="anna", why="test orders")
    reader = Reader(dashboard(trouble.ledger))
    page = text(reader.get("/message", id="order-2"))
    perhaps = "perhaps this message was one of 2; only the first, 'order-1', is named, by anna"
    assert f"dead letter discarded {perhaps}, why test orders" in page
    first = text(reader.get("/message", id="order-1"))
    assert "dead letter discarded by anna, why test orders" in first
    # What still has its dead letter, or came later, was not among them.
    trouble.clock.advance(60)
    [_, later] = trouble.fail(Message("order-3"))
    ops.discard_letters(trouble.ledger, [later], by="anna")
    for id_ in ("order-0", "order-1", "order-3"):
        assert "perhaps" not in text(reader.get("/message", id=id_))


def test_message_of_two_consumers(filled: Trouble, operator: Reader) -> None:
    """Where several have one of an id, one is chosen."""
    filled.doubt("order-3")
    page = operator.get("/message", id="order-3")
    assert '<a href="/message?consumer=billing&amp;id=order-3">billing</a>' in page
    assert '<a href="/message?consumer=shop&amp;id=order-3">shop</a>' in page


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"text": "order-1"}, ["order-1"]),
        ({"text": "rder-1"}, []),
        ({"text": "rder-1", "how": "contains"}, ["order-1"]),
        ({"consumer": "billing", "state": "in doubt"}, ["order-1", "order-2"]),
        ({"state": "exhausted"}, ["order-3"]),
        ({"state": "processing", "older_than": "30m"}, ["order-1", "order-2"]),
        ({"text": "nothing"}, []),
    ],
)
def test_search(operator: Reader, query: dict[str, str], ids: list[str]) -> None:
    """Records are found by the beginning or a part of the id, consumer, state and age."""
    page = operator.get("/messages", **query)
    assert re.findall(r'href="/message\?consumer=\w+&amp;id=([^"]*)"', page) == ids
    assert ("No matching records." in page) == (not ids)


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("/messages", {"older_than": "soon"}, "'soon' is not a duration"),
        ("/messages", {"state": "odd"}, "'odd' is none of"),
        ("/messages", {"consumer": "nobody"}, "no records of consumer 'nobody'"),
        ("/messages", {"text": "a\0"}, "begins with NUL"),
        ("/failed", {"consumer": "nobody"}, "records of consumer 'nobody'"),
        ("/waiting", {"consumer": "a\0"}, "consumer with NUL"),
        ("/failed", {"limit": "0"}, "'0' is not a whole number from 1 to 1,000"),
        ("/in-doubt", {"limit": "0000000019999"}, "is not a whole number from 1 to 1,000"),
        ("/in-doubt", {"limit": f"000000001{'9' * 5_000}"}, "is not a whole number from 1"),
    ],
)
def test_mistakes(operator: Reader, path: str, query: dict[str, str], said: str) -> None:
    """What cannot be meant is said, on a page, in words that can be read aloud."""
    page = operator.get(path, 400, **query)
    assert said in text(page)
    assert 'role="alert"' in page


@pytest.mark.parametrize(
    "path",
    [
        *("/nowhere", "/letter?id=999", f"/letter?id={'9' * 400}", "/letter?id=-1; DROP TABLE"),
        *("/message?id=nowhere", "/message?id=nowhere&consumer=billing"),
    ],
)
def test_what_is_not_there(operator: Reader, path: str) -> None:
    """A page that is not there, nor a message, is a page that says so."""
    assert "Not possible" in operator.get(path, 404)


def link_named(name: str, page: str) -> str:
    """Where the link of that name leads."""
    [link] = re.findall(rf'<a href="([^"]*)"[^>]*>{name}</a>', page)
    return unescape(link)


class _AwayStore(MemoryStore):
    def tallies(self, most: int | None = None) -> NoReturn:
        raise StoreUnavailable("postgresql://u:geheim@db/x: connection refused")


def test_ledger_away() -> None:
    """A ledger that is away is said so, without its password."""
    page = Reader(dashboard(Ledger(_AwayStore()))).get("/", 503)
    assert "The ledger cannot be reached" in page
    assert "geheim" not in page


def test_many_are_shown_in_part(trouble: Trouble) -> None:
    """A list is cut at a hundred, says so, and shows more in place, or as a page."""
    trouble.doubt(*(f"order-{number:03}" for number in range(120)))
    reader = Reader(dashboard(trouble.ledger))
    page = reader.get("/in-doubt", consumer="billing")
    assert "order-099" in page
    assert "order-100" not in page
    [more] = re.findall(r'<a href="([^"]*)" hx-get="[^"]*" hx-target="closest .rows"', page)
    assert "order-119" in reader.get(unescape(more))


def test_a_search_goes_on_where_it_ended(trouble: Trouble) -> None:
    """A search for what is rare says how far it has looked, and a link goes on from there; the
    command beside it does the same.
    """
    keys = [Key("billing", f"order-{number:05}") for number in range(3_000)]
    ledger = trouble.ledger
    ledger.complete_many([granted(each) for each in ledger.claim_many(keys)])
    ledger.complete(granted(ledger.claim(Key("sms", "order-01500"))))
    bounded = BoundedStore(ledger._store)
    reader = Reader(dashboard(Ledger(bounded)))
    with bounded.in_its_time():
        page = reader.get("/messages", consumer="sms", text="rder", how="contains")
        assert "No matching records yet." in page
        assert "Looked through 1,100 records, up to order-01099 ." in text(page)
        page = reader.get(link_named("Continue", page))
    assert '<a href="/message?consumer=sms&amp;id=order-01500">' in page
    assert "Looked through 1,100 records, up to order-02198 ." in text(page)
    command = "oncely list --sort id --id-contains=rder --after=order-01099 --consumer sms --json"
    assert f"<code>{command}</code>" in page
    page = reader.get(link_named("Continue", page))
    assert "No matching records." in page
    assert "Continue" not in page


def test_records_are_paged_by_id(trouble: Trouble) -> None:
    """A list that is full shows more in place, or goes on; together the pages have every record."""
    trouble.doubt(*(f"order-{number:03}" for number in range(250)))
    reader = Reader(dashboard(trouble.ledger))
    page = reader.get("/messages")
    found = []
    while True:
        found += re.findall(r'href="/message\?consumer=billing&amp;id=([^"]*)"', page)
        if "Continue" not in page:
            break
        assert "Show more" in page
        page = reader.get(link_named("Continue", page))
    assert found == [f"order-{number:03}" for number in range(250)]
    assert "order-249" in reader.get(link_named("Show more", reader.get("/messages")))


@pytest.mark.parametrize(
    "path",
    [
        *PAGES,
        *("/in-doubt?consumer=billing", "/failed?consumer=shop", "/waiting?consumer=shop"),
        *("/messages?consumer=billing", "/messages?state=completed", "/messages?older_than=0s"),
        *("/messages?text=order&how=contains", "/message?id=order-1", "/message?id=order-3"),
        *("/messages?state=failed", "/messages?state=in+doubt"),
    ],
)
def test_no_page_reads_the_whole_ledger(filled: Trouble, path: str) -> None:
    """No page asks a store for what takes longer the larger the ledger is."""
    Reader(dashboard(Ledger(BoundedStore(filled.ledger._store)), auth=as_user())).get(path)


def test_lists_read_no_bodies(
    filled: Trouble, operator: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with a thousand messages, of a gigabyte of bodies, takes the memory of its rows."""
    store = filled.ledger._store
    listed, asked = store.listed, []

    def spying(listing: Listing) -> Iterator[WaitingMessage]:
        asked.append(listing)
        return listed(listing)

    monkeypatch.setattr(store, "listed", spying)
    pages = {path: operator.get(path) for path in PAGES}
    operator.send(pages["/failed"], "/letters/confirm", decision="retry", every="yes")
    assert {each.queue for each in asked} >= {OUTBOX, "retry/*"}
    assert not any(each.with_bodies for each in asked)


def test_more_consumers_than_a_page_can_show(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are worst off are shown, the worst first, and the page says that there are more;
    the counts at its top are of all.
    """
    monkeypatch.setattr(contents, "CONSUMERS", 2)
    for consumer, count in (("a", 0), ("b", 1), ("c", 2)):
        trouble.doubt(*(f"order-{n}" for n in range(count)), consumer=consumer)
        trouble.ledger.complete(granted(trouble.ledger.claim(Key(consumer, "order-9"))))
    reader = Reader(dashboard(trouble.ledger))
    for path in ("/", "/consumers"):
        page = reader.get(path)
        assert re.findall(r"in doubt of (\w)", page) == ["c", "b"]
        assert "The 2 of 3 consumers" in text(page)
    assert "3 in doubt" in text(reader.get("/"))


@pytest.mark.parametrize("path", PAGES)
def test_twins(
    path: str, filled: Trouble, operator: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page names the command that prints the same as JSON, which is one that there is."""
    [command] = re.findall(r"on the command line: <code>(.*?)</code>", operator.get(path))
    words = command.split()
    assert words[0] == "oncely"
    assert typed(words[1:]).params["as_json"]


def test_nothing_of_others_is_markup(trouble: Trouble) -> None:
    """Ids, consumers, types, headers, bodies, errors, results, steps, notes, names of users and of
    the ledger are data on every page.
    """
    trouble.doubt(HOSTILE, consumer=HOSTILE)
    message = Message(HOSTILE, HOSTILE.encode(), HOSTILE, {"x": HOSTILE}, HOSTILE)
    [number] = trouble.fail(message, error=HOSTILE)
    trouble.wait(Message(f"{HOSTILE}2", b"", HOSTILE), error=HOSTILE)
    trouble.defer(f"{HOSTILE}3", HOSTILE)
    reader = Reader(dashboard(trouble.ledger, auth=as_user(name=HOSTILE), name=HOSTILE))
    ids = [HOSTILE, f"{HOSTILE}2", f"{HOSTILE}3"]
    pages = [
        *map(reader.get, PAGES),
        *(reader.get("/messages", text=id_) for id_ in ids),
        *(reader.get("/messages", after=id_, limit="1") for id_ in ["", *ids]),
        *(reader.get("/message", id=id_, consumer="shop") for id_ in ids),
        reader.get("/message", id=HOSTILE, consumer=HOSTILE),
        reader.get("/message", id=HOSTILE),
        reader.get("/letter", id=str(number)),
        reader.get("/in-doubt", 200, consumer=HOSTILE),
        reader.get("/messages", 400, consumer=f"{HOSTILE}4"),
    ]
    for form, page in {"/records/confirm": pages[1], "/letters/confirm": pages[2]}.items():
        name = "not-happened" if "records" in form else "retry"
        confirm = reader.send(page, form, decision=name, every="yes")
        done = reader.send(confirm, form.replace("confirm", "change"), why=HOSTILE)
        pages += [confirm, done]
    for page in pages:
        assert "<script>" not in page
        assert "<img" not in page
        # What a field sends back is as it was.
        assert "\u202e" not in re.sub(
            r'value="[^"]*"|<textarea.*</textarea>', "", page, flags=re.DOTALL
        )
        assert "alert(&#39;1&#39;)" in page


def test_bodies_are_masked(trouble: Trouble) -> None:
    """What `mask` hides is on no page, nor in a form that would send it back; passwords are masked
    anyway.
    """

    def mask(message: Message) -> Message:
        return replace(message, body=b"(hidden)")

    [number] = trouble.fail(Message("secret", b'{"iban": "DE02"}', headers={"token": "quiet"}))
    reader = Reader(dashboard(trouble.ledger, auth=as_user(), mask=mask))
    for page in (reader.get("/letter", id=str(number)), reader.get("/message", id="secret")):
        assert "(hidden)" in page
        assert "DE02" not in page
        assert "quiet" not in page
    trouble.wait(Message("again", b'{"iban": "DE02", "password": "geheim"}'))
    page = reader.get("/message", id="again")
    assert "(hidden)" in page
    assert "DE02" not in page
    unmasked = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = unmasked.get("/message", id="again")
    assert "DE02" in page
    assert "geheim" not in page
    page = unmasked.get("/letter", id=str(number))
    assert "DE02" in page
    assert "quiet" not in page


def test_no_id_is_masked(trouble: Trouble) -> None:
    """Also one that looks like a password: two would look alike, and their links lead nowhere."""
    ids = ["password:reset:42", "password:reset:43", "token=7"]
    numbers = trouble.fail(*map(Message, ids), error="password: geheim")
    reader = Reader(dashboard(trouble.ledger, auth=as_user()))
    pages = [reader.get("/failed"), reader.get("/messages")]
    pages += [reader.get("/letter", id=str(numbers[0])), reader.get("/message", id=ids[0])]
    for page in pages:
        assert ids[0] in page
        assert "geheim" not in page
    assert all(id_ in page for id_ in ids for page in pages[:2])
    assert "&#39;token=8&#39; is not" in reader.get("/message", 404, id="token=8")
    told = [ops.letter_as_dict(letter, is_whole=True) for letter in trouble.ledger.dead()]
    assert sorted(each["message_id"] for each in told) == ids


@pytest.mark.parametrize("header", ["Authorization", "cookie", "Set-Cookie", "X-Api-Key"])
def test_headers_with_credentials_are_masked(trouble: Trouble, header: str) -> None:
    """Their whole value, whatever it looks like."""
    [number] = trouble.fail(Message("a", b"Bearer geheim", headers={header: "one geheim; two"}))
    page = Reader(dashboard(trouble.ledger, auth=as_user())).get("/letter", id=str(number))
    assert header in page
    assert "geheim" not in page


ASKED = [*PAGES, *(f"{path}/" for path in PAGES[1:]), "/message", "/letter", "/failed/export"]


@pytest.mark.parametrize("path", ASKED)
def test_any_query(filled: Trouble, path: str) -> None:
    """Whatever its parameters are called, also where a page has a link to more of the same."""
    [letter] = filled.ledger.dead()
    names = "path self changed query request visit template status context name"
    id_ = str(letter.id) if path == "/letter" else letter.key.message_id
    query = {"id": id_, "limit": "1", **dict.fromkeys(names.split(), "x")}
    Reader(dashboard(filled.ledger)).get(path, 200, **query)


def test_password_of_the_ledger_is_masked(trouble: Trouble) -> None:
    """The name of the ledger may be its URL."""
    page = Reader(dashboard(trouble.ledger, name="postgresql://u:geheim@db/x")).get("/")
    assert "postgresql://u:***@db/x" in page.replace("<wbr>", "")
    assert "geheim" not in page


def test_redis(redis_url: str) -> None:
    """Where no messages wait in the ledger the pages of records work, the others say why not."""
    with closing(open_ledger(redis_url)) as ledger:
        granted(ledger.claim(Key("billing", "order-1")))
        reader = Reader(dashboard(ledger, auth=as_user()))
        for path in set(PAGES) - {"/failed", "/waiting"}:
            reader.get(path)
        assert "processing" in reader.get("/message", id="order-1")
        for path in ("/failed", "/waiting"):
            assert "beside each queue NAME" in reader.get(path, 400)
