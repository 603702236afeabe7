"""The lists of the reference say what the code says: nothing is left out, nothing is made up."""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from prometheus_client import CollectorRegistry, Metric
from tests.docs.commands import every_command
from tests.docs.pages import DOCS, codes, named, rows

import oncely
from oncely import http, lake, spark
from oncely.adapters.celery import once_task
from oncely.adapters.dramatiq import OnceMiddleware
from oncely.adapters.faststream import once_middleware
from oncely.adapters.pika import once_callback
from oncely.barrier import idempotent_consumer
from oncely.cli import AWAY, DONE, FAILURES, WRONG
from oncely.core.durations import seconds
from oncely.core.policy import _CHOICES, POLICY_FIELDS, Policy
from oncely.metrics import LedgerGauges, Metrics
from oncely.middleware import Idempotent, Measured
from oncely.repository import ProcessedMessageRepository
from oncely.service import IdempotenceService
from oncely.spark import reader as ledger_reader
from oncely.spark.pipeline.config import _PipelineFile
from oncely.spark.sink import sink_options
from oncely.stores import open_store
from oncely.stores.sql import engines
from oncely.tracker import MessageTracker
from oncely.transports import open_transport
from oncely.transports.kafka import url_options as kafka_options
from oncely.transports.rabbitmq import url_options
from oncely.transports.transport import Limits
from oncely.upsert import upsert

PRESETS = (oncely.at_least_once, oncely.at_most_once, oncely.effectively_once)


def default(cell: str) -> str:
    """What stands first in a cell, in bold or as code."""
    return re.split(r"[,;]", cell.replace("*", "").replace("`", ""))[0].strip()


# ---- Public names ------------------------------------------------------------------------------


def test_public_names() -> None:
    """Each name of oncely is in the page once; every module that it names is there."""
    found = rows("names.md")
    named = [name for row in found if len(row) == 3 for cell in row[1:] for name in codes(cell)]
    assert sorted(named) == sorted(oncely.__all__)
    modules = {name for row in found for cell in row for name in codes(cell) if "oncely." in name}
    for name in modules - {"oncely.transports"}:
        importlib.import_module(name)


# ---- Errors ------------------------------------------------------------------------------------


def test_errors() -> None:
    """Every error that users can meet is in the page, once, with its parent."""
    public = {
        name: kind
        for package in (oncely, http)
        for name in package.__all__
        if isinstance(kind := getattr(package, name), type) and issubclass(kind, Exception)
    }
    said = [codes(row[0]) for row in rows("errors.md")]
    assert sorted(re.split(r"\W", each[0])[0] for each in said) == sorted(public)
    for name, *parents in said:
        if name in public:
            known = [kind.__name__ for kind in public[name].__bases__]
            assert (parents or known) == known, name
            assert parents or known[0] in ("Exception", "OncelyError"), name


# ---- Policies ----------------------------------------------------------------------------------


def test_policy_fields() -> None:
    """Every field has its row, its default in bold, and all that may be written."""
    table = {codes(row[0])[0]: row[1] for row in rows("policies.md") if len(row) == 4}
    assert set(table) == {field.name for field in fields(Policy)}
    for field in fields(Policy):
        [bold] = re.findall(r"\*\*`(.*?)`\*\*", table[field.name])
        value = getattr(Policy(), field.name)
        told = ", ".join(value) or "()" if isinstance(value, tuple) else str(value)
        assert bold == told, field.name
        if field.name in _CHOICES:
            assert set(codes(table[field.name])) == set(_CHOICES[field.name]), field.name


def test_presets() -> None:
    """What each preset sets is what the page says."""
    table = {codes(row[0])[0]: codes(row[1]) for row in rows("policies.md", "Presets")}
    for preset in PRESETS:
        changed = [
            re.sub(r"<class 'oncely\S*\.(\w+)'>", r"oncely.\1", f"{field.name}={value!r}")
            for field in fields(Policy)
            if (value := getattr(preset(), field.name)) != getattr(Policy(), field.name)
        ]
        assert [code.replace('"', "'") for code in table.pop(f"{preset.__name__}()")] == changed
    assert table == {}


# ---- Options -----------------------------------------------------------------------------------


def test_store_urls() -> None:
    """Every kind of store, and every parameter that oncely sets or reads itself."""
    kinds = {code.partition(":")[0] for code in named("options.md", "Store URLs") if "://" in code}
    assert kinds == set(open_store._KINDS)
    own = {code for code in named("options.md", "Store URLs") if "://" not in code}
    patience = {"connect_timeout", "read_timeout", engines._PREPARE, *engines._KEEPALIVE}
    assert own == patience


