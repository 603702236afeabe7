"""The files of the pages on Kubernetes and on monitoring: commands can be typed, what they ask for
is there.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.pages import DOCS, codes, rows

from oncely.cli import arguments
from oncely.cli.monitoring import _Monitor
from oncely.consumer import Consumer
from oncely.core.errors import ConfigError

FILES = DOCS / "how-to" / "files"
MANIFESTS = sorted((FILES / "kubernetes").glob("*.yaml"))
MONITORING = FILES / "monitoring"


def within(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a document, from the outside in."""
    if isinstance(node, dict):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from within(each)


def every(key: str) -> Iterator[tuple[str, Any]]:
    """What stands under a key in the manifests, with the name of the file."""
    for file in MANIFESTS:
        for node in within(yaml.safe_load(file.read_text())):
            if key in node:
                yield file.name, node[key]


# ---- Kubernetes --------------------------------------------------------------------------------


def test_every_file_is_on_its_page() -> None:
    """A file that no page links to or includes is found by nobody."""
    for file in MANIFESTS:
        page = (DOCS / "how-to" / f"{file.parent.name}.md").read_text()
        assert f"](files/{file.parent.name}/{file.name})" in page


def test_commands() -> None:
    """Every command of a container can be typed, and takes its secrets from the environment."""
    seen = set()
    for name, words in every("command"):
        assert words[0] == "oncely", name
        parsed = arguments.parse([str(word) for word in words[1:]])
        seen.add(parsed.parser.prog)
        for option in ("ledger", "transport"):
            assert str(getattr(parsed, option, None) or "env:").startswith("env:"), name
    assert seen == {f"oncely {each}" for each in ("migrate", "consume", "relay", "purge", "check")}


def test_commands_on_the_page() -> None:
    """What is run by kubectl exec can be typed, too."""
    page = (DOCS / "how-to" / "kubernetes.md").read_text()
    commands = re.findall(r"-- oncely (.*)", page)
    assert commands
    for command in commands:
        arguments.parse(shlex.split(command))
    with pytest.raises(ConfigError):
        arguments.parse(["relay", "--metrics-prot=9464"])


def test_probes() -> None:
    """Each probe asks for a path that is answered, on the port that the command opens."""
    monitor = _Monitor(None, dict, None)
    probes = [*every("httpGet")]
    assert {probe["path"] for _, probe in probes} == {"/live", "/ready"}
    for name, probe in probes:
        assert monitor.answer(probe["path"]).status == 200, name
        assert probe["port"] == "metrics"
    assert {path for _, path in every("path") if isinstance(path, str)} >= {"/metrics"}
    assert monitor.answer("/health").status == 404
    for name, containers in every("containers"):
        for each in containers:
            opened = arguments.parse(each["command"][1:])
            ports = [port["containerPort"] for port in each.get("ports", ())]
            assert ports == ([opened.metrics_port] if "livenessProbe" in each else []), name
            assert not ports or opened.metrics_host == "0.0.0.0", name


def test_time_to_stop() -> None:
    """Kubernetes waits for longer than a consumer may take: its grace time, and five seconds."""
    periods = [seconds for _, seconds in every("terminationGracePeriodSeconds")]
    assert len(periods) == 2
    assert min(periods) > Consumer("memory://", queue="orders").grace_s + 5


def test_variables() -> None:
    """The environment that commands name is in the manifest, and its secret where that is given."""
    secret = yaml.safe_load((FILES / "kubernetes" / "secret.yaml").read_text())
    given = set(secret["stringData"])
    for file in MANIFESTS:
        text = file.read_text()
        own = {each["name"] for _, env in every("env") for each in env if each["name"] in text}
        from_secret = (
            given if f"secretRef: {{name: {secret['metadata']['name']}}}" in text else set()
        )
        assert set(re.findall(r"env:(\w+)", text)) <= own | from_secret, file.name
