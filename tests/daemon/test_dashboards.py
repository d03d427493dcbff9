"""deploy/grafana.json and deploy/alerts.yml ask for nothing that the daemon does not export."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.clients import ask, page_of
from tests.daemon.conftest import StartDaemon
from tierstore import TierStore

ROOT = Path(__file__).parents[2]
DASHBOARD, ALERTS = ROOT / "deploy" / "grafana.json", ROOT / "deploy" / "alerts.yml"
OF_PROMETHEUS = {"up": {"instance", "job"}}
"""What Prometheus itself knows of each daemon, with the labels."""
OF_THE_SCRAPE = {"instance", "job"}
FUNCTIONS = {"predict_linear", "max_over_time", "min_over_time", "histogram_quantile", "label_values"}
WORDS = {"and", "by", "sum", "max", "rate", "increase", "changes", "le", "direction", "session", "client", "rank"}


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for rule in rules():
        yield rule["expr"], json.dumps(rule["annotations"])


def metrics_in(expression: str) -> set[str]:
    """The names in an expression that are no labels, functions or words of the language."""
    without_labels = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", "", expression)
    return set(re.findall(r"\b[a-z][a-z_]+\b", without_labels)) - FUNCTIONS - WORDS


def labels_in(expression: str, words: str) -> set[str]:
    selected = {name for inner in re.findall(r"\{([^}]*)\}", expression) for name in re.findall(r"(\w+)\s*=", inner)}
    return selected | set(re.findall(r"\{\{\s*\$labels\.(\w+)", words)) | set(re.findall(r"\{\{(\w+)\}\}", words))


@pytest.fixture
def exported(start_daemon: StartDaemon, tmp_path: Path) -> dict[str, set[str]]:
    """Every sample of a daemon that has all there is to tell, with its labels."""
    (tmp_path / "other").mkdir()
    daemon = start_daemon(
        arguments=["--path", str(tmp_path / "other")],
        metrics="127.0.0.1:0",
        max_write_bytes_per_day="1GiB",
        session_queued_bytes="64MiB",
    )
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handle = store.put(torch.zeros(2**20))
        store.flush()
        text = ask(page_of(daemon), "/metrics").text
        del handle
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_that_is_asked_for_is_exported_with_its_labels(exported: dict[str, set[str]]) -> None:
    known = exported | OF_PROMETHEUS
    num_metrics = 0
    for expression, words in expressions():
        names = metrics_in(expression)
        assert names, expression
        assert names <= known.keys(), expression
        labels = set.union(*(known[name] for name in names)) | OF_THE_SCRAPE
        assert labels_in(expression, words) <= labels, expression
        num_metrics += len(names)
    assert num_metrics > 40
