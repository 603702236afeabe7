"""What a role may do: with the grants of the page each program does all of its acts, and where one
is missing, the check and the act that needs it name it.
"""

import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args
from uuid import uuid4

import pytest
from redis import Redis as Client
from sqlalchemy import make_url
from tests.cli.conftest import Project
from tests.docs.pages import DOCS
from tests.integration.drivers import connect_mysql, connect_postgresql, rows_of
from tests.processes import exit_of, forked
from tests.records import deferred, granted
from tests.servers import Redis

from oncely import ops
from oncely.cli import main
from oncely.consumer import Consumer
from oncely.core.activity import Activity, Run
from oncely.core.errors import ConfigError, StoreDenied
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, State
from oncely.core.verdicts import Ack
from oncely.core.waiting import WaitingMessage, retries_of, retry_name
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.locations import LedgerAddress
from oncely.outbox import Relay
from oncely.spark.ledgers import migrated_ledger
from oncely.stores.names import Program
from oncely.stores.store import PutBack
from oncely.transports.open_transport import open_transport

_ids = itertools.count()
_GRANT = re.compile(r"GRANT ([\w, ]+) ON ((?:SEQUENCE )?[\w., \n]+) TO")
Acts = Mapping[str, Callable[[], Any]]


class Shop(NamedTuple):
    """A ledger in a database of a server, and its operator, who may do everything."""

    kind: str
    url: str
    run: Callable[[str], Any]
    admin: Ledger

    def role(self, title: str) -> tuple[str, str, str]:
        """The URL of a role, its name in a statement, and what it was granted by the page."""
        page = (DOCS / "reference" / "privileges.md").read_text()
        title = f"{title} in MariaDB" if self.kind == "mysql" else title
        [block] = re.findall(rf"^### {title}\n\n```sql\n(.*?)```", page, re.MULTILINE | re.DOTALL)
        name = f"r{uuid4().hex[:12]}"
        block = re.sub(r"shop_\w+", name, block)
        block = block.replace("shop.", f"{make_url(self.url).database}.")
        for statement in block.split(";\n"):
            if statement:
                self.run(statement)
        url = make_url(self.url).set(username=name, password="change-me")
        named = f"'{name}'@'%'" if self.kind == "mysql" else name
        return url.render_as_string(hide_password=False), named, block


@pytest.fixture(params=["postgresql", "mysql"])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    """A shop on each kind of server; its roles are gone afterwards."""
    kind = request.param
    url = str(request.getfixturevalue(f"{kind}_ledger_url"))
    roles: list[str] = []
    connect: Callable[[str], Any] = connect_mysql if kind == "mysql" else connect_postgresql
    with closing(connect(url)) as operator:

        def run(statement: str) -> Any:
            if made := re.match(r"CREATE (ROLE|USER) (\S+)", statement):
                roles.append(made[2])
            if kind == "mysql":
                return rows_of(operator, statement.replace("%", "%%"))
            return operator.execute(statement.encode())

        with closing(open_ledger(url)) as admin:
            admin.recorder.is_silent = True
            yield Shop(kind, url, run, admin)
        for name in roles:
            if kind == "postgresql":
                run(f"DROP OWNED BY {name}")
            run(f"DROP {'USER' if kind == 'mysql' else 'ROLE'} {name}")


# ---- What programs do --------------------------------------------------------------------------


def claimed(ledger: Ledger, lease: str = "60s") -> Claim:
    return granted(ledger.claim(Key("billing", f"m{next(_ids)}"), lease))


def waiting(ledger: Ledger, *, is_dead: bool) -> WaitingMessage:
    """A failed message that waits for its retry, or is a dead letter."""
    claim, queue = claimed(ledger), retries_of("billing")
    ledger.fail(claim, "no", final=is_dead)
    row = deferred(claim.key.message_id, parent=claim.key)
    name = retry_name(queue)
    ledger.mailbox.keep([replace(row, queue=queue, name=name, reason="no", is_set_aside=is_dead)])
    return ledger.mailbox.of(claim.key)[0]


def sent(ledger: Ledger) -> None:
    claim = claimed(ledger)
    ledger.handled(claim, None, [deferred("s", parent=claim.key)])
    ledger.mailbox.sent(ledger.mailbox.take(10, "60s", [claim.key]))


def told(ledger: Ledger, *, counts: bool = True) -> None:
    """What a process tells of itself while it lives, after a restore, and in the end, in which it
    removes the one before: in any order with others of this process.
    """
    recorder = ledger.recorder
    for _ in range(2):
        recorder.worker_id = f"worker{next(_ids)}"
        if counts:
            recorder.add(f"c{next(_ids)}", Activity("", "", 0, 1, 0, 0, 0, 0, ()))
        recorder._tell()
        recorder._tell()
        recorder._note_set_back(None, 1.0)
        ledger.operations.end_worker(recorder.worker_id)


