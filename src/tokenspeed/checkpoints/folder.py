# SPDX-License-Identifier: Apache-2.0
"""Reads the small files of a Hugging Face folder: config, generation config, tokenizer, chat template.

Knows their names and forms; knows no weights and no meaning of a config field.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenspeed.checkpoints import TokenizerFile
from tokenspeed.core.errors import CheckpointError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def read_optional_json(path: Path) -> dict[str, object]:
    """The JSON object in a file, {} when there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_tokenizer(folder: Path) -> TokenizerFile | None:
    """tokenizer.json and its config; None without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    config = read_optional_json(folder / "tokenizer_config.json")
    # Older folders name the special tokens only here.
    special = read_optional_json(folder / "special_tokens_map.json")
    for name in _SPECIAL_TOKENS:
        if config.get(name) is None and special.get(name) is not None:
            config[name] = special[name]
    return TokenizerFile(path, config)


def read_chat_template(folder: Path) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json, in that order."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{jinja}: cannot be read: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _template_in(read_optional_json(folder / name).get("chat_template"))
        if template is not None:
            return template
    return None


def _template_in(value: object) -> str | None:
    """A template, or the one called default (else the first) of a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if not isinstance(value, list):
        return None
    named: dict[str, str] = {}
    for item in value:
        if isinstance(item, dict) and isinstance(item.get("template"), str):
            named[str(item.get("name"))] = item["template"]
    return named.get("default") or next(iter(named.values()), None)
