# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a conversation as prompt text, rendered by jinja in a sandbox.

Renders what `apply_chat_template` of the transformers library renders for the same conversation. Knows no tokens; the
text carries its own BOS, so it is encoded without adding one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

import jinja2

from tokenspeed.chat import Message, Tool
from tokenspeed.chat.jinja_sandbox import OUTPUT_CHARS_MAX, RENDER_S_MAX, TemplateLimitError, sandbox
from tokenspeed.chat.messages import malformed_calls_as_text, normalise_messages
from tokenspeed.core.errors import InvalidRequestError, TokenizerError

_TESTS_CONTENT_FOR_NONE = re.compile(r"content(?:['\"]\s*\])?\s+is\s+(?:not\s+)?none", re.IGNORECASE)
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
        self._wants_none = _TESTS_CONTENT_FOR_NONE.search(source) is not None
        self._knows_developer = "developer" in source
        self._wants_parts = self._probe_parts()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt text. kwargs reach the template by name (chat_template_kwargs of a request).

        Raises InvalidRequestError when the template refuses the conversation.
        """
        chat = normalise_messages(messages)
        variables = {
            **self._names,
            **kwargs,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run(chat, variables)
        except _RENDER_ERRORS as error:
            mended = malformed_calls_as_text(chat)
            if mended is None:
                raise _refusal(error) from error
        try:
            return self._run(mended, variables)
        except _RENDER_ERRORS as error:
            raise _refusal(error) from error

    def _run(self, chat: Iterable[dict[str, object]], variables: Mapping[str, object]) -> str:
        """Render piece by piece, so that a runaway template ends at the limits."""
        deadline = time.monotonic() + RENDER_S_MAX
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate({**variables, "messages": [self._adapt(message) for message in chat]}):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > OUTPUT_CHARS_MAX or time.monotonic() > deadline:
                raise TemplateLimitError(
                    f"it produced more than {OUTPUT_CHARS_MAX} characters or took longer than {RENDER_S_MAX:g} s"
                )
        return "".join(pieces)

    def _adapt(self, message: dict[str, object]) -> dict[str, object]:
        """The one message in the shape that this template reads."""
        if message.get("role") == "developer" and not self._knows_developer:
            message = {**message, "role": "system"}
        content = message.get("content")
        if content == "" and self._wants_none and message.get("tool_calls"):
            return {**message, "content": None}
        if self._wants_parts and isinstance(content, str) and content:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _probe_parts(self) -> bool:
        """Whether the template shows text only when it comes as a list of parts."""
        self._wants_parts = False
        if self._shows_probe():
            return False
        self._wants_parts = True
        return self._shows_probe()

    def _shows_probe(self) -> bool:
        variables = {**self._names, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _PROBE in self._run([{"role": "user", "content": _PROBE}], variables)
        except _RENDER_ERRORS:
            return False


def _refusal(error: BaseException) -> InvalidRequestError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InvalidRequestError(f"the chat template of this model refuses the conversation: {reason}", "messages")
