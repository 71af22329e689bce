# SPDX-License-Identifier: Apache-2.0
"""The reference pages say what the program does: each row of their tables is tried."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from tokenspeed import cli
from tokenspeed.cli import flags
from tokenspeed.cli.others import REFUSED
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm import sampling

DOCS = Path(__file__).parents[3] / "docs"
ANSWERS = {
    "chat.completion": "/v1/chat/completions",
    "text_completion": "/v1/completions",
    "message": "/v1/messages",
    "response": "/v1/responses",
}


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of the tables under a heading of a page."""
    text = (DOCS / page).read_text()
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert part, f"{page} has no {heading}"
    for line in part.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def served_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    found = cli._parser()._subparsers
    assert found is not None
    for action in found._group_actions:
        parser = action.choices["serve"]  # type: ignore[index, call-overload]
    return parser


def test_every_flag_of_serve_is_on_the_page_with_its_spellings_and_default() -> None:
    text = (DOCS / "server-parameters.md").read_text()
    written = {tuple(re.findall(r"`(--[\w-]+)`", names)): default for names, default in page_flags(text)}
    known = {
        tuple(name for name in action.option_strings if not name.startswith(("--no-", "-h"))): action
        for action in served_parser()._actions
        if action.option_strings and "--help" not in action.option_strings and action.dest != "model"
    }
    assert set(written) == set(known)
    defaults = {flag.names: default_of(flag) for flag in (*flags.MODEL_FLAGS, flags.SERVED_NAME, *flags.SERVER_FLAGS)}
    for names, default in defaults.items():
        if default is not None:
            assert written[names] == f"`{default}`", names
        else:
            assert not written[names].startswith("`"), f"{names} has no default of its own"


def page_flags(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line.startswith("| `--"):
            names, default = line.split("|")[1:3]
            yield names, default.strip()


def default_of(flag: flags.Flag) -> Any:
    field = next(known for known in msgspec.structs.fields(flag.struct) if known.name == flag.field)
    return None if flag.const is not None or field.default is msgspec.NODEFAULT else field.default


def parsed(words: str) -> dict[str, Any]:
    return vars(served_parser().parse_args(shlex.split(words)))


@pytest.mark.parametrize("row", rows("compatibility.md", "Flags"), ids=lambda row: row[0])
def test_flags_of_other_servers(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    theirs, verdict = row[0].strip("`"), row[2]
    if verdict == "refused":
        flag = theirs.split()[0]
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "m", *shlex.split(theirs)])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: {flag} is no flag here: {plain(row[3])}\n"
        return
    ours = re.fullmatch(r"mapped to `(.+)`", verdict)
    assert ours or verdict == "the same", verdict
    found = parsed(theirs)
    assert found == parsed(ours[1] if ours else theirs)
    assert found != parsed("") or theirs == "--enable-prefix-caching"


def plain(remark: str) -> str:
    """What is left of Markdown on a terminal."""
    without_asides = re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", remark)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", without_asides).replace("`", "")


def test_the_page_has_each_flag_that_is_refused_with_a_hint() -> None:
    written = {row[0].strip("`").split()[0] for row in rows("compatibility.md", "Flags") if row[2] == "refused"}
    assert written == set(REFUSED)


@pytest.mark.parametrize("row", rows("compatibility.md", "Request fields"), ids=lambda row: row[0])
def test_fields_of_other_servers(shared: Any, row: list[str]) -> None:
    field, verdict = json.loads(f"{{{row[0].strip('`')}}}"), row[2]
    (name,) = field
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "a"},
    }
    for path, body in bodies.items():
        if row[3].startswith("chat") and "completions" in path and "chat" not in path:
            continue
        response = shared.client.post(path, json={**body, "max_tokens": 8, **field})
        if verdict == "refused":
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
        else:
            assert verdict in ("honoured", "ignored")
            assert response.status_code == 200, response.text
            known = document_fields(shared, path)
            assert (name in known) is (verdict == "honoured"), f"{name} is {verdict}, and the API's document differs"


def document_fields(shared: Any, path: str) -> set[str]:
    made = shared.client.get("/openapi.json").json()
    name = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    return set(made["components"]["schemas"][name]["properties"])


def test_every_sampling_parameter_is_on_its_page_with_its_default() -> None:
    written = {row[0].strip("`"): row[2] for row in rows("sampling.md", "Parameters")}
    other = {"grammar", "thinking"}  # made from fields that have a page of their own
    fields = {field.name: field.default for field in msgspec.structs.fields(SamplingParams) if field.name not in other}
    assert set(written) == set(fields)
    for name, default in fields.items():
        said = written[name].partition(",")[0].partition(";")[0]
        if isinstance(default, bool):
            assert said == str(default).lower(), name
        elif isinstance(default, int | float):
            assert float(said) == default, name
        else:
            assert said in ("none", "drawn", "what the context leaves"), name
    own = {name for name, default in written.items() if default.endswith(", own")}
    assert own == set(sampling._DEFAULT_FIELDS)


def test_every_endpoint_is_on_the_page_of_the_api(shared: Any) -> None:
    written = {row[0].strip("`") for row in rows("api.md", "Endpoints")}
    made = shared.client.get("/openapi.json").json()
    assert written == {f"{method.upper()} {path}" for path, methods in made["paths"].items() for method in methods}


def test_the_examples_of_the_api_are_json_that_the_document_describes(shared: Any) -> None:
    made = shared.client.get("/openapi.json").json()
    checked = 0
    for text in re.findall(r"```json\n(.*?)\n```", (DOCS / "api.md").read_text(), re.DOTALL):
        answer = json.loads(text)
        path = ANSWERS.get(str(answer.get("object") or answer.get("type")))
        if path is None:
            continue
        content = made["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema_rs.validate({**content, "components": made["components"]}, answer)
        checked += 1
    assert checked >= 4