def test_transport_urls() -> None:
    """Every kind of transport."""
    kinds = {code.partition(":")[0] for code in named("options.md", "Transport")}
    assert kinds == {"memory", "sqlite", "amqp", "amqps", "kafka", *open_transport._SERVERS}


def test_parameters_of_queues() -> None:
    """Those of queues in memory and databases, with their defaults."""
    table = {
        codes(row[0])[0]: row for row in rows("options.md", "Queues in memory and in databases")
    }
    assert set(table) == set(open_transport._OWN)
    assert {name for name, row in table.items() if row[3] == "yes"} == {
        name.removesuffix("_s") for name in open_transport._LIMITS
    }
    assert seconds(default(table["visibility"][1])) == Limits().visibility_s
    assert int(default(table["max_bytes"][1])) == Limits().max_bytes


def test_parameters_of_rabbitmq() -> None:
    """Those of RabbitMQ, with their defaults."""
    table = {codes(row[0])[0]: default(row[1]) for row in rows("options.md", "RabbitMQ")}
    assert set(table) == {name.removesuffix("_s") for name in url_options._KNOWN}
    for name, value in url_options.RabbitSettings()._asdict().items():
        said = table[name.removesuffix("_s")]
        assert (seconds(said) if name.endswith("_s") else said) == (
            value if name.endswith("_s") else str(value)
        )


def test_parameters_of_kafka() -> None:
    """Those of Kafka, with their defaults."""
    table = {codes(row[0])[0]: default(row[1]) for row in rows("options.md", "Kafka")}
    assert set(table) == {*kafka_options._KNOWN}
    settings = kafka_options.KafkaSettings({})
    for name in ("prefetch", "max_bytes"):
        assert int(table[name]) == getattr(settings, name)


def test_consumer() -> None:
    """Every method, with its parameters."""
    said = {code.removeprefix(".") for code in named("options.md", "Consumer")}
    names = {re.split(r"\W", each)[0]: each for each in said}
    public = dict(inspect.getmembers(oncely.Consumer, inspect.isfunction))
    assert set(names) == {name for name in public if not name.startswith("_")}
    for name, text in names.items():
        shown = re.findall(r"[*(, ](\w+)(?==|[,)])", text)
        assert set(shown) <= set(inspect.signature(public[name]).parameters), text


def parameters(function: Any, but: int = 0) -> Mapping[str, inspect.Parameter]:
    return dict([*inspect.signature(function).parameters.items()][but:])


@pytest.mark.parametrize(
    ("heading", "function", "but"),
    [
        ("Ledger", oncely.open_ledger, 0),
        ("Bridge", oncely.bridge, 0),
        ("Relay", oncely.Relay, 2),
        ("Functions and blocks", oncely.once, 1),
        ("Webhooks", http.webhook, 1),
    ],
)
def test_arguments(heading: str, function: Any, but: int) -> None:
    """Every argument of a function, and its default where that is a plain one."""
    table = {codes(row[0])[0]: default(row[1]) for row in rows("options.md", heading)}
    known = parameters(function, but)
    assert set(table) == set(known)
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty:
            assert table[name] == "required", name
        elif isinstance(parameter.default, str | bool | int):
            assert table[name] == str(parameter.default), name


def test_options_of_keys() -> None:
    """Every option of idempotency keys over HTTP."""
    said = named("options.md", "Idempotency keys over HTTP")
    assert sorted(said) == sorted(get_type_hints(http.KeyOptions))


def test_options_of_the_sink() -> None:
    """Every option of the sink; those that oncely sets itself are named as such."""
    text = (DOCS / "reference" / "options.md").read_text()
    [internal] = re.findall(r"^Further options \((.*?)\)", text, flags=re.MULTILINE)
    said = [*named("options.md", "Spark sink"), *codes(internal)]
    assert sorted(said) == sorted(sink_options._NAMES - set(POLICY_FIELDS))
    assert set(get_args(sink_options.Mode)) <= {"leased", "transactional", "rows"}


def test_options_of_the_reader() -> None:
    """Every option of reading the ledger."""
    said = named("options.md", "Spark reader")
    assert sorted(said) == sorted(ledger_reader._NAMES)


