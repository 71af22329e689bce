# SPDX-License-Identifier: Apache-2.0
"""Requests that no client means: valid bodies of every endpoint, mutated. Each is made from a seed and a number alone,
so that one that broke something can be sent again."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenspeed.server.anthropic_messages import CountBody, MessagesBody
from tokenspeed.server.openai_chat import ChatBody
from tokenspeed.server.openai_completions import CompletionBody
from tokenspeed.server.openai_responses import ResponsesBody
from tokenspeed.server.tokens import DetokenizeBody, TokenizeBody

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
CHAT = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
        {"role": "user", "content": "go on"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": PARAMETERS}}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 8,
    "stop": ["zz"],
    "logit_bias": {"5": 1.5},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
}
COMPLETION = {"prompt": ["a", "bc"], "max_tokens": 4, "logprobs": 2, "echo": True, "seed": 7, "stop_token_ids": [3]}
MESSAGES = {
    "model": "scripted",
    "max_tokens": 8,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "y"}]}],
        },
    ],
    "tools": [{"name": "look", "description": "looks", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["zz"],
}  # fmt: skip
RESPONSES = {
    "model": "scripted",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": "x"}'},
        {"type": "function_call_output", "call_id": "1", "output": "seen"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "ok"}]},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": PARAMETERS},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"type": "tool_search", "execution": "client"},
    ],
    "max_output_tokens": 8,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
COUNTED = {name: value for name, value in MESSAGES.items() if name not in ("max_tokens", "stop_sequences")}
BASES: list[tuple[str, dict[str, Any], type]] = [
    ("/v1/chat/completions", CHAT, ChatBody),
    ("/v1/chat/completions", {**CHAT, "stream": True}, ChatBody),
    ("/v1/completions", COMPLETION, CompletionBody),
    ("/v1/completions", {**COMPLETION, "prompt": [5, 6], "stream": True}, CompletionBody),
    ("/v1/messages", MESSAGES, MessagesBody),
    ("/v1/messages", {**MESSAGES, "stream": True}, MessagesBody),
    ("/v1/messages/count_tokens", COUNTED, CountBody),
    ("/v1/responses", RESPONSES, ResponsesBody),
    ("/v1/responses", {**RESPONSES, "stream": True}, ResponsesBody),
    ("/v1/responses/input_tokens", RESPONSES, ResponsesBody),
    ("/v1/responses/compact", RESPONSES, ResponsesBody),
    ("/tokenize", {"prompt": "hello", "return_token_strs": True}, TokenizeBody),
    ("/tokenize", {name: CHAT[name] for name in ("messages", "tools")}, TokenizeBody),
    ("/detokenize", {"tokens": [1, 2, 3]}, DetokenizeBody),
]

CONTROL = [
    "<|im_end|>",
    "</think>",
    "<think>",
    "<tool_call>",
    "</tool_call>",
    "<eos>",
    "{{ 7*7 }}",
    "{% raw %}",
    "\ue000",
]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 5e-324, "", " ",
    "x" * 3000, "\x00", "\x1b[31m\r\n", "\ud800", "a\udfffb", "👩\u200d🔬\u202e\ufeff\ufffd", "null", "1", [], {}, [[]],
    [None], {"": None}, {"a": {"b": [1, {}]}}, ["a", 1, None, {}], [0] * 20_000, ["ab"] * 5_000, {"type": "object"},
    {"$ref": "#"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"type": "function"}, *CONTROL,
]  # fmt: skip
NUMBERS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e400",
    b"-1e400",
    b"9" * 5000,
    b"0x10",
    b"01",
    b"1.",
    b"--1",
    b"1e",
    b"+1",
]
CONTENT_TYPES = [
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "application/octet-stream", "", "application/json;;;", "text/event-stream",
]  # fmt: skip
BYTES_MAX = 1_000_000
"""Larger bodies are cut; the limit of the server has tests of its own."""
ODD_NAMES = ["x", "resp_1", "%00", "..%2F..", "%FF%FE", "a" * 2000, "%F0%9F%A6%8A", "<script>", "%20", "a/b/c"]


@dataclass(frozen=True)
class Sent:
    """A request. what: the mutations that made it."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    what: tuple[str, ...] = ()

    def then(self, what: str, **changes: Any) -> Sent:
        """With one more mutation."""
        return replace(self, what=(*self.what, what), **changes)