def worker(ledger: Ledger, _: Ledger, url: str) -> Acts:
    def step() -> None:
        ledger.keep_step(claim := claimed(ledger), "debit", 1)
        ledger.complete(claim)

    def queue() -> None:
        with closing(open_transport(url)) as transport:
            transport.publish(f"q{next(_ids)}", [Message("1", b"")])
            transport.publish("orders", [Message("1", b"")])
            taken = transport.receive("orders", 10, 0.0)
            transport.acknowledge([(each, Ack()) for each in taken])

    hook = Key("hook", str(next(_ids)))
    return {
        "complete": lambda: ledger.complete(claimed(ledger)),
        "extend": lambda: ledger.extend(claimed(ledger), "5m"),
        "release": lambda: ledger.release(claimed(ledger)),
        "retention": lambda: ledger.keep_retention("billing", float(next(_ids) + 9)),
        "retry": lambda: waiting(ledger, is_dead=False),
        "send": lambda: sent(ledger),
        "step": step,
        "queue": queue,
        "webhook": lambda: ledger.mailbox.put_once(hook, "hooks", Message("1", b""), Policy()),
        "tell": lambda: told(ledger),
    }


def spark(ledger: Ledger, admin: Ledger, url: str) -> Acts:
    def run() -> None:
        one = Run(f"r{next(_ids)}", "orders", "billing", 1.0, None, {})
        ledger.operations.keep_run(one)
        ledger.operations.keep_run(one._replace(ended=2.0))

    return {**worker(ledger, admin, url), "run": run}


def relay(ledger: Ledger, admin: Ledger, _: str) -> Acts:
    def drain() -> None:
        left = claimed(admin)
        admin.handled(left, None, [deferred("s", parent=left.key)])
        with closing(open_transport(f"memory://{next(_ids)}")) as transport:
            Relay(ledger, transport, create_queues=True).drain(threading.Event())

    return {"drain": drain, "tell": lambda: told(ledger, counts=False)}


def operator(ledger: Ledger, admin: Ledger, _: str) -> Acts:
    def failed() -> Key:
        admin.fail(claim := claimed(admin), "no", final=True)
        return claim.key

    def forget() -> None:
        admin.keep_step(claim := claimed(admin), "debit", 1)
        admin.complete(claim)
        ops.forget(ledger, ops.find(ledger, claim.key.message_id), by="anna")

    def discard() -> None:
        claim = claimed(admin)
        admin.handled(claim, None, [deferred("s", parent=claim.key)])
        [row] = admin.mailbox.take(1, "60s", [claim.key])
        admin.mailbox.put_back([PutBack(row, "no", None)])
        ops.discard_unsent(ledger, [row.number or 0], by="anna")

    def purge() -> None:
        admin.complete(claimed(admin))
        if error := ops.purge(ledger, "0s", audit_older_than="0s", by="anna").audit_error:
            raise StoreDenied(error)

    return {
        "reset": lambda: ops.reset(ledger, [*ledger.find_many([failed()]).values()], by="anna"),
        "forget": forget,
        "retry": lambda: ops.retry_letters(
            ledger, [waiting(admin, is_dead=True).number or 0], by="anna"
        ),
        "discard_waiting": lambda: ops.discard_waiting(
            ledger, [waiting(admin, is_dead=False).parent], by="anna"
        ),
        "discard": discard,
        "purge": purge,
        "tell": lambda: told(ledger),
    }


def reader(ledger: Ledger, _: Ledger, __: str) -> Acts:
    return {
        "overview": lambda: ops.overview(ledger),
        "story": lambda: ops.story(ledger, Key("billing", "m")),
        "details": lambda: ops.details(ledger, Key("billing", "m")),
        "history": lambda: (
            ledger.operations.audit(),
            ops.activity(ledger),
            ledger.operations.runs(),
        ),
        "letters": lambda: ops.dead_letters(ledger, None, 10),
    }


_ACTS: Mapping[str, Callable[[Ledger, Ledger, str], Acts]] = {
    "worker": worker,
    "spark": spark,
    "relay": relay,
    "operator": operator,
    "reader": reader,
}


def errors_of(acts: Acts) -> Sequence[str]:
    """The errors of what a role may not do."""
    errors = []
    for act in acts.values():
        try:
            act()
        except (StoreDenied, ConfigError) as error:
            errors.append(str(error))
    assert not any("\n" in error for error in errors)
    return errors


