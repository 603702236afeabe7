"""A wrong pipeline file: exit code 2, one line that names the file and the key, no traceback."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command, Project

from oncely.cli.pipeline import rows_of
from oncely.cli.terminal import aligned, fields_table, put
from oncely.core.errors import ConfigError
from oncely.spark.pipeline.config import read_config
from oncely.spark.sink.counts import Counts, Report
from oncely.spark.sink.sink_options import import_function

GONE = object()

WRONG: list[tuple[str, str, Any, str]] = [
    ("pipeline", "name", GONE, "[pipeline] name: is missing"),
    ("pipeline", "ledger", GONE, "[pipeline] ledger: is missing"),
    ("pipeline", "handler", GONE, "[pipeline] handler: missing; write handler = "),
    ("message", "id", GONE, "[message] id: is missing"),
    ("pipeline", "handlr", "a:b", "[pipeline] handlr: there is no such key; did you mean 'handler"),
    ("policy", "tires", 3, "[policy] tires: there is no such key; did you mean 'tries'"),
    ("pipeline", "name", 7, "[pipeline] name: input should be a valid string, got 7"),
    ("policy", "backoff", ["5"], "[policy] backoff: '5' is not a duration"),
    ("policy", "backoff", [], "[policy] backoff: give a list of delays"),
    ("policy", "on_failed", "explode", "[policy] on_failed: 'explode' is none of retry, skip"),
    ("policy", "on_in_doubt", "nowhere:f", "[policy] on_in_doubt: 'nowhere:f' cannot be imported"),
    ("pipeline", "handler", "handlers", "[pipeline] handler: 'handlers' names no function"),
    ("pipeline", "handler", "handlers:not_callable", "is not a function"),
    ("pipeline", "handler", "handlers:two", "two takes (message, session); write `def two"),
    ("pipeline", "mode", "transactional", "handler: handle takes (message); write `def handle(mes"),
    ("pipeline", "checkpoint", "out/quarantine", "quarantine' is in the folder of [pipeline] ch"),
    ("pipeline", "checkpoint", "in/../out", "ledger.db' is in the folder of [pipeline] checkpo"),
    ("pipeline", "quarantine", "out/checkpoint/q", "q' is in the folder of [pipeline] checkpoint"),
    ("pipeline", "checkpoint", "in", "is in the folder of [source] path; name one beside it"),
    ("pipeline", "handler_batch", "handlers:handle", "[pipeline] handler: a batch handler runs in"),
    ("pipeline", "staging", "out/x", "[pipeline] staging: only a batch handler needs it"),
    ("pipeline", "ledger", "oracle://u:secret@h/db", "[pipeline] ledger: 'oracle://u:***@h/db' is"),
    ("pipeline", "ledger", "sqlite://", "[pipeline] ledger: 'sqlite://' names no file"),
    ("pipeline", "ledger", "env:NOT_SET_ANYWHERE", "variable NOT_SET_ANYWHERE is not set"),
    ("pipeline", "ledger", "file:nowhere.txt", "cannot be read: No such file"),
    ("pipeline", "trigger", "sometimes", "[pipeline] trigger: 'sometimes' is not one"),
    ("pipeline", "mode", "leashed", "[pipeline] mode: input should be 'leased', 'transactional' o"),
    ("pipeline", "mode", "rows", '[pipeline] handler: mode "rows" calls none; drop it'),
    ("source", "path", "nowhere", "[source] path: "),
    ("source", "path", "", "[source] path: string should have at least 1 character"),
    ("pipeline", "consumer", "  ", "[pipeline] consumer: empty consumer"),
    ("pipeline", "checkpoint", "handlers.py", "handlers.py' is a file; name a folder"),
    ("pipeline", "quarantine", "handlers.py", "handlers.py' is a file; name a folder"),
    ("pipeline", "archive", "handlers.py", "handlers.py' is a file; name a folder"),
    ("pipeline", "checkpoint", "/proc/c", "[pipeline] checkpoint: '/proc/c' cannot be written: "),
    ("pipeline", "archive", "s3a://b/a", "[pipeline] archive: 's3a://b/a' cannot be opened"),
    ("pipeline", "ledger", "sqlite:///folder", "is a folder; name a file"),
    ("pipeline", "ledger", "sqlite:///handlers.py/l.db", "cannot be made: "),
    ("pipeline", "ledger", "env:HOME", "'env:HOME' is not of a known kind"),
    ("pipeline", "ledger", "file:noise.bin", "cannot be read: it is not text"),
    ("pipeline", "handler", "leaves:f", "'leaves:f' cannot be imported: SystemExit: 7"),
]


def said_of(project: Project, table: str, key: str, value: Any) -> str:
    """What is said of the file with this value; without the key, where that is GONE."""
    project.tables[table][key] = value
    if value is GONE:
        del project.tables[table][key]
    code, err = project.outcome()
    begin = f"oncely: {project.file}: "
    assert (code, err.startswith(begin), err.count("\n")) == (2, True, 1)
    return err.removeprefix(begin)


@pytest.mark.parametrize(("table", "key", "value", "said"), WRONG)
def test_a_wrong_file_says_what_is_wrong(
    project: Project, table: str, key: str, value: Any, said: str
) -> None:
    """One line, with the file, the table and the key."""
    (project.folder / "noise.bin").write_bytes(b"\xff\xfe\xfa")
    (project.folder / "folder").mkdir()
    (project.folder / "leaves.py").write_text("raise SystemExit(7)")
    err = said_of(project, table, key, value)
    assert said in err
    assert "secret" not in err


WRONG_ROWS: list[tuple[str, str, Any, str]] = [
    ("pipeline", "table", GONE, '[pipeline] table: missing; write table = "payments"'),
    ("pipeline", "archive", "old", '[pipeline] archive: mode "rows" looks nothing up there'),
    ("message", "body", "body", '[message] body: mode = "rows" takes it under [columns]'),
    ("columns", "id", "id", "[columns] id: is the message's, under [message]; drop it here"),
    ("columns", "amount", GONE, "[columns]: is missing; write a line such as"),
    ("pipeline", "sequence_by", "amount", "[pipeline] sequence_by: wants a key"),
]


@pytest.mark.parametrize(("table", "key", "value", "said"), WRONG_ROWS)
def test_a_wrong_file_for_rows_says_what_is_wrong(
    project: Project, table: str, key: str, value: Any, said: str
) -> None:
    """The same for what only mode `rows` has, or has not."""
    project.tables["pipeline"] |= {"mode": "rows", "table": "payments"}
    del project.tables["pipeline"]["handler"]
    del project.tables["message"]["body"]
    project.tables["columns"] = {"amount": "amount"}
    assert said_of(project, table, key, value).startswith(said)


def test_tables(project: Project) -> None:
    """A table that is not there is named, and so is one that does not exist."""
    project.tables["polcy"] = {}
    code, err = project.outcome()
    assert code == 2
    assert "[polcy]: there is no such table; did you mean '[policy]'?" in err
    del project.tables["polcy"], project.tables["source"]
    assert project.outcome() == (2, f"oncely: {project.file}: [source]: is missing\n")


def test_a_file_that_cannot_be_read(command: Command, tmp_path: Path) -> None:
    """One that is missing, or is not TOML, with the place; and wrong arguments. A traceback is
    escaped, too.
    """
    (tmp_path / "broken.toml").write_text("[pipeline\n")
    for words, said in (
        (["run", str(tmp_path / "gone.toml")], "gone.toml: cannot be read: No such file"),
        (["run", str(tmp_path / "broken.toml")], "broken.toml: not valid TOML: .*line 1"),
        (["run", str(tmp_path / "\x1b.toml"), "--verbose"], r"\A[^\x1b]*Traceback[^\x1b]*\Z"),
        (["run", "a.toml", "--jsn"], "no such option: --jsn"),
        ([], "missing command"),
    ):
        code, _, err = command("pipeline", *words)
        assert code == 2
        assert re.search(said, err)


def test_the_ledger_may_come_from_outside(project: Project) -> None:
    """`--ledger` stands in for the file's."""
    del project.tables["pipeline"]["ledger"]
    _, err = project.outcome("--ledger", "oracle://")
    assert "[pipeline] ledger: 'oracle://' is not of a known kind" in err


