"""Requests made by schemathesis from an OpenAPI schema, sent to uvicorn under keys of all sorts."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import hypothesis.strategies as st
import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks
from tests.conditions import LIMIT_S, wait_until
from tests.http.documented_shop import TENANT, Problem, Runs, shop
from tests.servers import HOST, free_port
from tests.turns import in_turn

from oncely.ledger import open_ledger

EXAMPLES = int(os.environ.get("ONCELY_TEST_HTTP_EXAMPLES", "15"))
"""Of each operation, under each set of options."""
CONFORMS: list[Any] = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OURS = "application/problem+json"
IN_FLIGHT = (409, "idempotency_in_flight")
REUSED = (422, "idempotency_conflict")
INVALID = (400, "idempotency_key_invalid")
MISSING = (400, "idempotency_key_required")
AT_ONCE = 2

OPTIONS = {
    "as the draft has it": {},
    "as Stripe does": {"bare_keys": True, "keep_4xx": True, "keep_5xx": True, "required": True},
}


# ---- Keys --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """What stands in the field, and the key that it means; bare: only where bare keys are taken."""

    field: bytes | None
    means: str | None = None
    is_bare: bool = False


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
_TOKEN = st.characters(codec="ascii", categories=("L", "N"))
_TEXT = st.one_of(st.text(_PRINTABLE, min_size=1), st.text(_PRINTABLE, min_size=255, max_size=255))
_STRINGS = st.builds(
    lambda text, before, after: Key(f"{before}{_quoted(text)}{after}".encode(), text),
    _TEXT.filter(lambda text: not text.isspace()),
    st.sampled_from(["", "  "]),
    st.sampled_from(["", " ", ";a", "; b=1; c=?0", ';d="x"']),
)
_BARE = st.one_of(st.uuids().map(str), st.text(_TOKEN, min_size=1, max_size=255)).map(
    lambda text: Key(text.encode(), text, is_bare=True)
)
_UNUSABLE = st.one_of(
    st.sampled_from([b"", b'""', b'"  "', b'"', b'"a', b'a"', b'"a" "b"', b'"a","b"', b'"a\\x"']),
    st.sampled_from([b"a b", b"a,b", b"a\\", b'"a";', b'"a";B', b'"a\tb"', b'("a" "b")']),
    st.integers(256, 5000).map(lambda length: b'"' + b"k" * length + b'"'),
    st.integers(256, 5000).map(lambda length: b"k" * length),
    st.text(st.characters(min_codepoint=0xA0, exclude_categories=["Cs"]), min_size=1).map(
        lambda text: _quoted(text).encode()
    ),
    st.binary(min_size=1).map(lambda some: bytes(each | 0x80 for each in some)),
).map(Key)
KEYS = st.one_of(_STRINGS, _STRINGS, _BARE, _UNUSABLE, st.just(Key(None)))


# ---- Another request under a key ---------------------------------------------------------------


def body_of(request: requests.PreparedRequest) -> bytes:
    """What is sent."""
    body = request.body or b""
    assert isinstance(body, bytes)
    return body


def written_otherwise(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """The same, where its body is JSON."""
    try:
        value = json.loads(body_of(request))
    except ValueError:
        return request
    request.prepare_body(json.dumps(value, sort_keys=True, indent=2).encode(), None)
    return request


def with_a_longer_query(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Another one."""
    request.prepare_url(str(request.url), {"more": "1"})
    return request


