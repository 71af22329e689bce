# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a conversation as prompt text, rendered by jinja in a sandbox.

Renders what `apply_chat_template` of the transformers library renders for the same conversation. Knows no tokens; the
text carries its own BOS, so it is encoded without adding one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import jinja2

from tokenspeed.chat import Message, Tool
from tokenspeed.chat.jinja_sandbox import OUTPUT_CHARS_MAX, RENDER_S_MAX, TemplateLimitError, sandbox
from tokenspeed.chat.messages import late_system_as_text, malformed_calls_as_text, normalise_messages
from tokenspeed.core.errors import InvalidRequestError, TokenizerError

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_PROBE = "tokenspeed-probe"
_PROBE_VALUE = "probe-value"


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a template wants what can be written in several ways: text as a list of parts, the absent content of a
    message with tool calls as None, tool-call arguments as JSON text. late_system: it takes system messages that are
    not the first."""

    parts: bool = False
    none_content: bool = False
    text_arguments: bool = False
    developer: bool = False
    late_system: bool = True

    def adapt(self, message: Mapping[str, object]) -> dict[str, object]:
        """A normalised message in this shape."""
        result = dict(message)
        if result.get("role") == "developer" and not self.developer:
            result["role"] = "system"
        calls = result.get("tool_calls")
        if isinstance(calls, list) and self.text_arguments:
            result["tool_calls"] = [_with_text_arguments(call) for call in calls]
        content = result.get("content")
        if content == "" and calls and self.none_content:
            result["content"] = None
        elif self.parts and isinstance(content, str) and content:
            result["content"] = [{"type": "text", "text": content}]
        return result


class ChatTemplate:
    """A compiled template. Immutable; may be rendered from several threads at once.

    special_tokens: further names that the template may use, such as unk_token. Raises TokenizerError, a StartError,
    when the source is not valid jinja.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", special_tokens: Mapping[str, str] | None = None
    ) -> None:
        try:
            self._template = sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is not valid jinja, line {error.lineno}: {error.message}; "
                "give a working one with --chat-template FILE"
            ) from error
        self._names = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._shape = self._probe(developer="developer" in source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt text. kwargs reach the template by name (chat_template_kwargs of a request).

        Tool calls whose arguments are not an object are shown as text, in the content if the template takes nothing
        else. Raises InvalidRequestError when the template refuses the conversation.
        """
        chat = normalise_messages(messages)
        if not self._shape.late_system:
            chat = late_system_as_text(chat)
        variables = self._variables(tools, add_generation_prompt, kwargs)
        try:
            return self._run(chat, self._shape, variables)
        except _RENDER_ERRORS as error:
            mended = malformed_calls_as_text(chat)
            if mended is None:
                raise _refusal(error) from error
        try:
            return self._run(mended, self._shape, variables)
        except _RENDER_ERRORS as error:
            raise _refusal(error) from error

    def _variables(
        self, tools: Sequence[Tool] | None, add_generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> dict[str, object]:
        return {
            **self._names,
            "documents": None,
            **kwargs,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _run(self, chat: Iterable[Mapping[str, object]], shape: _Shape, variables: Mapping[str, object]) -> str:
        """Render piece by piece, so that a runaway template ends at the limits."""
        deadline = time.monotonic() + RENDER_S_MAX
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate({**variables, "messages": [shape.adapt(message) for message in chat]}):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > OUTPUT_CHARS_MAX or time.monotonic() > deadline:
                raise TemplateLimitError(
                    f"it produced more than {OUTPUT_CHARS_MAX} characters or took longer than {RENDER_S_MAX:g} s"
                )
        return "".join(pieces)

    def _probe(self, developer: bool) -> _Shape:
        """The first shape in which a text, and then a tool call, is shown; templates do not say it otherwise."""
        parts = not self._shows(_TEXT_CHAT, _Shape()) and self._shows(_TEXT_CHAT, _Shape(parts=True))
        late_system = self._shows(_LATE_SYSTEM_CHAT, _Shape(parts))
        for none_content, text_arguments in product((False, True), repeat=2):
            shape = _Shape(parts, none_content, text_arguments, developer, late_system)
            if self._shows(_CALL_CHAT, shape):
                return shape
        return _Shape(parts, developer=developer, late_system=late_system)

    def _shows(self, chat: Sequence[Message], shape: _Shape) -> bool:
        try:
            text = self._run(normalise_messages(chat), shape, self._variables([_PROBE_TOOL], True, {}))
        except _RENDER_ERRORS:
            return False
        return _PROBE in text and (chat is not _CALL_CHAT or _PROBE_VALUE in text)


_TEXT_CHAT: Sequence[Message] = ({"role": "user", "content": _PROBE},)
_LATE_SYSTEM_CHAT: Sequence[Message] = (
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "gone"},
    {"role": "system", "content": _PROBE},
    {"role": "user", "content": "go on"},
)
_CALL_CHAT: Sequence[Message] = (
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "probe0001",
                "type": "function",
                "function": {"name": _PROBE, "arguments": {"key": _PROBE_VALUE}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "done"},
)
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key"}}},
    },
}


def _with_text_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _refusal(error: BaseException) -> InvalidRequestError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InvalidRequestError(f"the chat template of this model refuses the conversation: {reason}", "messages")
