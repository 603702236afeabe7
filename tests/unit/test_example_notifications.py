"""The notifications example: what it expects is true, and its judge sees what is wrong."""

import importlib.util
import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oncely import Claim, Key, Message, MessageError, Policy, Reject
from oncely.core.ids import check_id
from oncely.core.message import Processing, entered
from oncely.core.record import idempotency_key

EXAMPLE = Path(__file__).parents[2] / "examples" / "notifications"
COUNT = 3000


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(
        f"example_notifications_{name}", EXAMPLE / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load("generate")
audit = _load("audit")


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = _load("provider")
    monkeypatch.setitem(sys.modules, "provider", module)
    monkeypatch.setenv(module.LOG_VARIABLE, str(tmp_path / "log" / "provider.jsonl"))
    return module


@pytest.fixture
def notify(provider: Any) -> Any:
    return _load("handlers").notify


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "messages"
    _generate(folder)
    return folder


def _generate(out: Path, seed: int = 7, count: int = COUNT) -> None:
    assert generate.main(["--count", str(count), "--seed", str(seed), "--out", str(out)]) == 0


def _expected(messages: Path) -> dict[str, Any]:
    path = messages.with_name("messages.expected.json")
    expected: dict[str, Any] = json.loads(path.read_bytes())
    return expected


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _deliveries(messages: Path) -> list[tuple[str, bytes]]:
    """Each line, with the name of its file."""
    files = _bytes(messages).items()
    return [(name, line) for name, content in files for line in content.split(b"\n")[:-1]]


def _message(fields: dict[str, Any]) -> Message:
    body = json.dumps(fields["payload"]).encode()
    return Message(fields["id"], body, type=fields["event"])


def _handled(notify: Any, message: Message) -> str:
    """Let the handler have a message under a claim; return its idempotency key."""
    claim = Claim(Key("notification-service", message.id), fence=5, version=0, attempts=2)
    key = idempotency_key(claim.key)
    running = SimpleNamespace(claim=claim, is_over=False, message=message, idempotency_key=key)
    with entered(cast(Processing, running)):
        notify(message)
    return key


def _fate(line: bytes, notify: Any) -> tuple[str, str]:
    """The message id of a delivery that is handled; the reason of one that is not."""
    try:
        fields = json.loads(line.decode())
    except ValueError:
        return "", "not json"
    try:
        message_id = check_id(fields.get("id"))
        _handled(notify, _message(fields))
    except (MessageError, Reject) as error:
        return "", str(error)
    return message_id, ""


def _send_all(messages: Path, provider: Any) -> None:
    """What a faultless run does: every good message, once."""
    seen: set[str] = set()
    for _, line in _deliveries(messages):
        message_id, _ = _fate(line, lambda message: None)
        fields = json.loads(line.decode()) if message_id else {}
        if message_id and message_id not in seen and fields["payload"].get("to"):
            seen.add(message_id)
            _send(provider, message_id)


def _send(provider: Any, message_id: str) -> None:
    provider.send("sms", "+1", "text", message_id=message_id, fence=1, attempt=1, key="k")


def _judge(messages: Path, provider: Any, *options: str) -> int:
    log = str(provider.log_path())
    code: int = audit.main(["--log", log, "--messages", str(messages), *options])
    return code


def test_expected_counts_are_true(messages: Path, notify: Any) -> None:
    """Counted with the ledger's own check of ids and the handler, the counts are the same."""
    fates = [_fate(line, notify) for _, line in _deliveries(messages)]
    ids = [message_id for message_id, reason in fates if not reason]
    expected = _expected(messages)
    assert expected["deliveries"] == len(fates) == COUNT
    assert expected["unique"] == len(set(ids))
    assert expected["duplicates"] == len(ids) - len(set(ids)) == COUNT // 10
    assert expected["broken"] == Counter(reason for _, reason in fates if reason)
    assert sum(expected["broken"].values()) == COUNT // 100


def test_the_pipeline_file_fits(messages: Path) -> None:
    """Its handler is there, its policy is one, and its schema names every field."""
    with (EXAMPLE / "pipeline.toml").open("rb") as file:
        pipeline = tomllib.load(file)
    assert pipeline["pipeline"]["handler"] == "handlers:notify"
    assert Policy(**pipeline["policy"]).tries == 3
    declared = set(re.findall(r"(\w+):", pipeline["source"]["schema"]))
    lines = [line for _, line in _deliveries(messages) if _fate(line, lambda message: None)[0]]
    assert {name for line in lines for name in json.loads(line)["payload"]} == declared


def test_the_handler_hands_the_claim_to_the_provider(notify: Any, provider: Any) -> None:
    """Fence, attempt and idempotency key reach the outside service."""
    payload = {"to": "+447700900123", "text": "hello"}
    message = _message({"id": "m-1", "event": "notification.sms.send", "payload": payload})
    key = _handled(notify, message)
    effect = json.loads(provider.log_path().read_bytes())
    assert effect.pop("pid") > 0
    assert effect == {
        "message_id": "m-1",
        "channel": "sms",
        "fence": 5,
        "attempt": 2,
        "idempotency_key": key,
    }


def test_audit(messages: Path, provider: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A faultless run passes; one message never sent, or sent twice among thousands, is found."""
    _send_all(messages, provider)
    assert _judge(messages, provider) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["effects", str(_expected(messages)["unique"])]
    assert lines[-1] == "effects per message: max 1"
    sent = provider.log_path().read_bytes().splitlines(keepends=True)
    provider.log_path().write_bytes(b"".join(sent[1:]))
    assert _judge(messages, provider) == 1
    assert "wrong: good messages never sent: 1" in capsys.readouterr().out
    assert _judge(messages, provider, "--allow-missing") == 0
    provider.log_path().write_bytes(b"".join([*sent, sent[0]]))
    assert _judge(messages, provider) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "wrong: messages sent more than once: 1",
        "effects per message: max 2",
    ]


@pytest.mark.parametrize("name", ["generate", "provider", "audit"])
def test_the_judge_and_its_witnesses_do_not_know_oncely(name: str) -> None:
    """Their word counts because none of our code is in it."""
    lines = (EXAMPLE / f"{name}.py").read_text().splitlines()
    imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
    assert imports
    assert not any("oncely" in line for line in imports)
