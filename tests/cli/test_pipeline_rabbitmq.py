"""A pipeline whose source is a queue, in processes of its own that are killed."""

from collections.abc import Sequence
from contextlib import closing

import pytest
from tests.cli.conftest import Project
from tests.cli.test_pipeline_runs import KILLS, kill, wait_for_effects
from tests.turns import in_turn

from oncely import ConfigError, Message, State, open_ledger, open_transport
from oncely.spark.pipeline.config import MessageTable, read_config

_PER_RUN = 2_000
_QUEUE = "orders"
# Where the source is killed; None: everything is killed while handlers run.
_POINTS = in_turn(
    "point of a killed source",
    ["segment_stored:2", None, "segment_written:2", "segment_acknowledged:2"],
)


def read_from_queue(project: Project, url: str) -> None:
    (project.folder / "broker.url").write_text(url)
    project.tables["source"] = {"format": "oncely-rabbitmq"}
    del project.tables["message"]
    project.tables["source.options"] = {
        "url": "file:broker.url",
        "queue": _QUEUE,
        "spool": "out/spool",
        "max_messages_per_batch": 1_000,
    }


def publish(url: str, ids: Sequence[str]) -> None:
    with closing(open_transport(url)) as transport:
        transport.publish(_QUEUE, [Message(id_, b"{}") for id_ in ids])


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(1_800)
def test_killed_runs_lose_and_double_nothing(project: Project, rabbitmq_url: str) -> None:
    """Each message has one effect, or is in doubt where its handler was killed."""
    read_from_queue(project, rabbitmq_url)
    project.tables["policy"] = {"on_in_doubt": "hold", "lease": "2s", "tries": 1_000}
    ids = [f"m{n:05}" for n in range(KILLS * _PER_RUN)]
    publish(rabbitmq_url, ids + ids[::10])
    for kills in range(KILLS):
        point = _POINTS[kills % len(_POINTS)]
        if point is None:
            run = project.start("--json", PAUSE_S="0.002")
            wait_for_effects(project, 300, run)
        else:
            run = project.start("--json", ONCELY_CRASH_POINT=point)
            assert run.wait(600) == 1
        kill(run, all_of_it=True)
    last = project.run()
    done = project.effects()
    ledger = open_ledger(f"sqlite:///{project.folder}/out/ledger.db")
    doubtful = {r.key.message_id for r in ledger.scan(state=State.PROCESSING, limit=len(ids))}
    assert set(done.values()) == {1}
    assert set(ids) - set(done) <= doubtful
    assert last["in_doubt"] >= len(doubtful)
    with closing(open_transport(rabbitmq_url)) as transport:
        assert transport.is_drained(_QUEUE)


def test_what_is_relative_is_so_to_the_file(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool and the secret; and every column of a message goes under its own name."""
    read_from_queue(project, "amqp://user:secret@localhost")
    config = read_config(project.save())
    assert config.source_options == {
        "url": f"file:{project.folder}/broker.url",
        "queue": _QUEUE,
        "spool": f"{project.folder}/out/spool",
        "max_messages_per_batch": "1000",
    }
    assert config.message.model_dump() == {name: name for name in MessageTable.model_fields}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quue": "x"}, "[source] options: quue: there is no such key; did you mean 'queue'?"),
        ({"queue": ""}, "[source] options: queue: missing; write"),
        ({"url": "file:gone"}, "gone' cannot be read: No such file"),
        ({"url": "amqp//localhost"}, "[source] options: url: 'amqp//localhost' is not a URL"),
    ],
)
def test_mistakes_name_the_file_and_the_key(
    project: Project, options: dict[str, str], said: str
) -> None:
    """In one line, before Spark is started."""
    read_from_queue(project, "amqp://user:secret@localhost")
    project.tables["source.options"] |= options
    with pytest.raises(ConfigError) as raised:
        read_config(project.save())
    assert str(raised.value).startswith(f"{project.file}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
