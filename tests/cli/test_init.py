"""`oncely init`: what it writes runs, by the commands that it prints, and stops the duplicate."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tests.cli.conftest import Answer, Command
from tests.conditions import LIMIT_S, wait_until
from tests.servers import free_port
from tests.turns import in_turn

from oncely.cli.starters import STARTERS, STORES

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = "oncely.env"
SERVERS = {"postgresql": "postgresql_url", "mysql": "mysql_url", "redis": "redis_url"}


class Written:
    """A first program, and what was printed with it; `servers` are where its stores really are."""

    def __init__(self, folder: Path, out: str, servers: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("  ")]
        self.commands, self.elsewhere = (*blocks, [])[:2]
        for placeholder, url in {"8000": str(self.port), **servers}.items():
            self._set(placeholder, url)

    def _set(self, placeholder: str, value: str) -> None:
        """Write what is really there into the settings, where there are any."""
        for file in self.folder.glob(SETTINGS):
            file.write_text(file.read_text().replace(placeholder, value))

    def at_port(self, text: str) -> str:
        """With a port that is free, instead of the one that is printed."""
        return text.replace("8000", str(self.port))

    def script(self, lines: Sequence[str]) -> list[str]:
        """What runs these lines as somebody would type them."""
        assert lines[0] == f"  cd {self.folder}"
        return ["sh", "-ec", self.at_port("\n".join(lines))]

    def typed(self, lines: Sequence[str]) -> str:
        ran = subprocess.run(
            self.script(lines),
            env=surroundings(),
            capture_output=True,
            check=False,
            text=True,
            timeout=180,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @contextmanager
    def serving(self) -> Iterator[Path]:
        """Type the first lines, the last of which goes on; where what it prints is."""
        log = self.folder / "server.log"
        # Not one process more than the server, which is to be ended.
        lines = [*self.commands[:-1], f"  exec{self.commands[-1][1:]}"]
        with log.open("w") as out:
            server = subprocess.Popen(
                self.script(lines), env=surroundings(), stdout=out, stderr=subprocess.STDOUT
            )
        try:
            wait_until(self.answers, log.read_text, programs=[server])
            yield log
        finally:
            server.terminate()
            server.wait(LIMIT_S)

    def answers(self) -> bool:
        try:
            urlopen(f"http://127.0.0.1:{self.port}/", timeout=LIMIT_S).close()
        except URLError as error:
            return hasattr(error, "code")  # Whatever is answered.
        return True


def surroundings() -> dict[str, str]:
    """A shell of somebody who has installed oncely, and set nothing."""
    programs = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCELY_")}
    return {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}


Write = Callable[..., Written]
BROKERS = {
    "rabbitmq": ("amqp://guest:guest@localhost/", "rabbitmq_url"),
    "kafka": ("kafka://localhost:9092", "kafka_url"),
}
"""The URL that is written for a broker, and the fixture of the one to use."""


@pytest.fixture
def write(tmp_path: Path, command: Command, request: pytest.FixtureRequest) -> Write:
    """Let a first program be written; its stores are the servers of the tests."""

    def write(delivery: str, store: str) -> Written:
        code, out, err = command(
            "init", f"{tmp_path}/new", "--delivery", delivery, "--store", store
        )
        assert (code, err) == (0, "")
        urls = {}
        if store in SERVERS:
            urls[STORES[store].url] = request.getfixturevalue(SERVERS[store])
        if delivery in BROKERS:
            url, fixture = BROKERS[delivery]
            urls[url] = request.getfixturevalue(fixture)
        return Written(tmp_path / "new", out, urls)

    return write


# ---- What is written, runs ---------------------------------------------------------------------


def check_function(written: Written) -> None:
    """The second call charges nothing, and returns the receipt."""
    out = written.typed(written.commands)
    assert out.count("charging order-17") == 1
    assert out.count("call: receipt for order-17") + out.count("call:  receipt for order-17") == 2
    assert re.search(r"^duplicates +1 *$", out, re.MULTILINE)
    assert "charging" not in written.typed(written.commands[:-1])


def check_queue(written: Written) -> None:
    """The message that is published twice is handled once."""
    out = written.typed(written.commands)
    assert out.count("charging order-17") == 1
    assert re.search(r"^received +2\nhandled +1\nduplicates +1\n", trimmed(out), re.MULTILINE)


def trimmed(out: str) -> str:
    return "\n".join(line.rstrip() for line in out.splitlines()) + "\n"


def check_http(written: Written) -> None:
    """The repeated request gets the first one's answer, and charges nothing."""
    with written.serving() as log:
        first, second = written.typed(written.elsewhere).split("HTTP/1.1 ")[1:]
    assert "idempotency-replayed: true" not in first
    assert "idempotency-replayed: true" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert log.read_text().count("charging 17") == 1


