# SPDX-License-Identifier: Apache-2.0
"""The archive's files make, in another program, the same ids and the same text as the server's own tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine

from fakes import FakeSource, byte_tokenizer, byte_vocabulary
from scripted import CALLING_TEMPLATE, write_scripted_model
from tokenspeed.checkpoints import GgufVocabulary, open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.llm.tokenizer import Tokenizer
from tokenspeed.server.grpc.tokenizer_files import Archive, pack

TEXTS = ("a plain text", "plain, a space after ", "two  spaces\n\tand tabs", "ünïcödé 漢字 🙂", "<bos>marked<eos>", "")


def files(archive: Archive) -> dict[str, bytes]:
    assert hashlib.sha256(archive.data).hexdigest() == archive.sha256
    with zipfile.ZipFile(io.BytesIO(archive.data)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def spm_vocabulary(*, lead: bool = True) -> GgufVocabulary:
    """Bytes, a few pieces of text, and marks."""
    pieces = ["▁", "a", "▁a", "l", "p", "n", "i", "t", "e", "x", "la", "in"]
    tokens = ("<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces)
    kinds = (2, 3, 3, *[6] * 256, *[1] * len(pieces))
    return dataclasses.replace(
        byte_vocabulary(),
        model="llama",
        tokens=tokens,
        token_types=kinds,
        scores=tuple(float(rank) for rank in range(len(tokens))),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        add_space_prefix=lead,
    )


@pytest.mark.parametrize(
    "vocabulary", [byte_vocabulary(), spm_vocabulary(), spm_vocabulary(lead=False)], ids=["bytes", "spm", "spm-no-lead"]
)
def test_an_embedded_vocabulary_becomes_a_tokenizer_of_the_same_mind(vocabulary: GgufVocabulary) -> None:
    source = FakeSource(tokenizer=vocabulary)
    own = Tokenizer.from_source(vocabulary)
    packed = files(pack(source, own, "{{ messages }}"))
    other = Engine.from_str(packed["tokenizer.json"].decode())
    for text in TEXTS:
        for special in (False, True):
            if not (special and text.startswith("<bos>")):  # of which our own never makes two
                ids = own.encode(text, add_special_tokens=special)
                assert other.encode(text, add_special_tokens=special).ids == ids, text
        ids = own.encode(text, add_special_tokens=False)
        assert other.decode(ids) == own.decode(ids), text
    settings = json.loads(packed["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<bos>", "<eos>")
    assert settings["chat_template"] == "{{ messages }}"


def test_a_tokenizer_file_is_passed_on_with_the_template_that_holds(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path / "model", [("", "x")], template=CALLING_TEMPLATE)
    source = open_model(ModelConfig(model=str(model), load_format="scripted"))
    assert source.tokenizer is not None
    own = Tokenizer.from_source(source.tokenizer)
    packed = files(pack(source, own, "other"))
    assert packed["tokenizer.json"] == (model / "tokenizer" / "tokenizer.json").read_bytes()
    settings = json.loads(packed["tokenizer_config.json"])
    assert (settings["chat_template"], settings["eos_token"]) == ("other", "<eos>")
    assert json.loads(packed["config.json"])["model_type"] == "scripted"
    assert json.loads(files(pack(source, own, None))["tokenizer_config.json"])["chat_template"] == CALLING_TEMPLATE


def test_the_same_model_makes_the_same_archive() -> None:
    assert pack(FakeSource(), byte_tokenizer(), "t") == pack(FakeSource(), byte_tokenizer(), "t")
