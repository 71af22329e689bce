# SPDX-License-Identifier: Apache-2.0
"""A folder that `--load-format scripted` opens, its byte-level tokenizer written on the spot: no download, no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def write_scripted_model(
    folder: Path, replies: Sequence[tuple[str, str]], *, context_length: int = 8192, step_s: float = 0.0
) -> Path:
    """Writes the folder and returns it. replies: (match, text) pairs."""
    tokens = folder / "tokenizer"
    tokens.mkdir(parents=True)
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    tokenizer.save(str(tokens / "tokenizer.json"))
    names = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": TEMPLATE}
    (tokens / "tokenizer_config.json").write_text(json.dumps(names))
    script = {
        "tokenizer": "tokenizer",
        "context_length": context_length,
        "step_s": step_s,
        "replies": [{"match": match, "text": text} for match, text in replies],
    }
    (folder / "script.json").write_text(json.dumps(script))
    return folder