# ---- Each grant --------------------------------------------------------------------------------


@pytest.mark.in_turn("privileges")
@pytest.mark.parametrize("program", get_args(Program))
def test_each_grant_is_enough_and_needed(shop: Shop, program: Program) -> None:
    """With the grants of the page a role does all of its acts. Without one of them the check says
    what to type, which helps, and an act that needs it fails with one line that says so, too.
    """
    url, name, block = shop.role(program.capitalize())
    grants = [
        (privilege, on)
        for privileges, tables in _GRANT.findall(block)
        for privilege in privileges.split(", ")
        for on in re.split(r",\s+", tables)
    ]
    with closing(open_ledger(url)) as ledger:
        ledger.recorder.is_silent = True
        acts = _ACTS[program](ledger, shop.admin, url)
        assert errors_of(acts) == []
        assert ledger.problems(program) == []
        for privilege, on in grants:
            shop.run(f"REVOKE {privilege} ON {on} FROM {name}")
            [problem] = ledger.problems(program)
            grant = problem.partition("type: ")[2]
            assert re.sub(r'["`]', "", grant) == f"GRANT {privilege} ON {on} TO {name}"
            if privilege != "SELECT":
                # Where it does not know what kind of program it is, it names what any would need.
                named = re.escape(grant).replace(privilege, rf"[A-Z, ]*\b{privilege}\b[A-Z, ]*")
                assert any(re.search(named, error) for error in errors_of(acts)), grant
            shop.run(grant)
        assert ledger.problems(program) == []


def test_schema_of_its_own(postgresql_url: str) -> None:
    """In PostgreSQL a role needs the schema, too."""
    name = f"r{uuid4().hex[:12]}"
    with closing(connect_postgresql(postgresql_url)) as operator:
        operator.execute(f"CREATE SCHEMA shop; CREATE ROLE {name} LOGIN".encode())
        with closing(open_ledger(postgresql_url, schema="shop")) as admin:
            admin.migrate()
        url = make_url(postgresql_url).set(username=name).render_as_string(hide_password=False)
        with closing(open_ledger(url, schema="shop")) as ledger:
            [problem] = ledger.problems("reader")
            assert problem.endswith(f"GRANT USAGE ON SCHEMA shop TO {name}")
        operator.execute(f"DROP ROLE {name}".encode())


def test_migrations(shop: Shop) -> None:
    """The role of the page makes the tables of a ledger; without a privilege the error says which
    it needs.
    """
    url, name, block = shop.role("Migrate")
    [(privileges, on)] = re.findall(r"GRANT ([\w, ]+) ON (.+) TO", block)
    needed = [each for each in privileges.split(", ") if each not in ("USAGE", "ALTER")]
    for n, privilege in enumerate([*needed, ""]):
        with closing(open_ledger(url, table=f"own{n}")) as ledger:
            if privilege:
                shop.run(f"REVOKE {privilege} ON {on} FROM {name}")
                with pytest.raises(StoreDenied, match=rf"^[^\n]*\b{privilege}\b[^\n]*$"):
                    ledger.migrate()
                shop.run(f"GRANT {privilege} ON {on} TO {name}")
            else:
                ledger.migrate()
                assert ledger.problems("reader") == []


