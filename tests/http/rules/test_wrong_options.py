"""Options that cannot be meant: one line says what is wrong, where, and what to write instead."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.http.drivers import asgi_client, django_client, wsgi_client

from oncely.core.errors import ConfigError
from oncely.http import IdempotencyKey, WsgiIdempotencyKey
from oncely.ledger.ledger import Ledger

WRONG: list[tuple[str, Any, str]] = [
    ("consumer", 5, 'consumer is not a string; write consumer="billing"'),
    ("consumer", None, 'empty consumer; write consumer="billing"'),
    ("methods", None, 'methods: None is not a list of text; write one, such as ["POST"]'),
    ("methods", [1], 'methods: [1] is not a list of text; write one, such as ["POST"]'),
    ("methods", "PUT", 'methods: write a list of them, such as ["PUT"]'),
    ("required", "no", "required: 'no' is not a bool; write True or False"),
    ("bare_keys", 1, "bare_keys: 1 is not a bool; write True or False"),
    ("keep_5xx", "no", "keep_5xx: 'no' is not a bool; write True or False"),
    ("keep_4xx", "no", "write True or [402, 409]"),
    ("keep_4xx", 409, "keep_4xx: 409 is not a bool or a list of statuses from 400 to 499; "),
    ("keep_4xx", ["409"], "keep_4xx: ['409'] is not a bool or a list"),
    ("keep_4xx", [500], "keep_4xx: [500] is not a bool or a list"),
    ("keep_4xx", None, "keep_4xx: None is not a bool or a list"),
    ("not_replayed", "X-Trace", 'not_replayed: write a list of them, such as ["X-Trace"]'),
    ("not_replayed", [1], 'not_replayed: [1] is not a list of text; write one, such as ["X-'),
    ("not_replayed", 5, "not_replayed: 5 is not a list of text"),
    ("scope", "user", "scope: 'user' is not a function of (request)"),
    ("scope", lambda: 1, "scope: <lambda> takes ()"),
    ("fingerprint", 3, "fingerprint: 3 is not a function of (request)"),
    ("errors", "json", "errors: 'json' is not a function of (problem)"),
    ("errors", lambda: 1, "errors: <lambda> takes ()"),
    ("documentation", 5, "documentation: 5 is not a URL; write"),
    ("documentation", "docs.html", "documentation: 'docs.html' is not a URL; write"),
    ("max_body", 1.5, 'max_body: 1.5 is not a size: write "1MiB"'),
    ("max_body", "big", "max_body: 'big' is not a size"),
    ("max_request_body", "much", "max_request_body: 'much' is not a size"),
    ("timeout", 0, 'timeout: zero would refuse all; write "5s"'),
    ("keep", (str,), "keep: it is a function, or a pair of functions; write keep="),
    ("credentials", "Cookie", 'credentials: write a list of them, such as ["Cookie"]'),
    ("lease", "long", "lease: 'long' is not a duration"),
    ("policy", "hold", "policy: str is not a Policy; write Policy(...)"),
    ("ledger", "sqlite:///ledger.db", "is not a Ledger; write open_ledger(...)"),
    ("keep_6xx", True, "idempotency keys: keep_6xx is not an option; known: consumer, methods"),
]


@pytest.mark.parametrize(("name", "value", "line"), WRONG)
def test_a_wrong_option_is_told_of_when_the_application_starts(
    ledger: Ledger, name: str, value: Any, line: str
) -> None:
    """One line, and not an exception of the first request's; Django's options are the same."""
    options: Any = {"ledger": ledger, "consumer": "api", name: value}
    makes: list[Callable[[], Any]] = [lambda: IdempotencyKey(None, **options)]  # type: ignore[arg-type]
    if name not in ("ledger", "consumer"):
        makes.append(lambda: django_client(lambda _: None, options))
    for make in makes:
        with pytest.raises(ConfigError) as raised:
            make()
        assert line in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_consumer_is_not_guessed(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match='consumer is missing; write consumer="api"'):
        IdempotencyKey(None, ledger)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("value", [None, "memory://", 5, {}, {"consumer": "api"}, {"ledger": 5}])
def test_django_is_told_of_a_ledger(value: Any) -> None:
    with pytest.raises(ConfigError, match="ONCELY: the settings name no ledger; write ONCELY = "):
        django_client(lambda _: None, {}, ONCELY=value)


def test_the_same_keys_twice_around_an_application(ledger: Ledger) -> None:
    """The inner one would wait for the outer one's request, which waits for it: 409 for ever."""
    own: Any = {"ledger": ledger, "consumer": "api"}
    asgi = IdempotencyKey(IdempotencyKey(answering, **own), **own)
    wsgi = WsgiIdempotencyKey(WsgiIdempotencyKey(wsgi_answering, **own), **own)
    django = django_client(
        lambda request: None,
        own,
        MIDDLEWARE=["oncely.http.DjangoIdempotencyKey"] * 2,
        DEBUG_PROPAGATE_EXCEPTIONS=True,
    )
    for number, asked in enumerate((asgi_client(asgi), wsgi_client(wsgi), django)):
        with pytest.raises(ConfigError, match="consumer 'api' is twice around this"):
            asked(f'"{number}"')


def test_two_consumers_around_an_application(ledger: Ledger) -> None:
    """Each has the request once."""
    inner = IdempotencyKey(answering, ledger, consumer="inner")
    asked = asgi_client(IdempotencyKey(inner, ledger, consumer="outer"))
    assert [asked().status, asked().is_replayed] == [201, True]


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 201})
    await send({"type": "http.response.body"})


def wsgi_answering(environ: Any, start_response: Any) -> list[bytes]:
    start_response("201 Created", [])
    return []
