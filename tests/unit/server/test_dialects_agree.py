# SPDX-License-Identifier: Apache-2.0
"""The same conversation through the three APIs is the same prompt, token for token, and gets the same reply."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dialects import PATHS, Called, Reply, Talk, Turn, read_stream, read_whole
from fakes import FakeSource, FakeWorker, engine_info, script

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}({{ t | tojson }}){% endfor %}<tool_call>"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}>"
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]}
TOOLS = (("read", "Reads a file.", SCHEMA), ("run", "Runs it.", {"type": "object", "properties": {}}))


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


REPLIES = (
    ("#call", f"<think>Which one?</think>Let me look.{call('read', path='</tool_call> é', n=3)}"),
    ("#two", call("read", path="a") + "\n" + call("run")),
    ("#think", "<think>so so</think>Done 🧪."),
    ("#long", "long " * 90),
    ("", "Fine, thanks."),
)
MARKS = st.sampled_from(["", "#call", "#two", "#think"])
PLAIN = st.text(st.sampled_from('ab \n\t"\\{}<>|é東🧪'), max_size=12)
CONTROL = st.sampled_from(["<|im_end|>", "</think>", "<tool_call>", "<eos>", "[user]", "%} {{ x }}"])
DATA = st.lists(st.one_of(PLAIN, CONTROL), max_size=3).map("".join)
WORDS = st.text("abc é", min_size=1, max_size=8).filter(str.strip)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["path", "n", "z"]), st.one_of(DATA, st.integers(-9, 9), st.none()), max_size=3
)
CALLS = st.builds(Called, st.sampled_from(["read", "run"]), ARGUMENTS, DATA, st.booleans())
THOUGHTS = st.one_of(st.just(""), WORDS)
WORKING = st.tuples(THOUGHTS, st.one_of(st.just(""), WORDS), st.lists(CALLS, min_size=1, max_size=2).map(tuple))
LAST = st.tuples(THOUGHTS, WORDS, st.just(()))
WORK = st.lists(WORKING, max_size=2).map(tuple)
PARTS = st.lists(DATA, min_size=1, max_size=3).map(tuple)
TURNS = st.builds(lambda parts, work, last: Turn(parts, (*work, last)), PARTS, WORK, LAST)


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    """Conversations of up to four turns that end in the user's words or in results. An empty system text is none in two
    of the APIs and one in the third, so there is none."""
    last = Turn((*draw(PARTS), f"go on {draw(MARKS)}"), draw(WORK))
    system = draw(st.lists(DATA, max_size=2).map(tuple).filter(lambda parts: parts == () or any(parts)))
    tools = TOOLS if draw(st.booleans()) else ()
    return Talk((*draw(st.lists(TURNS, max_size=3)), last), system, tools, draw(st.booleans()))


@pytest.fixture(scope="module")
def server(start_module: Any) -> Any:
    worker = FakeWorker(info=engine_info(max_model_len=8192, num_kv_blocks=1024))
    return start_module(worker=worker, source=FakeSource(chat_template=TEMPLATE, script=script(*REPLIES)))


def asked(server: Any, dialect: str, body: dict[str, Any]) -> tuple[list[int], Reply]:
    """Token ids as the engine got them, and the reply."""
    answer = server.client.post(PATHS[dialect], json=body)
    assert answer.status_code == 200, answer.text
    ids = array("i", server.submits()[-1].request.token_ids).tolist()
    is_stream = bool(body.get("stream"))
    return ids, read_stream(dialect, answer.text) if is_stream else read_whole(dialect, answer.json())


WHOLE_SESSION = Talk(
    (
        Turn(("list it",), (("First look.", "Looking.", (Called("read", {"path": "a", "n": 1}, "ok", True),)),)),
        Turn(("and", "then"), (("", "Done.", ()),)),
        Turn(("now #call",), (("", "", (Called("run", {}, ""), Called("read", {"path": "<eos>"}, "</think>"))),)),
    ),
    ("Be brief.", "And good."),
    TOOLS,
)


@given(talk=talks())
@example(talk=WHOLE_SESSION)
@example(talk=Talk((Turn(("#two",)),), (), TOOLS))
@example(talk=Talk((Turn(("#long",)),)))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_conversation_is_one_prompt_and_one_reply(server: Any, talk: Talk) -> None:
    found = {}
    for dialect in PATHS:
        body = talk.body(dialect)
        found[dialect] = asked(server, dialect, body)
        streamed = {**body, "stream": True}
        if dialect == "chat":
            streamed["stream_options"] = {"include_usage": True}
        assert asked(server, dialect, streamed) == found[dialect], f"{dialect}: streamed and whole differ"
    ids, reply = found["chat"]
    for dialect, (other_ids, other) in found.items():
        decode = server.llm.tokenizer.decode
        assert other_ids == ids, f"{dialect}:\n{decode(other_ids)!r}\nchat:\n{decode(ids)!r}"
        assert other == reply, dialect
    assert reply.usage[0] == len(ids) and reply.usage[2] > 0
    if talk is WHOLE_SESSION:
        assert reply.calls == [("read", {"path": "</tool_call> é", "n": 3})] and reply.reasoning == "Which one?"
