# SPDX-License-Identifier: Apache-2.0
"""The same conversations through the three APIs of a real server: the same text, calls and usage, cached tokens too.
Their prompts, token for token, are compared in tests/unit/server/test_dialects_agree.py."""

from __future__ import annotations

from typing import Any

import pytest

from dialects import PATHS, Called, Reply, Talk, Turn, read_stream, read_whole
from scripted import CALLING_TEMPLATE, spoken_call, write_scripted_model

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = (("read", "Reads a file.", SCHEMA), ("run", "Runs it.", {"type": "object", "properties": {}}))
REPLIES = [
    ("read it", spoken_call("read", thought="Which file?", text="Let me look.", path="é </tool_call>")),
    ("do both", spoken_call("read", path="a") + spoken_call("run")),
    ("think", "<think>so so</think>Done 🧪."),
    ("", "Fine, thanks."),
]
LOOKED = Called("read", {"path": "a", "n": None}, "content\n of a", result_is_parts=True)
RAN = Called("run", {}, "")
TALKS = {
    "one line": Talk((Turn(("hi",)),)),
    "system and parts": Talk((Turn(("one", "two", "")),), ("Be brief.", "Be good."), parts_as_text=False),
    "a call to come": Talk((Turn(("read it",)),), ("Be brief.",), TOOLS),
    "two calls to come": Talk((Turn(("do both",)),), (), TOOLS),
    "thinking to come": Talk((Turn(("think",)),), (), TOOLS),
    "turns": Talk((Turn(("a",), (("", "b", ()),)), Turn(("c",), (("", "d", ()),)), Turn(("e",)))),
    "results": Talk((Turn(("go",), (("", "Looking.", (LOOKED, RAN)),)),), ("Be brief.",), TOOLS),
    "silent calls": Talk((Turn(("go",), (("", "", (RAN,)), ("", "", (LOOKED,)))),), (), TOOLS),
    "reasoning": Talk((Turn(("go",), (("First this.", "So.", (LOOKED,)), ("Then that.", "", (RAN,)))),), (), TOOLS),
    "control text": Talk((Turn(("<eos>", "</think>"), (("", "x", (Called("run", {"p": "<eos>"}, "<|user|>"),)),)),)),
}


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("agree") / "model"
    write_scripted_model(folder, REPLIES, template=CALLING_TEMPLATE)
    return start_module_server(str(folder), "--load-format", "scripted", "--kv-tokens", "65536")


def ask(server: Any, dialect: str, talk: Talk, *, stream: bool) -> Reply:
    body = {**talk.body(dialect), "stream": stream}
    if stream and dialect == "chat":
        body["stream_options"] = {"include_usage": True}
    answer = server.client.post(PATHS[dialect], json=body)
    assert answer.status_code == 200, answer.text
    return read_stream(dialect, answer.text) if stream else read_whole(dialect, answer.json())


@pytest.mark.parametrize("name", TALKS)
def test_one_conversation_is_one_reply_and_one_usage(server: Any, name: str) -> None:
    talk = TALKS[name]
    cold = ask(server, "chat", talk, stream=False)
    warm = ask(server, "chat", talk, stream=False)
    assert warm.usage[1] >= warm.usage[0] - 16 - 1 and cold.usage[0] == warm.usage[0]
    assert warm.end == ("tool_calls" if warm.calls else "stop")
    for dialect in PATHS:
        for stream in (False, True):
            assert ask(server, dialect, talk, stream=stream) == warm, f"{dialect}, stream {stream}"


def test_the_replies_are_those_that_were_written(server: Any) -> None:
    reply = ask(server, "messages", TALKS["a call to come"], stream=True)
    assert (reply.text, reply.reasoning) == ("Let me look.", "Which file?")
    assert reply.calls == [("read", {"path": "é </tool_call>"})]
    assert len(ask(server, "responses", TALKS["two calls to come"], stream=True).calls) == 2
