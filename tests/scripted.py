# SPDX-License-Identifier: Apache-2.0
"""A folder that `--load-format scripted` opens, its byte-level tokenizer written on the spot: no download, no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"

CALLING_TEMPLATE = (
    "{% if tools %}<|system|>Tools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>"
    "{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Renders a replayed reply as it was generated, so that a session's prefix stays what it was."""


def spoken_call(name: str, *, thought: str = "", text: str = "", **arguments: object) -> str:
    """A reply that calls a tool, in the words of CALLING_TEMPLATE."""
    thinking = f"<think>{thought}</think>" if thought else ""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{thinking}{text}<tool_call>{call}</tool_call>"


def write_scripted_model(
    folder: Path,
    replies: Sequence[tuple[str, str]],
    *,
    context_length: int = 8192,
    step_s: float = 0.0,
    template: str = TEMPLATE,
) -> Path:
    """Writes the folder and returns it. replies: (match, text) pairs; the first whose match is in the prompt counts."""
    tokens = folder / "tokenizer"
    tokens.mkdir(parents=True)
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    tokenizer.save(str(tokens / "tokenizer.json"))
    names = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": template}
    (tokens / "tokenizer_config.json").write_text(json.dumps(names))
    script = {
        "tokenizer": "tokenizer",
        "context_length": context_length,
        "step_s": step_s,
        "replies": [{"match": match, "text": text} for match, text in replies],
    }
    (folder / "script.json").write_text(json.dumps(script))
    return folder