@pytest.mark.parametrize(
    ("privilege", "table"), [("UPDATE", "processed_messages"), ("DELETE", "waiting_messages")]
)
def test_consumer_is_told(
    shop: Shop,
    privilege: str,
    table: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A consumer that lacks a privilege says so at the start, before any handler runs, and so does
    a pipeline, before Spark starts; where it is taken away meanwhile, the run ends with one line,
    and no handler runs twice. The tasks of Spark have their ledger from `migrated_ledger`.
    """
    url, name, _ = shop.role("Worker")
    revoke = f"REVOKE {privilege} ON {table} FROM {name}"
    handled = []

    def handle(message: Message) -> None:
        handled.append(message.id)
        shop.run(revoke)

    def consume() -> str:
        with closing(open_ledger(url)) as ledger:
            consumer = Consumer(url, "orders").idempotent(ledger, "billing")
            with pytest.raises((ConfigError, StoreDenied)) as raised:
                consumer.consume(handle, drain=True)
            return str(raised.value)

    with closing(open_transport(shop.url)) as transport:
        transport.publish("orders", [Message("1", b"{}")])
    grant = rf"^[^\n]*GRANT {privilege} ON \S*{table}\S* TO '?{name}[^\n]*$"
    assert re.match(grant, consume())
    assert handled == ["1"]
    [record] = shop.admin.scan()
    assert (record.state, record.attempts) == (State.PROCESSING, 1)
    assert re.match(rf"^ledger: its role lacks what a worker needs; type: {grant[7:]}", consume())
    assert handled == ["1"]
    project = Project(tmp_path, request)
    project.tables["pipeline"]["ledger"] = url
    code, said = project.outcome()
    lacks = r"starting Spark\n.*: \[pipeline\] ledger: its role lacks what Spark needs; type: "
    assert code == 2
    assert re.match(f"{lacks}{grant[7:]}", said)
    with pytest.raises(ConfigError, match="its role lacks what Spark needs; type: GRANT"):
        migrated_ledger(LedgerAddress(url))
    assert main(["check", "--ledger", url]) == 1
    assert re.match(grant, capsys.readouterr().out.removesuffix("\n"))
    assert main(["check", "--for", "reader", "--ledger", url]) == 0


# ---- Files and Redis ---------------------------------------------------------------------------


def test_file_that_cannot_be_written(sqlite_ledger_url: str, tmp_path: Path) -> None:
    """A file, or a folder, in which this process may not write, is told at once, in one line, by
    the check and by each call; a file that can only be read can be looked at.
    """
    file = Path(sqlite_ledger_url.removeprefix("sqlite:///"))
    modes = [(0o444, 0o777, True), (0o400, 0o755, False), (0o666, 0o755, False)]

    def look(may_read: bool) -> None:
        if os.geteuid() == 0:
            os.setuid(65_534)
        with closing(open_ledger(sqlite_ledger_url)) as ledger:
            ledger.recorder.is_silent = True
            words = "read and write the file and its folder$"
            with pytest.raises(StoreDenied, match=words):
                ledger.claim(Key("billing", "1"))
            if may_read:
                [problem] = ledger.problems()
                assert re.search(words, problem)
                assert ledger.problems("reader") == []

    with closing(open_ledger(sqlite_ledger_url)) as ledger:
        # All is imported, as the child may not read what is root's.
        assert ledger.problems() == []
    # Others may go where pytest has made it.
    for folder in tmp_path.parents[:3]:
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o111)
    for file_mode, folder_mode, may_read in modes:
        file.chmod(file_mode)
        file.parent.chmod(folder_mode)
        try:
            assert exit_of(forked(lambda may_read=may_read: look(may_read))) == 0  # type: ignore[misc]
        finally:
            file.parent.chmod(0o755)


@pytest.mark.parametrize("program", ["worker", "reader"])
def test_commands_of_redis(private_redis: Redis, program: Program) -> None:
    """With the commands of the page a user does all of its acts; without one of them the check, and
    a call that needs it, name it.
    """
    page = (DOCS / "reference" / "privileges.md").read_text()
    user = "shop_reader" if program == "reader" else "shop_writer"
    [line] = re.findall(rf"^ACL SETUSER {user} .*$", page, re.MULTILINE)
    url = private_redis.url.replace("//", f"//{user}:change-me@")
    with Client.from_url(private_redis.url) as client, ExitStack() as opened:
        client.execute_command(*line.split())
        ledger = opened.enter_context(closing(open_ledger(url)))
        admin = opened.enter_context(closing(open_ledger(private_redis.url)))
        acts = _redis_acts(ledger, program)
        assert errors_of(acts) == []
        unsafe = len(ledger.problems(program))
        for command in re.findall(r"\+(\S+)", line):
            client.execute_command("ACL", "SETUSER", user, f"-{command}")
            client.script_flush()
            # What a script did before it was denied the command stays.
            client.flushdb()
            granted(admin.claim(Key("billing", "m")))
            errors = errors_of({**acts, "check": lambda: told_of(ledger.problems(program), unsafe)})
            assert any(re.search(rf"\+{re.escape(command)}\b|'{command}'", e) for e in errors), (
                command
            )
            client.execute_command("ACL", "SETUSER", user, f"+{command}")


def told_of(problems: Sequence[str], usual: int) -> None:
    if len(problems) > usual:
        raise StoreDenied(problems[0])


def _redis_acts(ledger: Ledger, program: Program) -> Acts:
    acts: Acts = {"overview": lambda: ops.overview(ledger), "scan": lambda: [*ledger.read()]}
    if program == "reader":
        return acts
    return {
        **acts,
        "complete": lambda: ledger.complete(claimed(ledger)),
        "release": lambda: ledger.release(claimed(ledger)),
        "retention": lambda: ledger.keep_retention("billing", float(next(_ids) + 9)),
        "purge": lambda: ledger.purge("0s"),
    }