def check_webhook(written: Written) -> None:
    """The delivery that comes twice is stored once, and handled once."""
    with written.serving():
        out = trimmed(written.typed(written.elsewhere))
    assert out.startswith("202 stored\n200 stored before\nhandling issues 72d3162e: opened\n")
    assert "received       1\nhandled        1\n" in out


CHECKS: Mapping[str, tuple[Callable[[Written], None], Sequence[str]]] = {
    "function": (check_function, ("sqlite", "redis")),
    "queue": (check_queue, ("sqlite", "mysql")),
    "rabbitmq": (check_queue, ("postgresql",)),
    "kafka": (check_queue, ("sqlite",)),
    "http": (check_http, ("sqlite", "mysql")),
    "webhook": (check_webhook, ("sqlite", "postgresql")),
}
"""What the printed commands come to, and on which stores they are typed."""
RUNS = [(delivery, store) for delivery, (_, stores) in CHECKS.items() for store in stores]


@pytest.mark.parametrize(("delivery", "store"), in_turn("init runs", RUNS, count=2))
def test_what_is_written_runs(write: Write, delivery: str, store: str) -> None:
    """By the printed commands, and the duplicate is stopped."""
    check, _ = CHECKS[delivery]
    check(write(delivery, store))


@pytest.mark.in_turn("a Spark of its own")
def test_the_pipeline_that_is_written_runs(write: Write) -> None:
    """The same: the row that is there twice is handled once."""
    written = write("spark", "sqlite")
    out = written.typed(written.commands)
    assert re.search(r"^handled +2$", out, re.MULTILINE)
    assert re.search(r"^duplicates in the input +1$", out, re.MULTILINE)
    assert sorted(out.splitlines()[-2:]) == ["order-17: 99", "order-18: 45"]


def test_spark_on_a_server(
    write: Write, monkeypatch: pytest.MonkeyPatch, postgresql_url: str
) -> None:
    """A server's URL stands in the settings alone, and the pipeline file names it."""
    from oncely.spark.pipeline.config import read_config

    written = write("spark", "postgresql")
    assert written.commands[1] == f"  . ./{SETTINGS}"
    monkeypatch.setenv("ONCELY_LEDGER", postgresql_url)
    config = read_config(written.folder / "pipeline.toml", None, None, None)
    assert config.address.location == "env:ONCELY_LEDGER"
    assert f"ONCELY_LEDGER='{postgresql_url}'" in (written.folder / SETTINGS).read_text()


@pytest.mark.parametrize(
    ("delivery", "store"),
    in_turn("init", [(delivery, store) for delivery in STARTERS for store in STORES], count=3),
)
def test_every_combination(command: Command, tmp_path: Path, delivery: str, store: str) -> None:
    """All that can be chosen is written: short programs, and the store's URL; or it is refused."""
    code, out, _ = command("init", str(tmp_path), "--delivery", delivery, "--store", store)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert code == (2 if store == "redis" and STARTERS[delivery].has_queues else 0)
    assert bool(files) == (code == 0)
    assert ("First write the URL" in out) == (
        code == 0 and (store != "sqlite" or delivery in BROKERS)
    )
    assert not files or any(STORES[store].url in file.read_text() for file in files)
    for program in tmp_path.rglob("*.py"):
        text = program.read_text()
        compile(text, program, "exec")
        assert len(text.splitlines()) <= 40


def test_secrets_are_new(write: Write, tmp_path: Path) -> None:
    """Of two programs neither has the other's secret."""
    first = (write("webhook", "sqlite").folder / SETTINGS).read_text()
    (tmp_path / "new").rename(tmp_path / "old")
    second = (write("webhook", "sqlite").folder / SETTINGS).read_text()
    [one, other] = [re.findall(r"WEBHOOK_SECRET=(\w{40})\n", text) for text in (first, second)]
    assert one != other


def test_secrets_are_hidden(command: Command, tmp_path: Path) -> None:
    """From other users of the machine, and from git, whose other settings stay."""
    (tmp_path / ".gitignore").write_text(".venv")
    (tmp_path / SETTINGS).touch(0o644)
    for _ in range(2):
        assert command("init", f"{tmp_path}", "--delivery", "webhook", "--force").code == 0
    assert (tmp_path / SETTINGS).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".gitignore").read_text() == f".venv\n{SETTINGS}\n"


