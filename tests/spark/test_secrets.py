"""What is secret stays out of everything that Spark and oncely show."""

import pickle
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from pyspark.errors import PySparkException
from tests.spark.conftest import HERE
from tests.spark.programs import environment
from tests.spark.tasks import batches_of

from oncely import open_transport
from oncely.spark.modes.open_task import open_task
from oncely.spark.reader import read_reader_options
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from tests.servers import Rabbitmq
    from tests.spark.conftest import Write

Frame = Callable[..., "DataFrame"]

PASSWORD = "pa55-of-the-ledger"
BROKERS_PASSWORD = "pa55-of-the-broker"

# A program of a user's: a batch, a stream and a read of everything, all logs on, all that Spark
# shows printed.
_PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from oncely.spark.session import open_session
folder, handlers = sys.argv[1:]
spark = open_session("secrets", {"spark.sql.shuffle.partitions": "5"})
names = ("spark.master", "spark.sql.ansi.enabled", "spark.sql.shuffle.partitions",
         "spark.sql.session.timeZone", "spark.driver.host", "spark.ui.showConsoleProgress")
print("configured:", *(spark.conf.get(name) for name in names))
spark.sparkContext.setLogLevel("INFO")
rows = [(f"m{n}", f"{folder}/effects.jsonl") for n in range(3)]
messages = spark.createDataFrame(rows, "id string, source string")
messages.write.parquet(f"{folder}/messages")
stream = spark.readStream.schema("id string, source string").parquet(f"{folder}/messages")
modes = {"leased": {"handler": "handlers:work"}, "transactional": {"handler": "handlers:book"},
         "rows": {"table": "payments"}}
for mode, own in modes.items():
    options = {"consumer": mode, "ledger": "env:LEDGER_SECRET", "mode": mode, **own,
               "handler_path": handlers, "quarantine": f"{folder}/quarantine"}
    messages.write.format("oncely").options(**options).mode("append").save()
    options["ledger"] = f"file:{folder}/secret"
    query = (stream.writeStream.format("oncely").options(**options).trigger(availableNow=True)
             .option("checkpointLocation", f"{folder}/checkpoint/{mode}").start())
    query.awaitTermination()
    query.explain(True)
    print(query.lastProgress)
options = {"consumer": "sends", "ledger": "env:LEDGER_SECRET", "handler": "sending:send",
           "handler_path": folder, "quarantine": f"{folder}/quarantine",
           "transport": f"file:{folder}/brokers-secret"}
query = (stream.writeStream.format("oncely").options(**options).trigger(availableNow=True)
         .option("checkpointLocation", f"{folder}/checkpoint/sends").start())
query.awaitTermination()
query.explain(True)
print(query.lastProgress)
records = spark.read.format("oncely").option("ledger", f"file:{folder}/secret").load()
print("records:", records.count())
records.explain("extended")
records.explain("formatted")
print(spark.sparkContext.getConf().getAll())
spark.stop()
"""
_DEFAULTS = """
spark.master local[1]
spark.sql.ansi.enabled true
spark.sql.shuffle.partitions 3
spark.eventLog.enabled true
spark.eventLog.compress false
spark.eventLog.dir file:{folder}/events
"""
_SENDING = "def send(message):\n    message.send('receipts', {'for': message.id})\n"


@pytest.mark.in_turn("a Spark of its own")
@pytest.mark.timeout(1_200)
def test_a_password_reaches_no_page_and_no_log(
    postgresql_url: str, rabbitmq: "Rabbitmq", rabbitmq_url: str, tmp_path: Path
) -> None:
    """The ledger's in each mode, and the transport's: neither output nor logs, event log, plans,
    checkpoint or quarantine hold one. And Spark's own file of defaults comes
    before our defaults, and after what the program says.
    """
    url = re.sub("://[^@]*@", f"://oncely:{PASSWORD}@", postgresql_url)
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE payments (id text, source text)")
        connection.execute("CREATE TABLE effects (name text)")
    vhost = rabbitmq_url.rpartition("/")[2]
    rabbitmq.add_user("spark", BROKERS_PASSWORD, vhost, ".*", ".*", ".*")
    broker = re.sub("://[^@]*@", f"://spark:{BROKERS_PASSWORD}@", rabbitmq_url)
    with closing(open_transport(broker)) as transport:
        transport.subscribe("receipts", [])
    (tmp_path / "events").mkdir()
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "sending.py").write_text(_SENDING)
    (tmp_path / "spark-defaults.conf").write_text(_DEFAULTS.format(folder=tmp_path))
    secrets = {tmp_path / "secret": url, tmp_path / "brokers-secret": broker}
    for file, secret in secrets.items():
        file.write_text(secret)
    run = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path, HERE],
        env=environment(LEDGER_SECRET=url, SPARK_CONF_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=1_000,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3_000:]
    assert "configured: local[1] true 5 UTC 127.0.0.1 false" in run.stdout
    assert "records: 12" in run.stdout
    with closing(open_transport(broker)) as transport:
        assert transport.receive("receipts", 1, 10)
    for file in secrets:
        file.unlink()
    shown = {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    events = b"".join(text for name, text in shown.items() if "/events/" in name)
    assert b"SparkListenerSQLExecutionStart" in events
    assert b"SparkListenerEnvironmentUpdate" in events
    shown |= {"stdout": run.stdout.encode(), "stderr": run.stderr.encode()}
    for password in (PASSWORD, BROKERS_PASSWORD):
        assert [name for name, text in shown.items() if password.encode() in text] == []


def test_options_that_travel_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pickled for the executors names the secret, and a repr does not even show a URL."""
    url = f"postgresql://oncely:{PASSWORD}@nowhere/ledger"
    monkeypatch.setenv("LEDGER_SECRET", url)
    given = {"consumer": "tests", "handler": "handlers:work", "handler_path": str(HERE)}
    for read in (read_options, lambda o: read_reader_options({"ledger": o["ledger"]})):
        assert PASSWORD.encode() not in pickle.dumps(read({**given, "ledger": "env:LEDGER_SECRET"}))
        assert PASSWORD not in repr(read({**given, "ledger": url}))


