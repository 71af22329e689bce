# SPDX-License-Identifier: Apache-2.0
"""Finds what a model's name means and opens it. Knows the order of looking; knows no file format."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path

from tokenspeed.checkpoints import JsonObject, ModelSource, ProgressFn, Weights, catalogue, hub
from tokenspeed.checkpoints.dummy import DummyWeights
from tokenspeed.checkpoints.folder import read_chat_template, read_json, read_optional_json, read_tokenizer
from tokenspeed.checkpoints.gguf_source import open_gguf
from tokenspeed.checkpoints.mxfp4 import Mxfp4Weights, is_mxfp4, plain_config
from tokenspeed.checkpoints.safetensors import INDEX_NAME, open_safetensors, weight_files
from tokenspeed.checkpoints.scripted import SCRIPT_NAME, open_scripted
from tokenspeed.checkpoints.source import OpenedModel
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import CheckpointError, ConfigError, ModelNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w./-]+\.gguf)?")
_EXPECTED = "config.json with *.safetensors, or one *.gguf"


def open_model(model: ModelConfig, progress: ProgressFn | None = None) -> ModelSource:
    """See checkpoints.open_model."""
    path = _find(model, progress)
    if model.load_format == "scripted":
        return open_scripted(_require_folder(path, SCRIPT_NAME), progress)
    source = _open_file(path, model) if path.is_file() else _open_folder(path, model)
    if model.load_format == "dummy":
        source.open_weights = DummyWeights
    return source


def _find(model: ModelConfig, progress: ProgressFn | None) -> Path:
    """The local file or folder, fetched if need be."""
    name = model.model
    if name in catalogue.ALIASES:
        return catalogue.fetch(name, progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if _HUB_ID.fullmatch(name):
        return hub.fetch(name, model.revision, progress, with_weights=model.load_format != "dummy")
    raise ModelNotFoundError(_not_found(name, path))


def _not_found(name: str, path: Path) -> str:
    if "/" in name or name.endswith(".gguf"):
        return f"no file or folder {path}; give a folder, a GGUF file, a hub id such as org/name, or an alias"
    close = difflib.get_close_matches(name.lower(), catalogue.ALIASES, 1, 0.4)
    hint = f"did you mean {close[0]}?" if close else "give a folder, a GGUF file or a hub id such as org/name"
    aliases = ", ".join(catalogue.ALIASES)
    return f"no model {name!r}: no file or folder of that name here, and no alias; {hint} (aliases: {aliases})"


def _require_folder(path: Path, file_name: str) -> Path:
    if not path.is_dir():
        raise ConfigError(f"--load-format scripted needs a folder with {file_name}; {path} is a file")
    return path


def _open_file(path: Path, model: ModelConfig) -> OpenedModel:
    if model.load_format == "safetensors":
        raise ConfigError(f"--load-format safetensors needs a folder; {path} is a file")
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path}: give the folder that holds this file together with config.json and the tokenizer")
    return open_gguf(path)


def _open_folder(folder: Path, model: ModelConfig) -> OpenedModel:
    has_safetensors = bool(weight_files(folder)) or (folder / INDEX_NAME).exists()
    ggufs = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").is_file()
    wants_gguf = model.load_format == "gguf" or (model.load_format != "safetensors" and not has_safetensors)
    if ggufs and wants_gguf and not (model.load_format == "dummy" and has_config):
        if len(ggufs) > 1:
            names = ", ".join(path.name for path in ggufs[:4])
            raise ConfigError(f"{folder} holds {len(ggufs)} GGUF files ({names}); give the path of one of them")
        return open_gguf(ggufs[0])
    if model.load_format == "gguf":
        raise CheckpointError(f"{folder}: has no *.gguf file")
    if (folder / SCRIPT_NAME).is_file() and not has_config:
        raise ConfigError(f"{folder}: holds a {SCRIPT_NAME}; serve it with --load-format scripted")
    if not has_config:
        raise CheckpointError(f"{folder}: has no config.json; a model folder holds {_EXPECTED}")
    if not has_safetensors and model.load_format != "dummy":
        pickled = " (pytorch_model*.bin is not read: convert it to safetensors)" if _has_pickles(folder) else ""
        raise CheckpointError(f"{folder}: has no weights{pickled}; a model folder holds {_EXPECTED}")
    config: JsonObject = read_json(folder / "config.json")
    open_weights: Callable[[], Weights] = functools.partial(open_safetensors, folder)
    if is_mxfp4(config):
        config, open_weights = plain_config(config), lambda: Mxfp4Weights(open_safetensors(folder))
    generation, tokenizer = read_optional_json(folder / "generation_config.json"), read_tokenizer(folder)
    return OpenedModel(
        path=folder,
        config=config,
        read_generation_config=lambda: generation,
        read_tokenizer=lambda: tokenizer,
        chat_template=read_chat_template(folder),
        open_weights=open_weights,
    )


def _has_pickles(folder: Path) -> bool:
    return any(folder.glob("pytorch_model*.bin"))