# ---- What is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "transport"),
    [
        ("2\n\n", "$ONCELY_LEDGER"),
        ("what?\n9\nrabbitmq\nSQLite\n", "amqp://guest:guest@localhost/"),
    ],
)
def test_answers(
    command: Command,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answers: str,
    transport: str,
) -> None:
    """A number, a name or nothing; what is none of these is asked for again."""
    monkeypatch.chdir(tmp_path)
    answer(answers)
    code, out, err = command("init")
    assert code == 0
    assert err.startswith("What do you want to process once?\n  1  function ")
    assert err.count("Number or name [") == answers.count("\n")
    assert out.startswith("wrote app.py, oncely.env\n")
    assert "ype:\n\n  . ./oncely.env\n" in out
    settings = (tmp_path / SETTINGS).read_text()
    assert "export ONCELY_LEDGER='sqlite:///oncely.db'" in settings
    assert transport in settings


def test_an_answer_that_is_not_text(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bytes that are not of the terminal's encoding are not an answer: init asks again."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"\xff\nqueue\n\n"), "utf-8"))
    code, _, err = command("init", str(tmp_path))
    assert (code, err.count("Number or name [")) == (0, 3)


def test_stores_that_fit(command: Command, answer: Answer) -> None:
    """Where queues are needed, Redis is not offered; nobody answering ends it."""
    answer("webhook\n")
    code, out, err = command("init")
    assert (code, out) == (2, "")
    assert "\n  3  mysql" in err
    assert "redis" not in err
    assert err.endswith("oncely: init: no answer; nothing was written\n")


# ---- Mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "",
            "init: not a terminal: add --delivery function, queue, rabbitmq, kafka, http, webhook",
        ),
        ("--store mysql", "init: not a terminal: add --delivery "),
        ("--delivery queue --store redis", "init: Redis keeps no queues, which --delivery queue"),
        ("--delivery smoke", "invalid value for '--delivery': 'smoke' is not one of 'function'"),
        ("--delivery function", "init: already there: app.py; name another folder, or add --force"),
        ("app.py --delivery function --force", "init: 'app.py' cannot be written: File exists;"),
    ],
)
def test_mistakes(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, said: str
) -> None:
    """One line, and nothing is written, not even beside what is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (tmp_path / "app.py").write_text("mine")
    code, out, err = command("init", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"oncely: {said}")
    assert [file.name for file in tmp_path.iterdir()] == ["app.py"]
    assert (tmp_path / "app.py").read_text() == "mine"


def test_force(command: Command, tmp_path: Path) -> None:
    """With --force what is there is overwritten."""
    (tmp_path / "app.py").write_text("mine")
    assert command("init", str(tmp_path), "--delivery", "function", "--force").code == 0
    assert "oncely.once" in (tmp_path / "app.py").read_text()


def test_what_is_missing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be installed is the first thing to type."""
    monkeypatch.setattr("oncely.cli.init_command.find_spec", lambda _: None)
    words = ["init", "new folder", "--delivery", "http", "--store", "mysql", "--force"]
    monkeypatch.setattr("oncely.cli.init_command._write", lambda *_, **__: None)
    out = command(*words).out
    assert "First write the URL of your MariaDB or MySQL into oncely.env." in out
    install = "pip install 'oncely[cli]' 'oncely[mysql]' fastapi uvicorn"
    assert f"\n  {install}\n  cd 'new folder'\n" in out


def test_a_link_that_leads_nowhere(command: Command, tmp_path: Path) -> None:
    """It is there, and nothing is written where it leads."""
    (tmp_path / "app.py").symlink_to(tmp_path / "elsewhere.py")
    code, out, err = command("init", str(tmp_path), "--delivery", "function")
    assert (code, out) == (2, "")
    assert "already there: " in err
    assert [file.name for file in tmp_path.iterdir()] == ["app.py"]


def test_a_folder_like_an_option(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is printed is understood by a shell."""
    monkeypatch.chdir(tmp_path)
    out = command("init", "--delivery", "function", "--", "-new").out
    [line] = [line for line in out.splitlines() if line.startswith("  cd ")]
    subprocess.run(["sh", "-ec", line], check=True)


def test_the_page(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the documentation shows is what is printed."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "how-to" / "init.md").read_text()
    [(typed, printed)] = re.findall(r"\$ oncely (init .*)\n((?s:.)*?)```", page)
    assert command(*typed.split()).out.strip() == printed.strip()
    assert all(f"| `{name}` | {starter.text}" in page for name, starter in STARTERS.items())
