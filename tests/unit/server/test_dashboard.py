# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard asks only for what a server that has served requests exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]
BOARD = json.loads((ROOT / "docs" / "grafana" / "tokenspeed.json").read_text())
PAGE = (ROOT / "docs" / "observability.md").read_text()
METRIC = re.compile(r"\b(?:tokenspeed|vllm):[a-z0-9_]+")
WORDS = {"sum", "max", "by", "le", "rate", "histogram_quantile", "label_values", "model_name", "finished_reason"}


@pytest.fixture(scope="module")
def exported(start_module: Any) -> dict[str, set[str]]:
    """Labels by the name of each sample, after one request."""
    server = start_module()
    assert server.chat(n=2).status_code == 200
    assert server.chat(session_id="s", stream=True).status_code == 200
    text = server.client.get("/metrics").text
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


def expressions() -> Iterator[tuple[str, str]]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_every_expression_uses_exported_names_and_labels(exported: dict[str, set[str]]) -> None:
    asked = list(expressions())
    assert len(asked) > 20
    for title, expression in asked:
        names = METRIC.findall(expression)
        assert names, f"{title}: {expression} asks for no metric"
        for name in names:
            assert name in exported, f"{title}: {name} is not exported"
        for name, labels in re.findall(r"([a-z_0-9:]+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", labels)) <= exported[name], f"{title}: {expression}"
        rest = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", METRIC.sub("", expression))
        assert set(re.findall(r"[a-z_]+", rest)) <= WORDS, f"{title}: {expression}"
        assert expression.count("(") == expression.count(")")


def test_the_labels_that_are_grouped_by_are_there(exported: dict[str, set[str]]) -> None:
    for title, expression in expressions():
        for group, name in re.findall(r"by \((\w+)\) \(rate\(([a-z_0-9:]+)", expression):
            assert group in exported[name], f"{title}: {name} has no label {group}"


def test_panels_have_places_of_their_own() -> None:
    taken: dict[tuple[int, int], str] = {}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_the_page_names_only_what_is_exported(exported: dict[str, set[str]]) -> None:
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported} | set(exported)
    table = PAGE.split("## Metrics")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([a-z0-9_]+)`", table, re.MULTILINE)
    assert len(named) > 25
    assert not [name for name in named if f"tokenspeed:{name}" not in families]
    missing = {name.removeprefix("tokenspeed:") for name in families if name.startswith("tokenspeed:")}
    missing -= {name for name in missing if re.search(r"_(bucket|count|sum)$", name)}
    assert missing <= set(named), f"the page does not name {missing - set(named)}"
