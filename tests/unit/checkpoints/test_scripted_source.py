# SPDX-License-Identifier: Apache-2.0
"""A scripted model: what script.json may say, and what is borrowed from the tokenizer's model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from tokenspeed.checkpoints import GgufVocabulary, ModelSource, Script, ScriptedReply, TokenizerFile, open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import CheckpointError, ModelNotFoundError, StartError


def opened(folder: Path) -> ModelSource:
    return open_model(ModelConfig(model=str(folder), load_format="scripted"))


def write_script(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "script.json").write_text(json.dumps(fields))
    return folder


def write_vocabulary(path: Path) -> None:
    """Of an architecture and a tensor type that no model here has: only the vocabulary counts."""
    writer = GGUFWriter(path, "mamba")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<|im_end|>"])
    writer.add_token_types([1, 1, 3])
    writer.add_eos_token_id(2)
    writer.add_chat_template("T")
    writer.add_tensor("token_embd.weight", np.zeros((5, 176), np.uint8), raw_dtype=GGMLQuantizationType.Q5_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_replies_and_a_gguf_tokenizer_beside_the_script(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "words.gguf")
    folder = write_script(
        tmp_path / "s",
        tokenizer="../words.gguf",
        context_length=512,
        replies=[{"match": "hi", "text": "hello"}, {"text": "what?"}],
        step_s=0.25,
    )
    source = opened(folder)
    assert source.config == {"model_type": "scripted", "vocab_size": 5, "max_position_embeddings": 512}
    assert source.script == Script((ScriptedReply("hi", "hello"), ScriptedReply("", "what?")), 0.25)
    assert isinstance(source.tokenizer, GgufVocabulary)
    assert source.tokenizer.tokens == ("a", "b", "<|im_end|>")
    assert source.chat_template == "T"
    assert source.generation_config == {"eos_token_id": 2}


def test_a_folder_tokenizer(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 6, "content": "<e>"}]}
    (tokens / "tokenizer.json").write_text(json.dumps(vocabulary))
    (tokens / "tokenizer_config.json").write_text('{"chat_template": "F"}')
    source = opened(write_script(tmp_path / "s", tokenizer=str(tokens)))
    assert isinstance(source.tokenizer, TokenizerFile)
    assert source.config["vocab_size"] == 7
    assert source.config["max_position_embeddings"] == 8192
    assert source.chat_template == "F"
    (tokens / "config.json").write_text('{"vocab_size": 64}')
    own = write_script(tmp_path / "s", tokenizer=str(tokens), chat_template="mine")
    assert opened(own).config["vocab_size"] == 64
    assert opened(own).chat_template == "mine"


def test_no_tokenizer(tmp_path: Path) -> None:
    source = opened(write_script(tmp_path / "s", tokenizer=None, vocab_size=300))
    assert source.tokenizer is None
    assert source.config["vocab_size"] == 300
    assert source.script == Script(())


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"replys": []}, CheckpointError, "unknown field replys"),
        ({"replies": {}}, CheckpointError, "replies must be a list"),
        ({"replies": [{"match": "x"}]}, CheckpointError, "reply 0 must have a text"),
        ({"replies": [{"text": "x", "match": 3}]}, CheckpointError, "reply 0"),
        ({"context_length": 0}, CheckpointError, "context_length must be a positive integer"),
        ({"context_length": "8k"}, CheckpointError, "context_length"),
        ({"step_s": -1}, CheckpointError, "step_s"),
        ({"chat_template": 5}, CheckpointError, "chat_template must be a text"),
        ({"tokenizer": 5}, CheckpointError, "tokenizer must be an alias"),
        ({"tokenizer": "nowhere.gguf"}, ModelNotFoundError, "no tokenizer"),
        ({"tokenizer": "."}, CheckpointError, "has no tokenizer.json"),
    ],
)
def test_faults_are_named(tmp_path: Path, fields: dict[str, object], error: type[StartError], words: str) -> None:
    with pytest.raises(error) as caught:
        opened(write_script(tmp_path / "s", **fields))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_script(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no script\.json"):
        opened(tmp_path)


@pytest.mark.models
def test_an_alias_as_tokenizer(tmp_path: Path, smollm2_path: Path) -> None:
    assert smollm2_path.is_file()
    source = opened(write_script(tmp_path / "s", tokenizer="smollm2-135m"))
    assert source.config["vocab_size"] == 49152
    assert source.chat_template is not None
    assert source.generation_config["eos_token_id"] == [2, 0]
