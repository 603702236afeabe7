"""How an error is put into words: always, briefly, without passwords, storable everywhere."""

import pytest

from oncely.core import errors
from oncely.core.errors import OncelyError, describe, is_secret, mask_passwords


class Unspeakable(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Wordless(Exception):
    """An error whose text is not text."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value] # noqa: PLE0307


LATER = (errors.StoreError, errors.TransportError, errors.BusyError)
NEVER = (errors.ConfigError, errors.MessageError, errors.RefusedError)


def test_later_and_never_are_apart() -> None:
    """No class stands above one error that says "later" and another that says "never"."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    known = [kind for kind in kinds if issubclass(kind, OncelyError) and kind is not OncelyError]
    assert not [kind for kind in known if issubclass(kind, LATER) and issubclass(kind, NEVER)]
    apart = {errors.FencedError, errors.EndedError, errors.HandlerDied}
    assert not [kind for kind in known if not issubclass(kind, LATER + NEVER) and kind not in apart]
    for later in (errors.BusyError, errors.StoreUnavailable, errors.ContentionError):
        assert not issubclass(later, NEVER)
    for never in (errors.BrokerRefused, errors.ExhaustedError, errors.MismatchError):
        assert not issubclass(never, LATER)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no address"), "ValueError: no address"),
        (ValueError(), "ValueError"),
        ("no address", "no address"),
    ],
)
def test_type_and_text(error: Exception | str, text: str) -> None:
    """An error is described by its type and its text; words stay as they are."""
    assert describe(error) == text


@pytest.mark.parametrize("error", [Unspeakable(), Wordless()])
def test_text_cannot_be_shown(error: Exception) -> None:
    """An error whose `__str__` fails is described all the same."""
    assert describe(error) == f"{type(error).__name__}: (its text cannot be shown)"


@pytest.mark.parametrize("character", ["x", "é", "\0", "\ud800", "a:", "://", " password=x"])
def test_long_texts_are_cut(character: str) -> None:
    """A text of 10 MB is cut to its limit, whatever it is made of, and quickly."""
    text = describe(ValueError(character * (10_000_000 // len(character))))
    assert len(text) == 2_000
    assert text.endswith("…")


@pytest.mark.parametrize("length", [1_999, 2_000])
def test_texts_within_the_limit_are_whole(length: int) -> None:
    """A text of up to 2,000 characters is kept whole."""
    assert describe("x" * length) == "x" * length


def test_storable() -> None:
    """NUL and lone surrogates, which no database stores, are shown escaped."""
    text = describe(ValueError("a\0b\ud800c\udfffd é 🧾"))
    assert text == "ValueError: a\\0b\\ud800c\\udfffd é 🧾"
    text.encode()


SECRETS = [
    "postgresql://anna:hunter2@db/ledger",
    "postgresql+psycopg://anna:hunter2@db:5432/ledger?sslmode=require",
    "redis://:hunter2@localhost:6379/0",
    "amqp://guest:hunter2@localhost/%2F is away",
    "two: mysql://a:hunter2@b/c and mysql://d:hunter2@e/f",
    "password=hunter2",
    "PASSWORD = hunter2",
    "Password: hunter2, user: anna",
    "user=anna password='hunter2' host=db",
    'passwd="hunter2"',
    "pwd=hunter2;Server=db",
    "token=hunter2&next=1",
    "api_key: hunter2",
    "api-key=hunter2",
    "secret=hunter2",
    "{'user': 'anna', 'password': 'hunter2'}",
    '{"user": "anna", "password": "hunter2"}',
    "db_password=hunter2",
    "PGPASSWORD=hunter2 psql",
    "access_token=hunter2",
    "client_secret: hunter2",
    "password='correct horse hunter2'",
    '{"password": "correct \\"horse hunter2"}',
    r'{"body": "{\"password\": \"hunter2\"}"}',
    "Authorization: Bearer hunter2",
    "{'Authorization': 'ApiKey hunter2, and more'}",
    "proxy-authorization=Digest username=anna, response=hunter2",
    "Cookie: lang=de; session=hunter2",
    'Set-Cookie: "session=hunter2; Path=/"',
    "the header was Bearer hunter2",
    "asked with bearer hunter2.abc-_~+/==",
    "asked with Basic hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_passwords_are_masked(text: str) -> None:
    """A password in a URL, or given by name, never gets into a record."""
    described = describe(RuntimeError(text))
    assert "hunter2" not in described
    assert "***" in described


@pytest.mark.parametrize("before", range(1_960, 2_000, 3))
def test_cut_passwords_are_masked(before: int) -> None:
    """A password that stands where the text is cut does not show by its beginning either."""
    text = "x" * before + " amqp://guest:hunter2hunter2@localhost/"
    assert "hunter" not in describe(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/path?page=1",
        "postgresql://db/ledger",
        "12:30:45 at anna@example.org",
        "the password is wrong",
        "tokens: left",
        "KeyError: 'id'",
        "basic authentication is off",
        "a bearer",
    ],
)
def test_the_rest_is_not_masked(text: str) -> None:
    """What holds no password stays readable."""
    assert mask_passwords(text) == text


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Set-Cookie", "x-api-key", "db_pwd"])
def test_names_of_secrets(name: str) -> None:
    """Fields whose whole value is one."""
    assert is_secret(name)
    assert not is_secret(f"about-{name[:3]}")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (
            '{"password": "correct horse", "next": 1}',
            '{"password": "***", "next": 1}',
        ),
        ("postgresql://anna:hunter2@db:5432/ledger", "postgresql://anna:***@db:5432/ledger"),
    ],
)
def test_what_stays(text: str, masked: str) -> None:
    """Of a value in quotes the quotes stay, and of a URL all but the password."""
    assert mask_passwords(text) == masked


def test_one_parent() -> None:
    """Every error that the package raises is an OncelyError."""
    raised = [value for value in vars(errors).values() if isinstance(value, type)]
    own = [error for error in raised if error.__module__ == errors.__name__]
    assert len(own) > 10
    assert all(issubclass(error, OncelyError) for error in own)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "-",
        "password",
        "a://b:",
        "@a://b:",
        "token ",
        "token=",
        "token='",
        "cookie:",
        "Basic a",
    ],
)
def test_large_texts_are_masked_in_time(text: str) -> None:
    """A body of a megabyte takes as long as it is, not as its square, whatever is in it."""
    assert mask_passwords(text * (1_000_000 // len(text)))
