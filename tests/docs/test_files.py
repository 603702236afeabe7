"""The files of the pages on Kubernetes and on monitoring: commands can be typed, what they ask for
is there.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click
import pytest
import yaml
from tests.docs.commands import typed
from tests.docs.pages import DOCS, codes, rows

from oncely.cli.monitoring import _Monitor
from oncely.consumer import Consumer
from oncely.metrics import _NAMES

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
    for file in [*MANIFESTS, *MONITORING.iterdir()]:
        page = (DOCS / "how-to" / f"{file.parent.name}.md").read_text()
        assert f"](files/{file.parent.name}/{file.name})" in page


def test_commands() -> None:
    """Every command of a container can be typed, and takes its secrets from the environment."""
    seen = set()
    for name, words in every("command"):
        assert words[0] == "oncely", name
        parsed = typed([str(word) for word in words[1:]])
        seen.add(parsed.info_name)
        for option in ("ledger", "transport"):
            assert str(parsed.params.get(option) or "env:").startswith("env:"), name
    assert seen == {f"oncely {each}" for each in ("migrate", "consume", "relay", "purge", "check")}


def test_commands_on_the_page() -> None:
    """What is run by kubectl exec can be typed, too."""
    page = (DOCS / "how-to" / "kubernetes.md").read_text()
    commands = re.findall(r"-- oncely (.*)", page)
    assert commands
    for command in commands:
        typed(shlex.split(command))
    with pytest.raises(click.NoSuchOption):
        typed(["relay", "--metrics-prot=9464"])


def test_probes() -> None:
    """Each probe asks for a path that is answered, on the port that the command opens."""
    monitor = _Monitor(None, dict, None)
    probes = [*every("httpGet")]
    assert {probe["path"] for _, probe in probes} == {"/live", "/ready"}
    for name, probe in probes:
        assert monitor.answer(probe["path"])[0] == 200, name
        assert probe["port"] == "metrics"
    assert {path for _, path in every("path") if isinstance(path, str)} >= {"/metrics"}
    assert monitor.answer("/health")[0] == 404
    for name, containers in every("containers"):
        for each in containers:
            opened = typed(each["command"][1:]).params
            ports = [port["containerPort"] for port in each.get("ports", ())]
            assert ports == ([opened["metrics_port"]] if "livenessProbe" in each else []), name
            assert not ports or opened["metrics_host"] == "0.0.0.0", name


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


# ---- Monitoring --------------------------------------------------------------------------------

FOREIGN = {
    "up": {"job"},
    "kube_deployment_status_replicas_available": {"deployment"},
}
"""What others show, with the labels that are used."""
FUNCTION = r"[a-z_]+(?=\s*\()"


def known() -> dict[str, set[str]]:
    """Every metric by the names that Prometheus stores, with its labels."""
    found = dict(FOREIGN)
    for name, kind, labels, *_ in rows("metrics.md"):
        [metric], own = codes(name), set(codes(labels))
        found[metric] = own
        if kind == "histogram":
            del found[metric]
            found |= {f"{metric}_{part}": own for part in ("sum", "count")}
            found[f"{metric}_bucket"] = {*own, "le"}
    return found


def used(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that an expression names."""
    labels: set[str] = set()
    text = re.sub(r'"[^"]*"', "", expression)
    for named in re.findall(r"(?:\{|\bby\s*\()([^})]*)[})]", text):
        labels |= set(re.findall(r"\w+", named))
    text = re.sub(r"\{[^}]*\}|\bby\s*\([^)]*\)|\[[^\]]*\]|\boffset \w+", "", text)
    text = re.sub(FUNCTION, "", text)
    return set(re.findall(r"\b[a-z_]\w*", text)), labels


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression of the rules and the dashboard, with all text that fills in labels."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    for rule in [each for group in rules["groups"] for each in group["rules"]]:
        yield rule["expr"], " ".join(rule["annotations"].values())
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.findall(r"\w+", variable["query"])[1:]
            yield f"max by ({label}) ({metric})", ""


def mistakes(expression: str, filled: str) -> set[str]:
    """What of an expression does not exist; each side of `and` and `or` has labels of its own."""
    exist = known()
    wrong: set[str] = set()
    grouped: set[str] = set()
    for part in re.split(r"\b(?:and|or)\b", expression):
        metrics, labels = used(part)
        assert metrics, part
        wrong |= metrics - set(exist)
        for metric in metrics & set(exist):
            wrong |= {f"{metric}: {label}" for label in labels - exist[metric]}
        grouped |= labels
    shown = re.findall(r"\$labels\.(\w+)|\{\{(\w+)\}\}", filled)
    return wrong | ({name for pair in shown for name in pair if name} - grouped)


def test_metrics_and_labels_exist() -> None:
    """Rules and dashboard name metrics and labels that there are; what is shown is grouped by."""
    for expression, filled in expressions():
        assert mistakes(expression, filled) == set(), expression


def test_outcomes_exist() -> None:
    """What a label is compared with is one of its values."""
    text = " ".join(expression for expression, _ in expressions())
    outcomes = set(re.findall(r'outcome="(\w+)"', text))
    assert outcomes
    assert outcomes <= set(_NAMES.values())


def test_alerts_on_the_page() -> None:
    """Every alert has its row, with what to do."""
    page = (DOCS / "how-to" / "monitoring.md").read_text()
    table = re.findall(r"^\| (`Oncely.*?) \|", page, flags=re.MULTILINE)
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert [code for cell in table for code in codes(cell)] == alerts


def test_scraping() -> None:
    """The job that rules and dashboard ask for is the one that is scraped, here and by pods."""
    [scraped] = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    text = " ".join(expression for expression, _ in expressions())
    assert set(re.findall(r'job="(\w+)"', text)) == {scraped["job_name"]}
    [(_, label)] = every("jobLabel")
    named = {labels[label] for _, labels in every("labels") if label in labels}
    assert named == {scraped["job_name"]}
    [(_, selector)] = [pair for pair in every("selector") if pair[0] == "podmonitor.yaml"]
    assert selector["matchLabels"] == {label: scraped["job_name"]}