def test_a_password_in_a_url_is_masked_in_errors(frame: Frame, write: "Write") -> None:
    """Where the user writes the password into the URL, no error of ours shows it."""
    url = (
        f"postgresql://oncely:{PASSWORD}@127.0.0.1:1/ledger?nonsense={PASSWORD}&password={PASSWORD}"
    )
    with pytest.raises(PySparkException) as raised:
        write(frame("a"), ledger=url)
    assert "oncely:***@127.0.0.1" in str(raised.value)
    assert f":{PASSWORD}" not in str(raised.value)
    assert f"password={PASSWORD}" not in str(raised.value)


@pytest.mark.parametrize(
    ("location", "told", "told_by_driver"),
    [
        (
            "env:NO_SUCH_LEDGER",
            r"NO_SUCH_LEDGER is not set on \S+ for Spark; on a cluster, set",
            r"NO_SUCH_LEDGER is not set on \S+ for Spark's driver; set \S+ where that is",
        ),
        (
            "file:/no/such/ledger",
            r"'/no/such/ledger' cannot be read: .* on \S+ for Spark\b",
            r"'/no/such/ledger' cannot be read: .* on \S+ for Spark's driver\b",
        ),
    ],
)
def test_a_secret_that_is_missing(
    location: str, told: str, told_by_driver: str, frame: Frame, write: "Write"
) -> None:
    """It is read where the task runs, or by the driver in mode `rows`; each says so in a line."""
    with pytest.raises(PySparkException, match=rf"ConfigError: ledger: .*{told}"):
        write(frame("a"), ledger=location)
    with pytest.raises(PySparkException, match=rf"ConfigError: ledger: .*{told_by_driver}"):
        write(frame("a"), ledger=location, mode="rows", handler="", table="payments")


@pytest.mark.parametrize(
    ("mode", "own"),
    [("transactional", {"handler": "tests.spark.tasks:book"}), ("rows", {"table": "effects"})],
)
def test_a_changed_secret_is_taken_up(mode: str, own: dict[str, str], tmp_path: Path) -> None:
    """By a process that has read the old one: ledger, table and sessions are where it says now."""
    secret = tmp_path / "secret"
    for name in ("old", "new"):
        secret.write_text(f"sqlite:///{tmp_path}/{name}.db")
        with closing(sqlite3.connect(tmp_path / f"{name}.db")) as database:
            database.execute("CREATE TABLE effects (name TEXT)")
            given = {"mode": mode, "consumer": "tests", "ledger": f"file:{secret}", **own}
            options = read_options(given)
            quarantine = Quarantine(str(tmp_path / "quarantine"), "0")
            task = open_task(options, quarantine.add, TaskChannel(None, ""))
            row = {"id": name, "name": name} if mode == "rows" else {"id": name}
            task.run(batches_of([row]))
            assert database.execute("SELECT name FROM effects").fetchall() == [(name,)]
            ids = database.execute("SELECT message_id FROM processed_messages").fetchall()
            assert ids == [(name,)]