def with_another_body(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Another one."""
    request.prepare_body(b'["another"]', None)
    return request


Change = Callable[[requests.PreparedRequest], requests.PreparedRequest] | None
CHANGES: st.SearchStrategy[Change] = st.sampled_from(
    [None, written_otherwise, with_a_longer_query, with_another_body]
)


# ---- The shop ----------------------------------------------------------------------------------


@dataclass
class Shop:
    """A shop behind uvicorn, and what its handlers did."""

    url: str
    schema: Any
    options: dict[str, Any]
    runs: Runs
    clients: Iterator[int] = field(default_factory=lambda: count(1))
    session: requests.Session = field(default_factory=requests.Session)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE))

    def prepared(self, case: Any, key: Key, client: str) -> requests.PreparedRequest:
        """A request, its key's field as bytes that nobody corrects."""
        words = case.as_transport_kwargs(self.url, headers={TENANT: client})
        words["headers"].pop("Idempotency-Key", None)
        request = requests.Request(**words).prepare()
        if key.field is not None:
            request.headers["Idempotency-Key"] = key.field
        return request

    def send(self, request: requests.PreparedRequest, case: Any) -> "Answer":
        """What is answered, which must be as the schema says."""
        response = self.session.send(request, allow_redirects=False, timeout=LIMIT_S)
        case.validate_response(response, checks=CONFORMS)
        return Answer.of(response)

    def keeps(self, status: int) -> bool:
        """Whether a repetition gets an answer of that status."""
        return status < 400 or bool(self.options.get("keep_4xx"))

    def refuses(self, key: Key, method: str | None) -> tuple[int, str] | None:
        """How a request under that key is refused, whatever it asks for."""
        if method not in {"POST", "PATCH"}:
            return None
        if key.field is None:
            return MISSING if self.options.get("required") else None
        is_usable = key.means is not None and (not key.is_bare or self.options.get("bare_keys"))
        return None if is_usable else INVALID


@contextmanager
def open_shop(options: dict[str, Any]) -> Iterator[Shop]:
    """A shop that answers."""
    port, runs = free_port(), Runs()
    with closing(open_ledger("memory://")) as ledger:
        app, inner = shop(ledger, runs, **options)
        config = uvicorn.Config(app, HOST, port, log_level="critical", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        serving = threading.Thread(target=server.run)
        serving.start()
        wait_until(lambda: server.started, "the server never starts")
        schema = schemathesis.openapi.from_asgi("/openapi.json", inner)
        opened = Shop(f"http://{HOST}:{port}", schema, options, runs)
        try:
            with opened.session, opened.pool:
                yield opened
        finally:
            server.should_exit = True
            serving.join()


# ---- Answers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer without what says that it is replayed, and what belongs to its moment."""

    status: int
    fields: tuple[tuple[str, str], ...]
    body: bytes
    is_replayed: bool
    problem: tuple[int, str] | None
    """Its status and code, where oncely has made it."""

    @classmethod
    def of(cls, response: requests.Response) -> "Answer":
        """Raises what is wrong with it."""
        assert response.status_code < 500
        fields = [(name.lower(), value) for name, value in response.raw.headers.items()]
        marks = {"idempotency-replayed", "idempotent-replayed", "date", "server"}
        problem = None
        if response.headers.get("Content-Type") == OURS:
            told = Problem.model_validate_json(response.content, strict=True)
            assert told.status == response.status_code
            problem = (told.status, told.code)
        return cls(
            response.status_code,
            tuple((name, value) for name, value in fields if name not in marks),
            response.content,
            ("idempotency-replayed", "true") in fields,
            problem,
        )

    @property
    def own(self) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
        """What must be the same in every repetition."""
        return self.status, self.fields, self.body


def what_is_asked(request: requests.PreparedRequest) -> tuple[Any, ...]:
    """What makes two requests the same: method, path, query, and a body by its JSON."""
    at, body = urlsplit(str(request.url)), body_of(request)
    try:
        value = _apart(json.loads(body, parse_float=Decimal, parse_int=Decimal))
    except ValueError:
        value = body
    return request.method, unquote(at.path), at.query, value


def _apart(value: Any) -> Any:
    """So that True is not 1."""
    match value:
        case dict():
            return {name: _apart(each) for name, each in value.items()}
        case list():
            return [_apart(each) for each in value]
    return type(value), value


# ---- What must hold ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", in_turn("options of keys", [*OPTIONS]))
def test_requests_from_the_schema(name: str) -> None:
    """Whatever is asked, under whatever key: each answer is as the schema says, none is an error of
    the server; a repetition gets the first answer byte for byte or a documented refusal, and a
    handler that has answered well has run once for its key.
    """
    with open_shop(OPTIONS[name]) as shop:
        for found in shop.schema.get_all_operations():
            check_operation(shop, found.ok())


def check_operation(shop: Shop, operation: Any) -> None:
    """Try one operation."""
    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @seed(17)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(modes), other=st.one_of(modes), key=KEYS, change=CHANGES)
    def check(case: Any, other: Any, key: Key, change: Change) -> None:
        check_one(shop, case, other, key, change)

    check()


def check_one(shop: Shop, case: Any, other: Any, key: Key, change: Change) -> None:
    """One request twice at once, then once more, then another under its key."""
    client = f"client-{next(shop.clients)}"
    request, another = (shop.prepared(each, key, client) for each in (case, other))
    if change is not None:
        another, other = change(request.copy()), case
    at_once = [*shop.pool.map(lambda _: shop.send(request, case), range(AT_ONCE))]
    answers = [*at_once, shop.send(request, case)]
    refusal = shop.refuses(key, request.method)
    if refusal is not None:
        last = shop.send(another, other)
        assert {answer.problem for answer in [*answers, last]} == {refusal}
        assert [who for who, _ in shop.runs if who == client] == []
    elif key.field is None or request.method == "GET":
        assert not any(answer.is_replayed or answer.problem for answer in answers)
    else:
        first = check_repeated(shop, answers)
        if first.status < 400:
            assert shop.runs[client, key.means] == 1
        if shop.keeps(first.status):
            last = shop.send(another, other)
            check_another(first, last, what_is_asked(request), what_is_asked(another))


def check_repeated(shop: Shop, answers: list[Answer]) -> Answer:
    """These are the answers to one request; the one that was not given again."""
    own = [answer for answer in answers if not answer.is_replayed and answer.problem is None]
    rest = [answer for answer in answers if answer not in own]
    first, *more = own
    assert answers[-1].problem is None
    assert {answer.problem for answer in rest} <= {None, IN_FLIGHT}
    if shop.keeps(first.status):
        assert more == []
        assert answers[-1].is_replayed
        assert {answer.own for answer in rest if answer.is_replayed} == {first.own}
    else:
        assert not any(answer.is_replayed for answer in rest)
    return first


def check_another(
    first: Answer, last: Answer, asked: tuple[Any, ...], then: tuple[Any, ...]
) -> None:
    """The last answer is to another request under the key, unless that is the same."""
    if then == asked:
        assert last.is_replayed
        assert last.own == first.own
    elif then[:2] == asked[:2]:
        assert last.problem == REUSED
    else:
        # Another path: there the key is a new one.
        assert not last.is_replayed
        assert last.problem is None
