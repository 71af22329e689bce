# SPDX-License-Identifier: Apache-2.0
"""The persistent decode step: its device code, emulated on the CPU, agrees with the reference; a compiler for the GPU
takes it; and what it cannot run it refuses."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from drawn_dense import Drawn, Shape, agreement
from emulated_step import SHARED_MEMORY, emulated
from tokenspeed.kernels.ops.decode_step import _persistent, _program
from tokenspeed.kernels.ops.decode_step.cuda import SOLUTION
from tokenspeed.kernels.registry import KernelContext, Reason

needs_emulation = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
BASE = Shape(
    hidden_size=208, ff_size=272, vocab_size=70, head_dim=64, block_size=64, rotary_dim=64, num_layers=2
)  # fmt: skip
EMULATED = {
    "qk-norm": (BASE, 3, None, 150),
    "long-rows-biases-16-heads": (
        dataclasses.replace(BASE, ff_size=4112, num_heads=16, num_kv_heads=1, head_dim=128, rotary_dim=32, num_layers=1,
                            interleaved=True, qk_norm=False, biases=True, block_size=32, tied=True), 4, 8192, 130),
    "window-256": (
        dataclasses.replace(BASE, head_dim=256, rotary_dim=256, window=50, num_kv_heads=1, activation="gelu_tanh_mul",
                            weight_offset=1.0, embed_scale=5.0), 5, None, 131),
    "start-no-positions": (dataclasses.replace(BASE, rotary_dim=0, num_layers=1), 2, None, 0),
}  # fmt: skip


def _cases() -> list[object]:
    """A compiler runs for each: two are enough for the default run."""
    marks = {"window-256": pytest.mark.slow, "start-no-positions": pytest.mark.slow}
    return [pytest.param(*case, id=name, marks=marks.get(name, ())) for name, case in EMULATED.items()]


@needs_emulation
@pytest.mark.parametrize(("shape", "num_blocks", "slot", "position"), _cases())
def test_emulated_device_code_agrees_with_the_reference(
    shape: Shape, num_blocks: int, slot: int | None, position: int, tmp_path: Path
) -> None:
    drawn = Drawn(shape, torch.bfloat16)
    agreement(emulated(tmp_path, num_blocks, slot), drawn, [position], tolerance=1.5e-2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_compiler_takes_the_device_code_and_keeps_it_in_registers(tmp_path: Path) -> None:
    constants = dataclasses.replace(_constants(BASE), num_blocks=132, splits=66)
    code = tmp_path / "step.cu"
    code.write_text(_persistent.source())
    macros = [f"-D{name}={value}" for name, value in constants.macros().items()]
    told = subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", *macros, "-o", str(tmp_path / "step"), code],
        check=True, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "0 bytes spill stores" in told.stderr, told.stderr


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(), "heads of 16"),
        (dataclasses.replace(BASE, hidden_size=200), "not a multiple of 16"),
        (dataclasses.replace(BASE, num_heads=34), "34 heads on 2"),
        (dataclasses.replace(BASE, num_heads=80, num_kv_heads=80), "more than the 64 processors"),
        (dataclasses.replace(BASE, activation="relu_mul"), "relu_mul"),
        (dataclasses.replace(BASE, head_major=False), "do not lie together"),
    ],
    ids=["head-dim", "hidden-size", "heads", "kv-heads", "activation", "pages"],
)
def test_what_the_kernel_cannot_run_it_refuses_in_words(shape: Shape, words: str) -> None:
    assert words in (_persistent.refusal(Drawn(shape, torch.bfloat16).model(2), 64) or "")


def test_weights_of_another_dtype_are_refused() -> None:
    assert "float32" in (_persistent.refusal(Drawn(BASE, torch.float32).model(2), 64) or "")


def test_layers_of_several_sizes_are_refused() -> None:
    model = Drawn(BASE, torch.bfloat16).model(2)
    other = Drawn(dataclasses.replace(BASE, ff_size=288), torch.bfloat16).model(2)
    mixed = dataclasses.replace(model, layers=(model.layers[0], other.layers[1]))
    assert "several sizes" in (_persistent.refusal(mixed, 64) or "")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_runs_on_no_other_device(device: str) -> None:
    assert isinstance(SOLUTION.supports(KernelContext(device, torch.bfloat16)), Reason)


def test_a_slot_is_chosen_that_rows_fill() -> None:
    model = Drawn(dataclasses.replace(BASE, num_heads=32, num_kv_heads=8, head_dim=128), torch.bfloat16).model(2)
    sizes = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
    wide = {name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()}
    layer = dataclasses.replace(model.layers[0], **wide)
    constants = _persistent.constants_of(dataclasses.replace(model, layers=(layer,)), 132, SHARED_MEMORY)
    assert (constants.slot, constants.unit_tokens, constants.splits) == (24576, 64, 16)


def test_what_was_compiled_once_is_kept_by_source_and_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def compile_now(_source: str, options: list[str]) -> bytes:
        asked.append(options)
        return b"binary %d" % len(asked)

    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.setattr(_program, "_compile", compile_now)
    first = _program.compiled("source", {"HIDDEN": 64}, "sm_90a")
    assert _program.compiled("source", {"HIDDEN": 64}, "sm_90a") == first == b"binary 1"
    assert _program.compiled("source", {"HIDDEN": 128}, "sm_90a") == b"binary 2"
    assert _program.compiled("other", {"HIDDEN": 64}, "sm_90a") == b"binary 3"
    assert "--define-macro=HIDDEN=128" in asked[1]


def test_without_a_compiler_the_reason_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    monkeypatch.setattr(_program, "_compiler", lambda: None)
    assert _program.compiler_version() is None
    with pytest.raises(_program.ProgramError, match="NVRTC is not installed"):
        _program.compiled("source", {}, "sm_90a")


def _constants(shape: Shape) -> _persistent.Constants:
    return _persistent.constants_of(Drawn(shape, torch.bfloat16).model(2), 132, SHARED_MEMORY)
