# SPDX-License-Identifier: Apache-2.0
"""What a model's name may be, and what is said when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from tokenspeed.checkpoints import ModelSource, TokenizerFile, catalogue, list_models, open_model
from tokenspeed.core.config import DEFAULT_MODEL, LoadFormat, ModelConfig
from tokenspeed.core.errors import CheckpointError, ConfigError, ModelNotFoundError, StartError

CONFIG = {"model_type": "llama", "vocab_size": 8}


def opened(model: Path | str, load_format: LoadFormat = "auto") -> ModelSource:
    return open_model(ModelConfig(model=str(model), load_format=load_format))


def refusal(model: Path | str, error: type[StartError], load_format: LoadFormat = "auto") -> str:
    with pytest.raises(error) as caught:
        opened(model, load_format)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<e>", "chat_template": "T"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "eos_token": "<x>"}')
    source = opened(folder)
    assert source.path == folder
    assert source.config == CONFIG
    assert source.generation_config == {"eos_token_id": [1, 2]}
    assert isinstance(source.tokenizer, TokenizerFile)
    assert source.tokenizer.path == folder / "tokenizer.json"
    assert source.tokenizer.config["eos_token"] == "<e>"
    assert source.tokenizer.config["bos_token"] == {"content": "<b>"}
    assert source.chat_template == "T"
    assert source.script is None
    np.testing.assert_array_equal(source.weights().read("a", (2, 3)), np.ones((2, 3)))


def test_a_bare_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    source = opened(tmp_path / "model")
    assert (source.generation_config, source.tokenizer, source.chat_template) == ({}, None, None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": '{"chat_template": "T"}'}, "J"),
        ({"chat_template.json": '{"chat_template": "C"}'}, "C"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]}
                )
            },
            "D",
        ),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "only", "template": "O"}]}'}, "O"),
        ({"tokenizer_config.json": '{"chat_template": null}'}, None),
    ],
)
def test_chat_templates(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    write_folder(tmp_path / "model")
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    assert opened(tmp_path / "model").chat_template == expected


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert opened(tmp_path / "m.gguf").config["model_type"] == "llama"
    assert opened(tmp_path).path == tmp_path / "m.gguf"
    write_gguf(tmp_path / "n.gguf")
    message = refusal(tmp_path, ConfigError)
    assert "m.gguf, n.gguf" in message
    write_folder(tmp_path)
    assert opened(tmp_path).config == CONFIG
    refusal(tmp_path, ConfigError, "gguf")


def test_dummy_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = opened(tmp_path, "dummy").weights()
    assert weights.infos() is None
    assert weights.read("anything", (3, 5)).shape == (3, 5)
    write_gguf(tmp_path / "m.gguf")
    assert opened(tmp_path / "m.gguf", "dummy").weights().infos() is None


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing", tmp_path / "nothing.gguf", "nothing.gguf", "./nothing"):
        assert f"no file or folder {Path(name)}" in refusal(name, ModelNotFoundError)


def test_close_aliases_are_suggested() -> None:
    assert "did you mean smollm2-135m?" in refusal("smollm-135m", ModelNotFoundError)
    message = refusal("zzzz", ModelNotFoundError)
    assert "did you mean" not in message
    assert all(alias in message for alias in catalogue.ALIASES)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    expected = "config.json with *.safetensors, or one *.gguf"
    assert expected in refusal(tmp_path, CheckpointError)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert f"has no weights; a model folder holds {expected}" in refusal(tmp_path, CheckpointError)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert it to safetensors" in refusal(tmp_path, CheckpointError)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refusal(tmp_path, CheckpointError, "dummy")


def test_load_formats_that_do_not_fit(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    assert "has no *.gguf file" in refusal(tmp_path / "model", CheckpointError, "gguf")
    write_gguf(tmp_path / "m.gguf")
    assert "needs a folder" in refusal(tmp_path / "m.gguf", ConfigError, "safetensors")
    assert "needs a folder with script.json" in refusal(tmp_path / "m.gguf", ConfigError, "scripted")
    assert "give the folder" in refusal(tmp_path / "model" / "model.safetensors", ConfigError)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "script.json").write_text("{}")
    assert "--load-format scripted" in refusal(tmp_path / "s", ConfigError)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "notes.txt", CheckpointError)


def test_the_default_model_is_in_the_catalogue() -> None:
    assert list_models()[0].name == DEFAULT_MODEL