def made(seed: int, number: int) -> Sent:
    """The request of that number."""
    dice = random.Random(f"{seed}:{number}")
    if dice.random() < 0.02:
        return _by_name(dice)
    path, base, kind = dice.choice(BASES)
    body = copy.deepcopy(base)
    what = []
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        mutate = dice.choice(OF_VALUES)
        body = mutate(dice, body, kind)
        what.append(mutate.__name__)
    sent = Sent("POST", path, json.dumps(body).encode("ascii")[:BYTES_MAX], what=tuple(what))
    if dice.random() < 0.4:
        sent = dice.choice(OF_BYTES)(dice, sent)
    return sent


def _by_name(dice: random.Random) -> Sent:
    name = dice.choice(ODD_NAMES)
    method, path = dice.choice((
        ("GET", f"/v1/responses/{name}"), ("DELETE", f"/v1/responses/{name}"), ("GET", f"/v1/models/{name}"),
        ("POST", f"/v1/responses/{name}/cancel"), ("GET", f"/v1/responses/{name}/input_items?order=asc"),
        ("GET", f"/v1/responses/x/input_items?limit={name}"), ("GET", "/v1/messages"), ("PUT", "/tokenize"),
        ("DELETE", "/v1/chat/completions"), ("POST", f"/v1/{name}"), ("POST", "/v1/messages/batches"),
    ))  # fmt: skip
    return Sent(method, path, b"", {}, ("odd name",))