def test_a_setting_of_spark_without_quotes(project: Project, command: Command) -> None:
    """A dotted name without quotes is a table to TOML; the line says to quote it."""
    file = project.save()
    file.write_text(file.read_text() + "\nspark.executor.memory = '2g'\n")
    code, _, err = command("pipeline", "run", str(file))
    assert code == 2
    assert "[spark] spark: write a name with dots in quotes" in err


def test_what_is_right_passes(project: Project) -> None:
    """A byte order mark, a pattern with braces, and a secret in a file are all in order."""
    (project.folder / "secret").write_text("sqlite:///out/other.db\n")
    project.tables["source"]["path"] = "in/{a,b}.json"
    project.tables["pipeline"]["ledger"] = "file:secret"
    file = project.save()
    file.write_text("\ufeff" + file.read_text())
    config = read_config(file)
    assert config.address.location == f"sqlite:///{project.folder}/out/other.db"
    assert config.source_path == f"{project.folder}/in/{{a,b}}.json"


def test_two_folders_with_handlers_of_one_name(tmp_path: Path) -> None:
    """A handler comes from its own folder, whatever was imported before."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def f(): return {name!r}")
    for name in ("one", "two", "one"):
        assert import_function("same_name:f", "handler", str(tmp_path / name))() == name


def test_words_of_others_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither markup nor escape sequences in a reason do anything to the table."""
    counts = Counts(received=1)
    counts.quarantined["[/to] is \x1b[31mbad[/]"] = 1
    put(fields_table(rows_of(Report(counts, 1.0)), aligned()))
    text = capsys.readouterr().out
    assert "quarantined: [/to] is \\x1b[31mbad[/]" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("trigger", "told"),
    [
        ("available_now", {"availableNow": True}),
        ("once", {"once": True}),
        ("1m30s", {"processingTime": "90000 milliseconds"}),
    ],
)
def test_triggers(project: Project, trigger: str, told: dict[str, Any]) -> None:
    """A trigger is what Spark is told of it."""
    project.tables["pipeline"]["trigger"] = trigger
    assert read_config(project.save()).trigger == told


