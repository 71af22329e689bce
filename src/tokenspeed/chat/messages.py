# SPDX-License-Identifier: Apache-2.0
"""One shape for messages that mean the same, before any template sees them.

Knows the message format of the OpenAI chat API; knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenspeed.chat import Message
from tokenspeed.core.errors import InvalidRequestError

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def normalise_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """The same conversation with text content as one string and tool-call arguments as objects.

    Absent, null and empty content are all "". Parts of text are joined with newlines. Arguments that are not the JSON
    of an object stay the text they are. Absent and null fields are one thing, and so are a missing and an empty
    tool_calls.
    Raises InvalidRequestError for content that is not text, naming the message.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def malformed_calls_as_text(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]] | None:
    """The conversation with the tool calls whose arguments are not an object moved into the content as text.

    None when there are no such calls. For templates that can only write objects: the session can go on.
    """
    moved = False
    result: list[dict[str, object]] = []
    for message in messages:
        calls = message.get("tool_calls")
        bad = [call for call in calls if _has_text_arguments(call)] if isinstance(calls, list) else []
        if not bad or not isinstance(calls, list):
            result.append(dict(message))
            continue
        moved = True
        texts = [message.get("content"), *(_call_text(call) for call in bad)]
        changed = {**message, "content": "\n".join(text for text in texts if isinstance(text, str) and text)}
        changed["tool_calls"] = [call for call in calls if call not in bad]
        if not changed["tool_calls"]:
            del changed["tool_calls"]
        result.append(changed)
    return result if moved else None


def late_system_as_text(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The conversation with every system message but one at its head moved, between marks, to the front of the next
    user message; behind the last one it becomes a user message. For templates that take one at the head only."""
    result: list[dict[str, object]] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if index > 0 and message.get("role") in ("system", "developer"):
            waiting.append(f"<system>\n{message['content']}\n</system>")
        elif waiting and message.get("role") == "user":
            result.append({**message, "content": "\n".join((*waiting, str(message["content"])))})
            waiting = []
        else:
            result.append(dict(message))
    return [*result, {"role": "user", "content": "\n".join(waiting)}] if waiting else result


def _normalise(message: Message, where: str) -> dict[str, object]:
    result = {key: value for key, value in message.items() if value is not None}
    if not isinstance(result.get("role"), str):
        raise InvalidRequestError(f"{where}.role is missing; use system, user, assistant or tool", f"{where}.role")
    result["content"] = _text(result.get("content"), f"{where}.content")
    calls = result.pop("tool_calls", None)
    if isinstance(calls, list | tuple) and calls:
        result["tool_calls"] = [_normalise_call(call) for call in calls]
    reasoning = next((result[name] for name in _REASONING_FIELDS if result.get(name) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise InvalidRequestError(f"{where} is neither a string nor a list of parts", where)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if isinstance(part, Mapping) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f"{where} has type {kind!r}, but this model reads text only; send text parts", where)


def _normalise_call(call: object) -> object:
    """A tool call with its arguments as an object where they are one."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping):
        return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else dict(call)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _function(call: object) -> Mapping[str, object] | None:
    if not isinstance(call, Mapping):
        return None
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else None


def _has_text_arguments(call: object) -> bool:
    function = _function(call)
    return function is None or not isinstance(function.get("arguments", {}), Mapping)


def _call_text(call: object) -> str:
    function = _function(call)
    if function is None:
        return str(call)
    return f"{function.get('name', '')} {function.get('arguments', '')}"
