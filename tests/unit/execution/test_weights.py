# SPDX-License-Identifier: Apache-2.0
"""Strict loading, end to end from tiny checkpoints on disk: what is missing, surplus or misshapen is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.core.errors import CapacityError, CheckpointError, UnsupportedModelError
from tokenspeed.execution import weights

PROMPT = list(range(3, 25))


def logits_of(tools: Any, path: Path, **options: Any) -> torch.Tensor:
    """Raw log-probabilities of the whole vocabulary after PROMPT."""
    runner = tools.new_runner(tools.engine_config(path, **options))
    try:
        logits: list[torch.Tensor] = []
        forward = runner._forward.logits
        runner._forward.logits = lambda step: (logits.append(forward(step)), logits[-1])[1]
        pages = [(0, index, index + 1) for index in range(3)]
        plan = tools.make_plan(0, [(0, 1, 0, len(PROMPT))], PROMPT, seated=[0], pages=pages)
        assert not runner.launch(plan, [tools.make_seating(0, PROMPT)]).wait().result.fault
        return logits[0].clone()
    finally:
        runner.close()


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


def test_tied_embeddings_load_with_and_without_a_head(tmp_path: Path, tools: Any) -> None:
    """LD-1."""
    config = {**tools.CONFIG, "tie_word_embeddings": True}
    tensors = tools.tiny_tensors(config)
    with_head = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    without = logits_of(tools, tools.write_checkpoint(tmp_path / "without", config, [tensors]))
    present = logits_of(tools, tools.write_checkpoint(tmp_path / "with", config, [with_head]))
    torch.testing.assert_close(without, present, rtol=0, atol=1e-6)


def test_one_file_and_indexed_shards_are_the_same_model(tmp_path: Path, tools: Any) -> None:
    """LD-2 a, b."""
    tensors = tools.tiny_tensors(tools.CONFIG)
    single = logits_of(tools, tools.write_checkpoint(tmp_path / "single", tools.CONFIG, [tensors]))
    shards = tools.write_checkpoint(tmp_path / "shards", tools.CONFIG, halves(tensors), index=True)
    assert torch.equal(logits_of(tools, shards), single)


def test_an_absent_shard_is_named(tmp_path: Path, tools: Any) -> None:
    """LD-2 c."""
    folder = tools.write_checkpoint(tmp_path / "c", tools.CONFIG, halves(tools.tiny_tensors(tools.CONFIG)), index=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        tools.new_runner(tools.engine_config(folder))


def test_a_stray_shard_is_ignored_with_a_warning(tmp_path: Path, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    """LD-2 d."""
    tensors = tools.tiny_tensors(tools.CONFIG)
    folder = tools.write_checkpoint(tmp_path / "d", tools.CONFIG, halves(tensors), index=True)
    expected = logits_of(tools, folder)
    stray = tools.write_checkpoint(tmp_path / "other", tools.CONFIG, [tools.tiny_tensors(tools.CONFIG, seed=9)])
    (folder / "stray.safetensors").write_bytes((stray / "model.safetensors").read_bytes())
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of(tools, folder), expected)
    assert "stray.safetensors" in caplog.text


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path, tools: Any) -> None:
    tensors = tools.tiny_tensors(tools.CONFIG)
    for number in range(5):
        tensors[f"model.extra.{number}"] = torch.zeros(2)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 32)
    with pytest.raises(CheckpointError) as raised:
        tools.new_runner(tools.engine_config(tools.write_checkpoint(tmp_path / "bad", tools.CONFIG, [tensors])))
    message = str(raised.value)
    assert "\n" not in message
    assert "2 missing: " in message
    assert "model.norm.weight" in message
    assert "lm_head.weight" in message
    assert "5 unexpected: model.extra.0, model.extra.1, model.extra.2 and 2 more" in message
    assert "1 of another shape: model.layers.1.mlp.down_proj.weight is [48, 32], the model has [32, 48]" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_widened_exactly(tmp_path: Path, tools: Any, dtype: torch.dtype) -> None:
    rounded = {name: tensor.to(dtype) for name, tensor in tools.tiny_tensors(tools.CONFIG).items()}
    widened = {name: tensor.float() for name, tensor in rounded.items()}
    small = logits_of(tools, tools.write_checkpoint(tmp_path / "small", tools.CONFIG, [rounded]))
    large = logits_of(tools, tools.write_checkpoint(tmp_path / "large", tools.CONFIG, [widened]))
    assert torch.equal(small, large)


def test_dummy_weights_need_no_file(tmp_path: Path, tools: Any) -> None:
    folder = tools.write_checkpoint(tmp_path / "dummy", tools.CONFIG, [tools.tiny_tensors(tools.CONFIG)])
    (folder / "model.safetensors").unlink()
    first = logits_of(tools, folder, load_format="dummy")
    assert torch.isfinite(first).all()
    assert torch.equal(logits_of(tools, folder, load_format="dummy"), first)


def test_weights_that_memory_cannot_hold_are_refused(
    tiny_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "available_memory_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="out of memory: the weights need 0 MiB"):
        tools.new_runner(tools.engine_config(tiny_path))


def test_weights_that_are_not_numbers_are_noticed_at_start(tmp_path: Path, tools: Any) -> None:
    tensors = tools.tiny_tensors(tools.CONFIG)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    folder = tools.write_checkpoint(tmp_path / "nan", tools.CONFIG, [tensors])
    with pytest.raises(CheckpointError, match="not finite"):
        tools.new_runner(tools.engine_config(folder))


def test_a_quantisation_that_is_not_known_is_refused_by_name(tmp_path: Path, tools: Any) -> None:
    config = {**tools.CONFIG, "quantization_config": {"quant_method": "gptq"}}
    folder = tools.write_checkpoint(tmp_path / "gptq", config, [tools.tiny_tensors(tools.CONFIG)])
    with pytest.raises(UnsupportedModelError, match="gptq"):
        tools.new_runner(tools.engine_config(folder))