def test_secrets_of_a_source(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of whatever source take env:NAME; what is missing is told before Spark starts."""
    monkeypatch.setenv("KAFKA_JAAS", "login required;")
    options = {"kafka.sasl.jaas.config": "env:KAFKA_JAAS", "subscribe": "orders"}
    project.tables["source"] = {"format": "kafka"}
    project.tables["source.options"] = options
    read = read_config(project.save()).source_options
    assert read == {"kafka.sasl.jaas.config": "login required;", "subscribe": "orders"}
    monkeypatch.delenv("KAFKA_JAAS")
    wrong = (
        r"\[source\] options: kafka.sasl.jaas.config: the environment variable KAFKA_JAAS is not"
    )
    with pytest.raises(ConfigError, match=wrong):
        read_config(project.save())


def test_records_of_kafka(project: Project) -> None:
    """Only a source of Kafka can do without [message]; in mode rows, the id alone is read."""
    del project.tables["message"]
    with pytest.raises(ConfigError, match=r"\[message\]: is missing"):
        read_config(project.save())
    project.tables["source"] = {"format": "kafka"}
    assert read_config(project.save()).source_options == {"includeHeaders": "true"}
    del project.tables["pipeline"]["handler"]
    project.tables["pipeline"] |= {"mode": "rows", "table": "offsets"}
    project.tables["columns"] = {"place": "offset"}
    assert read_config(project.save()).message.model_dump(exclude_none=True).keys() == {"id"}
