"""The first programs of `oncely init`: for each kind of delivery, files and what to type next."""

from collections.abc import Mapping
from importlib.resources import files
from secrets import token_hex
from typing import NamedTuple

SETTINGS = "oncely.env"
LOAD = f". ./{SETTINGS}"


class LedgerKind(NamedTuple):
    """A store for the ledger; `driver` is its module, which the extra of the same name brings."""

    text: str
    url: str
    driver: str | None = None


class Starter(NamedTuple):
    """A first program; `templates` maps its files to the templates they are copied from."""

    text: str
    templates: Mapping[str, str]
    commands: tuple[str, ...]
    says: str
    elsewhere: tuple[str, ...] = ()
    """The commands for a second terminal, while the last of `commands` runs."""
    settings: Mapping[str, str] = {}
    """The environment variables of the program, in addition to the ledger's URL."""
    packages: Mapping[str, str] = {}
    """The modules that the program needs, and the package to install for each."""
    to_edit: str = ""
    """The servers other than the ledger's: the user must write their URLs."""
    has_queues: bool = False
    """Whether the ledger must keep queues, which Redis does not."""


STORES: Mapping[str, LedgerKind] = {
    "sqlite": LedgerKind("a file on this machine", "sqlite:///oncely.db"),
    "postgresql": LedgerKind(
        "PostgreSQL", "postgresql://user:password@localhost/database", "psycopg"
    ),
    "mysql": LedgerKind("MariaDB or MySQL", "mysql://user:password@localhost/database", "pymysql"),
    "redis": LedgerKind("Redis", "redis://localhost:6379/0", "redis"),
}

_MADE_ANEW = "(made anew)"
_MIGRATE = (LOAD, "oncely migrate")
_CONSUME = (*_MIGRATE, "python app.py", "oncely consume app:consumer --drain")
_CHARGE = "curl -i -X POST http://127.0.0.1:8000/orders/17/charge -H 'Idempotency-Key: \"key-17\"'"
_CONSUMED = (
    "app.py publishes one order twice: the consumer handles one, and counts one duplicate. "
    "Without --drain it runs until it is stopped."
)

STARTERS: Mapping[str, Starter] = {
    "function": Starter(
        "calls of your own function",
        {"app.py": "function.py"},
        (*_MIGRATE, "python app.py", "oncely show order-17"),
        "app.py charges one order twice: the second call charges nothing, and returns the receipt "
        "that was kept.",
    ),
    "queue": Starter(
        "messages of a queue in the ledger's own database",
        {"app.py": "consumer.py"},
        _CONSUME,
        _CONSUMED,
        settings={"ONCELY_TRANSPORT": '"$ONCELY_LEDGER"'},
        has_queues=True,
    ),
    "rabbitmq": Starter(
        "messages of a queue of RabbitMQ",
        {"app.py": "consumer.py"},
        _CONSUME,
        _CONSUMED,
        settings={"ONCELY_TRANSPORT": "'amqp://guest:guest@localhost/'"},
        packages={"pika": "'oncely[rabbitmq]'"},
        to_edit="RabbitMQ",
    ),
    "kafka": Starter(
        "messages of a topic of Kafka",
        {"app.py": "consumer.py"},
        _CONSUME,
        _CONSUMED,
        settings={"ONCELY_TRANSPORT": "'kafka://localhost:9092'"},
        packages={"confluent_kafka": "'oncely[kafka]'"},
        to_edit="Kafka",
    ),
    "http": Starter(
        "HTTP requests with idempotency keys",
        {"app.py": "http_api.py"},
        (*_MIGRATE, "uvicorn app:app --port 8000"),
        "The second answer has the first one's receipt, and Idempotency-Replayed: true.",
        elsewhere=(_CHARGE, _CHARGE),
        packages={"fastapi": "fastapi", "uvicorn": "uvicorn"},
    ),
    "webhook": Starter(
        "webhooks, such as GitHub's",
        {"app.py": "webhook_app.py", "deliver.py": "deliver.py"},
        (*_MIGRATE, "uvicorn app:app --port 8000"),
        "deliver.py sends one webhook twice: it is stored once, and handled once.",
        elsewhere=(LOAD, "python deliver.py", "oncely consume app:consumer --drain"),
        settings={
            "WEBHOOK_SECRET": _MADE_ANEW,
            "WEBHOOK_URL": "'http://127.0.0.1:8000/hooks/github'",
        },
        packages={"starlette": "starlette", "uvicorn": "uvicorn"},
        has_queues=True,
    ),
    "spark": Starter(
        "rows on Spark",
        {name: name for name in ("pipeline.toml", "handlers.py", "messages/orders.jsonl")},
        ("oncely pipeline run pipeline.toml", "cat charged.txt"),
        "messages/orders.jsonl has one order twice: it is charged once, and the table counts one "
        "duplicate. A second run charges nothing.",
        packages={"pyspark": "'oncely[spark]'"},
    ),
}


def contents(delivery: str, store: str) -> dict[str, str]:
    """The files of a first program, by their names."""
    folder = files("oncely.cli.templates")
    starter = STARTERS[delivery]
    texts = {
        name: folder.joinpath(template).read_text(encoding="utf-8")
        for name, template in starter.templates.items()
    }
    if delivery != "spark":
        return {**texts, SETTINGS: _settings(starter, store)}
    if store == "sqlite":
        return texts
    # A server's URL may have a password, which does not belong in a file that is shared.
    named = texts["pipeline.toml"].replace(STORES["sqlite"].url, "env:ONCELY_LEDGER")
    return {**texts, "pipeline.toml": named, SETTINGS: _settings(starter, store)}


def _settings(starter: Starter, store: str) -> str:
    values = {"ONCELY_LEDGER": f"'{STORES[store].url}'", **starter.settings}
    # A secret that stands in a template would be public.
    values = {n: token_hex(20) if v == _MADE_ANEW else v for n, v in values.items()}
    lines = [
        f"# For a shell: {LOAD}",
        "# Passwords may stand here: .gitignore keeps this file out of version control.",
        *(f"export {name}={value}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