def test_options_of_process() -> None:
    """What `process` and `foreach_batch` take besides the sink's options."""
    text = (DOCS / "reference" / "options.md").read_text()
    own = {*parameters(spark.process), *parameters(spark.foreach_batch)}
    own -= {"messages", "options", *sink_options._NAMES}
    [told] = re.findall(r"^`process` and `foreach_batch` also take.*\n.*", text, re.MULTILINE)
    assert own <= set(codes(told))


def test_pipeline_file() -> None:
    """Every table and key of the file, in the tables where they belong."""
    said: dict[str, set[str]] = {}
    for row in rows("options.md", "Pipeline file"):
        said.setdefault(codes(row[0])[0], set()).update(codes(row[1]))
    tables = {f"[{name}]": field.annotation for name, field in _PipelineFile.model_fields.items()}
    assert set(said) == set(tables)
    for name, table in tables.items():
        known: Mapping[str, Any] = getattr(table, "model_fields", {})
        assert said[name] == {field.alias or key for key, field in known.items()}, name


def test_environment() -> None:
    """Every variable that the sources read by its name."""
    source = "\n".join(
        file.read_text()
        for file in (DOCS.parent / "src" / "oncely").rglob("*.py")
        if "templates" not in file.parts and file.name != "starters.py"
    )
    read = set(re.findall(r'"(ONCELY_[A-Z_]+)"', source))
    assert set(named("options.md", "Environment variables")) == read


# ---- Metrics -----------------------------------------------------------------------------------


def families(registry: CollectorRegistry, ledger: oncely.Ledger) -> Iterator[tuple[Metric, Any]]:
    """Everything that is shown, with the names of its labels."""
    for collector in registry._collector_to_names:
        [metric] = collector.collect()
        yield metric, collector._labelnames  # type: ignore[attr-defined]
    for gauge in LedgerGauges(ledger, records=True).collect():
        yield gauge, getattr(gauge, "_labelnames", ())


def test_metrics() -> None:
    """Every metric is in the page, with its kind and its labels."""
    registry = CollectorRegistry()
    ledger = oncely.open_ledger("memory://", metrics=Metrics(registry))
    Measured(registry)
    shown = {
        metric.name + ("_total" if metric.type == "counter" else ""): (metric.type, sorted(labels))
        for metric, labels in families(registry, ledger)
    }
    said = {
        codes(row[0])[0]: (row[1].split(",")[0], sorted(codes(row[2])))
        for row in rows("metrics.md")
    }
    assert said == shown


# ---- Claims ------------------------------------------------------------------------------------


def test_what_takes_a_policy() -> None:
    """What the page names as without a policy has none; whatever asks for a claim has one."""
    text = (DOCS / "reference" / "policies.md").read_text()
    [told] = re.findall(r"^.*Without a policy are (.*)\.$", text, re.MULTILINE)
    without: set[Any] = {
        *(oncely.bridge, oncely.Relay, http.webhook, upsert, MessageTracker),
        *(ProcessedMessageRepository, lake.write_delta, lake.write_iceberg),
    }
    assert {name.lower() for name in codes(told)} == {each.__name__.lower() for each in without}
    assert not [each for each in without if "policy" in parameters(each)]
    asks = (oncely.once, oncely.claimed, oncely.Consumer.idempotent, oncely.Ledger.claim)
    faces = (IdempotenceService, idempotent_consumer, once_task, once_middleware, once_callback)
    assert all("policy" in parameters(each) for each in (*asks, *faces, OnceMiddleware, Idempotent))
    assert "policy" in get_type_hints(http.KeyOptions)


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/comparison.md"])
def test_figures_are_measured(page: str) -> None:
    """A rate, a time or a multiple that a page names is one that was measured."""
    pages = (DOCS / "performance.md", DOCS / "measurements.md")
    measured = "".join(page.read_text() for page in pages)
    named = re.findall(r"([\d.,]+)(?:/s\b| ms\b| times as)", (DOCS.parent / page).read_text())
    assert [each for each in named if each not in measured] == []


# ---- The command -------------------------------------------------------------------------------


def test_exit_codes() -> None:
    """Every command has its row; the codes are those that are returned."""
    names = {name for name, _ in every_command()}
    said = named("exit-codes.md", "By command")
    assert sorted(said) == sorted(names)
    assert [row[0] for row in rows("exit-codes.md")][:4] == [
        str(code) for code in (DONE, FAILURES, WRONG, AWAY)
    ]
