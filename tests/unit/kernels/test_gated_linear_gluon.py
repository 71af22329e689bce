# SPDX-License-Identifier: Apache-2.0
"""gated_linear for Hopper where there is none: what is turned away, device code that compiles for it, and its protocol
of copies, products and barriers, played by threads in every order that is drawn."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_gluon import Descriptor, Pointer, Stuck, play
from tokenspeed.kernels.ops.gated_linear import gluon
from tokenspeed.kernels.ops.gated_linear.cases import drawn
from tokenspeed.kernels.ops.gated_linear.reference import Reference
from tokenspeed.kernels.registry import KernelContext, Ok, Reason

SHARED_MEMORY_BYTES = 227 * 1024
HOPPER = KernelContext("cuda", torch.bfloat16)

IS_INSTALLED = importlib.util.find_spec("triton") is not None
HAS_LANGUAGE = IS_INSTALLED and importlib.metadata.version("triton").startswith(f"{gluon.TRITON_VERSION}.")

needs_triton = pytest.mark.skipif(not IS_INSTALLED, reason="needs Triton")


@needs_triton
def test_is_for_hopper_alone_and_16_bit_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(capability: tuple[int, int], version: str = "3.6.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)

    pretend((9, 0))
    assert isinstance(gluon.supports(HOPPER), Ok)
    assert gluon.supports(dataclasses.replace(HOPPER, dtype=torch.float32)) == Reason(
        "torch.float32 is not bfloat16 or float16"
    )
    pretend((10, 0))
    assert gluon.supports(HOPPER) == Reason("its device code is for compute capability 9")
    pretend((9, 0), "3.7.1")
    assert gluon.supports(HOPPER) == Reason("triton is 3.7.1, not 3.6")
    assert isinstance(gluon.supports(KernelContext("cpu", torch.bfloat16)), Reason)


def test_pays_for_many_rows_of_sizes_that_tiles_have() -> None:
    kernel = gluon.Gluon(gluon.PLAN)

    def matrix(num_rows: int, num_columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(num_rows, num_columns, dtype=dtype)

    x_TD, weight_ND = matrix(gluon.MIN_ROWS, 320), matrix(512, 320)
    assert kernel.pays(x_TD, weight_ND)
    assert not kernel.pays(x_TD[1:], weight_ND)
    assert gluon.suits(x_TD[1:], weight_ND)
    assert gluon.suits(matrix(5, 640)[::2, 64:384], weight_ND)
    for unfit in (x_TD[:0], matrix(600, 321)[:, :320], matrix(600, 328)[:, 1:321], matrix(600, 320, torch.float16),
                  matrix(1, 320).expand(600, 320), matrix(320, 600).t()):  # fmt: skip
        assert not gluon.suits(unfit, weight_ND)
    for unfit in (matrix(384, 320), matrix(0, 320), matrix(512, 640)[:, ::2]):
        assert not gluon.suits(x_TD, unfit)
    assert not gluon.suits(matrix(600, 96), matrix(512, 96))
    assert not gluon.suits(x_TD.float(), weight_ND.float())


def test_what_does_not_suit_is_computed_nevertheless() -> None:
    x_TD, weight_ND, bias_N = drawn((3, 10, 7), torch.bfloat16, has_bias=True)
    ours = gluon.Gluon(gluon.PLAN)(x_TD, weight_ND, bias_N, "gelu_tanh")
    assert torch.equal(ours, Reference()(x_TD, weight_ND, bias_N, "gelu_tanh"))


@pytest.mark.skipif(not HAS_LANGUAGE, reason="needs the Triton that the device code is written in")
def test_compiles_for_hopper() -> None:
    """In a process of its own, since here Triton interprets."""
    compiles = [sys.executable, str(Path(__file__).with_name("hopper_compile.py")), "gated_linear"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(compiles, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    for name, found in json.loads(run.stdout).items():
        assert found["shared"] <= SHARED_MEMORY_BYTES, name
        assert found["ptx"].count("setmaxnreg.inc") >= 2, name  # warps that multiply have the registers of others
        assert "wgmma.mma_async" in found["ptx"], name
        assert "cp.async.bulk.tensor.2d.shared" in found["ptx"], name
        assert "cp.async.bulk.tensor.2d.global" in found["ptx"], name
        assert "st.local" not in found["ptx"], name
        assert found["local_bytes"] == 0, name  # nothing spilled


@dataclasses.dataclass(frozen=True)
class Played:
    """num_programs of a launch, and what it computes: (T, F, D)."""

    shape: tuple[int, int, int]
    plan: gluon.Plan
    num_programs: int = 1
    has_bias: bool = False
    activation: str = "silu"


PLAN = gluon.Plan(group=2)
PLAYED = {
    "one-row-one-step": Played((1, 128, 64), PLAN),
    "one-tile": Played((128, 128, 320), PLAN),
    "edge": Played((129, 256, 192), PLAN, has_bias=True),
    "before-an-edge": Played((127, 256, 64), PLAN, activation="gelu_tanh"),
    "groups": Played((700, 256, 128), PLAN, num_programs=3),
    "many-tiles-of-one-step": Played((300, 512, 64), PLAN, num_programs=2),
    "as-many-steps-as-stages": Played((300, 256, 256), PLAN, num_programs=2),
    "more-programs-than-tiles": Played((64, 128, 64), PLAN, num_programs=2),
    "two-stages": Played((300, 256, 320), gluon.Plan(stages=2, group=8, skew=0)),
    "skewed": Played((500, 256, 320), gluon.Plan(skew=1)),
    "skewed-more": Played((500, 256, 320), gluon.Plan(skew=3)),
    "skewed-short": Played((400, 384, 256), gluon.Plan(skew=1)),
    "three-stages": Played(
        (300, 256, 320), gluon.Plan(stages=3), num_programs=2, has_bias=True, activation="gelu_tanh"
    ),
}


def device_code() -> Any:
    return importlib.import_module("tokenspeed.kernels.ops.gated_linear._gluon._triton")


def played(case: Played, seed: int, monkeypatch: pytest.MonkeyPatch, code: Any = None, **changed: Any) -> None:
    """All programs of a launch, one after the other, against the oracle."""
    (num_rows, size, num_inputs), plan = case.shape, case.plan
    generator = torch.Generator().manual_seed(seed)
    x_TD, weight_ND, bias_N = drawn(case.shape, torch.float32, case.has_bias, generator=generator)
    out_TF = torch.full((num_rows, size), float("nan"))
    constants = {
        "NUM_N": size // gluon.TILE_N,
        "NUM_STEPS": num_inputs // gluon.STEP_K,
        "GROUP": plan.group,
        "STAGES": plan.stages,
        "SKEW": gluon.skew_of(plan, num_inputs // gluon.STEP_K),
        "HAS_BIAS": case.has_bias,
        "GELU": case.activation == "gelu_tanh",
        **changed,
    }
    bias = None if bias_N is None else Pointer(bias_N)
    args = (Descriptor(x_TD), Descriptor(weight_ND), bias, Descriptor(out_TF), num_rows, *constants.values())
    for program in range(case.num_programs):
        play(code or device_code(), monkeypatch, seed, (program, case.num_programs), *args)
    expected_TF = Reference()(x_TD, weight_ND, bias_N, case.activation)
    torch.testing.assert_close(out_TF, expected_TF, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("case", PLAYED.values(), ids=PLAYED)
def test_every_order_of_copies_and_products_ends_and_is_right(case: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        played(case, seed, monkeypatch)


FAULTS = {
    "producer-forgets-steps": ("+= NUM_STEPS\n\n", "+= 0\n\n"),
    "consumer-forgets-steps": ("+= NUM_STEPS\n        count", "+= 0\n        count"),
    "phase-of-full": ("(done + step) // STAGES & 1)\n", "((done + step) // STAGES & 1) ^ 1)\n"),
    "phase-of-empty": ("// STAGES & 1) ^ 1)", "// STAGES & 1))"),
    "given-back-too-early": (
        "(done + step + STAGES - 1) % STAGES), pred=step > 0",
        "(done + step) % STAGES), pred=True",
    ),
    "one-is-not-given-back": ("pred=step > 0", "pred=step > 1"),
    "last-is-not-given-back": ("mbarrier.arrive(empty.index((done - 1) % STAGES))", "pass"),
    "reads-before-it-is-there": ("mbarrier.wait(full.index(stage),", "id("),
    "ends-before-the-product": ("mma_wait(0,", "mma_wait(1,"),
    "overwrites-what-is-stored": ("tma.store_wait(0)  #", "pass  #"),
    "leaves-before-it-is-stored": ("    tma.store_wait(0)\n\n", "    pass\n\n"),
    "overwrites-what-is-read": ("mbarrier.wait(empty.index(stage),", "id("),
    "wrong-exponent": ("0fBFB8AA3B", "0fBF800000"),
    "wrong-row-of-up": ("(half * NUM_N + n) * TILE_N", "n * TILE_N"),
    "fewer-bytes": ("PARTS * PART_M + 2 * TILE_N)", "PARTS * PART_M + TILE_N)"),
    "turn-is-never-given": ("pred=step == SKEW", "pred=step == -1"),
    "too-many-consumers-counted": ("_barriers(STAGES, PARTS)", "_barriers(STAGES, PARTS + 1)"),
}


@needs_triton
@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_protocol_shows(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(device_code().__file__).read_text()
    assert right in text
    (tmp_path / "faulty.py").write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty", tmp_path / "faulty.py")
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)

    def play_some() -> None:
        for seed in range(20):
            for name in ("skewed-more", "groups"):
                played(PLAYED[name], seed, monkeypatch, faulty)

    with pytest.raises(AssertionError):
        play_some()


@needs_triton
def test_nobody_waits_for_a_turn_that_two_tiles_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tile has fewer steps than there are stages, consumers must not take turns; `launch` sees to it."""
    assert [gluon.skew_of(gluon.Plan(skew=2), num_steps) for num_steps in (1, 3, 4, 64)] == [0, 0, 2, 2]

    def play_some() -> None:
        for seed in range(100):
            played(Played((900, 256, 128), gluon.Plan(skew=1)), seed, monkeypatch, None, SKEW=1)

    with pytest.raises(Stuck, match="all wait"):
        play_some()