def places(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value inside."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def swap(dice: random.Random, body: Any, kind: type) -> Any:
    """Something else in place of a value."""
    holder, key = dice.choice(places(body))
    holder[key] = copy.deepcopy(dice.choice(ODD))
    return body


def set_field(dice: random.Random, body: Any, kind: Any) -> Any:
    """Some value for a field that the body may have."""
    if isinstance(body, dict):
        body[dice.choice(kind.__struct_fields__)] = copy.deepcopy(dice.choice(ODD))
    return body


def drop(dice: random.Random, body: Any, kind: type) -> Any:
    """Without a value."""
    holder, key = dice.choice(places(body))
    del holder[key]
    return body if places(body) else {"x": 1}


def nest(dice: random.Random, body: Any, kind: type) -> Any:
    """A value deep inside."""
    holder, key = dice.choice(places(body))
    value = holder[key]
    for _ in range(dice.choice((3, 40, 90))):
        value = [value] if dice.random() < 0.5 else {"a": value}
    holder[key] = value
    return body


def move(dice: random.Random, body: Any, kind: type) -> Any:
    """A value where another was."""
    (_, _), (holder, key) = dice.choice(places(body)), dice.choice(places(body))
    other, name = dice.choice(places(body))
    holder[key] = copy.deepcopy(other[name])
    return body


def repeat(dice: random.Random, body: Any, kind: type) -> Any:
    """A list many times over."""
    lists = [holder[key] for holder, key in places(body) if isinstance(holder[key], list)]
    if lists:
        chosen, times = dice.choice(lists), dice.choice((2, 30, 400))
        if len(json.dumps(body)) + len(json.dumps(chosen)) * times <= BYTES_MAX:
            chosen += [copy.deepcopy(each) for _ in range(times - 1) for each in chosen]
    return body


def spoil_text(dice: random.Random, body: Any, kind: type) -> Any:
    """Text with what steers a model, or with what is no character."""
    texts = [(holder, key) for holder, key in places(body) if isinstance(holder[key], str)]
    if texts:
        holder, key = dice.choice(texts)
        at = dice.randint(0, len(holder[key]))
        holder[key] = holder[key][:at] + dice.choice([*CONTROL, "\x00", "\ud83d", "\udc00", "\x07"]) + holder[key][at:]
    return body


OF_VALUES: list[Callable[[random.Random, Any, type], Any]] = [swap, set_field, drop, nest, move, repeat, spoil_text]


def cut(dice: random.Random, sent: Sent) -> Sent:
    """Its beginning only."""
    return sent.then("cut", content=sent.content[: dice.randrange(len(sent.content) + 1)])


def flip(dice: random.Random, sent: Sent) -> Sent:
    """Some other bytes."""
    content = bytearray(sent.content)
    for _ in range(dice.choice((1, 2, 20))):
        content[dice.randrange(len(content))] = dice.randrange(256)
    return sent.then("flip", content=bytes(content))


def insert(dice: random.Random, sent: Sent) -> Sent:
    """Bytes that are no JSON, or no UTF-8."""
    at = dice.randrange(len(sent.content) + 1)
    extra = dice.choice(
        [b"\x00", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\n\t", b"//", b",", b"\x1b", b"\xf4\x90\x80\x80"]
    )
    return sent.then("insert", content=sent.content[:at] + extra + sent.content[at:])


def number(dice: random.Random, sent: Sent) -> Sent:
    """A number that JSON does not have, or that no type holds."""
    at = sent.content.rfind(b": ")
    return sent.then("number", content=sent.content[: at + 2] + dice.choice(NUMBERS) + b"}")


def key_twice(dice: random.Random, sent: Sent) -> Sent:
    """A key that is there twice."""
    key = dice.choice([b"messages", b"model", b"stream", b"input", b"prompt", b"tools"])
    value = json.dumps(dice.choice(ODD)).encode()
    return sent.then("key twice", content=b'{"%s": %s, ' % (key, value) + sent.content[1:])


def deep(dice: random.Random, sent: Sent) -> Sent:
    """Deeper than any parser likes."""
    depth, (opening, closing) = dice.choice((300, 1_000, 100_000)), dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    key = dice.choice([b"metadata", b"tools", b"tool_choice", b"chat_template_kwargs", b"messages", b"input", b"x"])
    inside = opening * depth + b"1" + closing * depth
    if dice.random() < 0.5:  # as an item, so that the list around it is one
        inside = b"[" + inside + b"]"
    return sent.then("deep", content=sent.content[:-1] + b', "%s": %s}' % (key, inside))


def encode(dice: random.Random, sent: Sent) -> Sent:
    """In another encoding."""
    name = dice.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"))
    return sent.then(name, content=sent.content.decode("ascii", "replace").encode(name))


def pack(dice: random.Random, sent: Sent) -> Sent:
    """Compressed, or said to be."""
    headers = {**sent.headers, "content-encoding": dice.choice(("gzip", "br", "identity"))}
    return sent.then(
        "pack", content=gzip.compress(sent.content) if dice.random() < 0.5 else sent.content, headers=headers
    )


def mistype(dice: random.Random, sent: Sent) -> Sent:
    """Under another content type."""
    return sent.then("mistype", headers={"content-type": dice.choice(CONTENT_TYPES)})


def replaced(dice: random.Random, sent: Sent) -> Sent:
    """Something else as a whole."""
    wholes = [b"", b" ", b"null", b"[]", b'""', b"1", b"{}", b"a=b&c=d", b"\x1f\x8b", b"[" * 50_000, b"{" * 3, b'{"a"']
    return sent.then("replaced", content=dice.choice(wholes))


OF_BYTES: list[Callable[[random.Random, Sent], Sent]] = [
    cut, flip, insert, number, key_twice, deep, encode, pack, mistype, replaced,
]  # fmt: skip
