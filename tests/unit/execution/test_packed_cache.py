# SPDX-License-Identifier: Apache-2.0
"""Starts of an engine with packed weights on disk: the second maps what the first packed, and whatever is wrong with
that, a start has the weights of its file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from drawn_moe import ARCHITECTURES, write_moe
from tiny_gguf import write_gguf
from tokenspeed import checkpoints
from tokenspeed.core.config import EngineConfig
from tokenspeed.execution import packed_cache
from tokenspeed.execution.model_runner import ModelRunner
from tokenspeed.kernels.ops.packed_linear import cpu as packed_linear
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok
from tokenspeed.layers.matrix import Matrix

pytestmark = pytest.mark.skipif(
    not isinstance(compiled_cpu(KernelContext("cpu", torch.float32)), Ok), reason="the compiled kernels are not built"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries are. Models of tests are small and new."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "NUM_BYTES_MIN", 0)
    monkeypatch.setattr(checkpoints, "_SETTLING_NS", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def num_packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pieces were packed since it was asked last."""
    calls: list[object] = []
    pack = packed_linear._pack
    monkeypatch.setattr(packed_linear, "_pack", lambda *args: calls.append(args) or pack(*args))

    def num() -> int:
        found = len(calls)
        calls.clear()
        return found

    return num


@pytest.fixture
def started(tools: Any) -> Callable[..., str]:
    """Starts an engine, waits until what it keeps is written, and gives the hash of its packed weights."""

    def start(path: Path, *, packed_cache: bool = True) -> str:
        config: EngineConfig = tools.engine_config(path)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, packed_cache=packed_cache))
        runner = tools.new_runner(config)
        try:
            return weights_of(runner)
        finally:
            runner.close(keeps=True)

    return start


def weights_of(runner: ModelRunner) -> str:
    digest = hashlib.sha256()
    for name, each in runner._model.named_modules():
        if isinstance(each, Matrix) and each.packed is not None:
            digest.update(name.encode())
            for data in each.packed.data:
                digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def test_the_second_start_maps_what_the_first_packed(
    tmp_path: Path, folder: Path, started: Callable[..., str], num_packed: Callable[[], int]
) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"attn_v": "Q8_0", "token_embd": "Q8_0"})
    first = started(path)
    assert num_packed() > 0
    (entry,) = folder.glob("*.packed")
    inode = entry.stat().st_ino
    assert started(path) == first
    assert num_packed() == 0
    assert entry.stat().st_ino == inode


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_tokens_are_the_same_from_what_is_mapped(
    tmp_path: Path, tools: Any, num_packed: Callable[[], int], kind: str
) -> None:
    path = tmp_path / "a.gguf"
    if kind == "dense":
        write_gguf(path, {"ffn_down": "Q5_0", "attn_v": "Q8_0", "token_embd": "Q8_0"})
    else:
        write_moe(path, next(iter(ARCHITECTURES)), "q8_0")
    found = []
    for packed_cache_used in (False, True):
        loop = tools.Loop(tools.engine_config(path))
        num = num_packed()
        assert (num == 0) is packed_cache_used
        found.append([each.token_ids for each in loop.run([tools.Wish([5, 9, 30], 8), tools.Wish([7] * 11, 8)])])
        loop.runner.close(keeps=True)
    assert found[0] == found[1]


def test_a_changed_file_is_packed(tmp_path: Path, started: Callable[..., str], num_packed: Callable[[], int]) -> None:
    """Of the same size and names, in its place and with its time."""
    path = write_gguf(tmp_path / "a.gguf", {}, seed=1)
    before, status = started(path), path.stat()
    time.sleep(0.02)  # some systems count time in steps
    path.write_bytes(write_gguf(tmp_path / "b.gguf", {}, seed=2).read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    num_packed()
    after = started(path)
    assert num_packed() > 0
    assert after != before
    assert after == started(path, packed_cache=False)


def test_a_file_that_is_too_new_is_not_trusted(
    tmp_path: Path, folder: Path, started: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_SETTLING_NS", 10**12)
    started(write_gguf(tmp_path / "a.gguf", {}))
    assert not folder.exists()


def test_a_damaged_entry_is_packed_and_made_again(
    tmp_path: Path, folder: Path, started: Callable[..., str], num_packed: Callable[[], int]
) -> None:
    path = write_gguf(tmp_path / "a.gguf", {})
    expected = started(path)
    (entry,) = folder.glob("*.packed")
    data = bytearray(entry.read_bytes())
    data[1000] ^= 1
    entry.write_bytes(data)
    num_packed()
    assert started(path) == expected
    assert num_packed() > 0
    assert started(path) == expected
    assert num_packed() == 0


def test_other_code_packs_anew(
    tmp_path: Path,
    folder: Path,
    started: Callable[..., str],
    num_packed: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what packs and of what reads, and what an older version packed goes."""
    path = write_gguf(tmp_path / "a.gguf", {})
    for part in (packed_linear, checkpoints.importlib.import_module("tokenspeed.checkpoints.gguf_source")):
        started(path)
        num_packed()
        monkeypatch.setattr(part, "_code_digest", lambda: "another")
        started(path)
        assert num_packed() > 0
        assert len(list(folder.glob("*.packed"))) == 1


@pytest.mark.parametrize("kind", ["off", "a file in its place", "small"])
def test_nothing_is_kept_where_it_cannot_or_shall_not_be(
    tmp_path: Path,
    folder: Path,
    started: Callable[..., str],
    num_packed: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str,
) -> None:
    """And a start has its weights all the same."""
    path = write_gguf(tmp_path / "a.gguf", {})
    if kind == "small":
        monkeypatch.setattr(packed_cache, "NUM_BYTES_MIN", 16 << 20)
    if kind == "a file in its place":
        folder.parent.write_text("not a folder")
    first, second = (started(path, packed_cache=kind != "off") for _ in range(2))
    assert first == second
    assert num_packed() > 0
    assert not folder.exists()


def test_weights_that_are_numbers_are_not_kept(tmp_path: Path, folder: Path, started: Callable[..., str]) -> None:
    started(write_gguf(tmp_path / "a.gguf", dict.fromkeys(("token_embd", "attn_q", "attn_k"), "F16")))
    assert len(list(folder.glob("*.packed"))) == 1  # of the others
    every = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    started(write_gguf(tmp_path / "b.gguf", dict.fromkeys(every, "F16")))
    assert len(list(folder.glob("*.packed"))) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux")
def test_a_model_that_was_loaded_holds_its_file_no_longer(tmp_path: Path, tools: Any) -> None:
    path = write_gguf(tmp_path / "held.gguf", {})
    runner = tools.new_runner(tools.engine_config(path))
    try:
        assert "held.gguf" not in Path("/proc/self/maps").read_text()
    finally:
        runner.close()


ENGINE = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from tokenspeed import checkpoints
from tokenspeed.execution import packed_cache
packed_cache.NUM_BYTES_MIN, checkpoints._SETTLING_NS = 0, 0
from tokenspeed.core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from tokenspeed.execution import ModelRunner
config = EngineConfig(
    model=ModelConfig(model={model!r}),
    cache=CacheConfig(kv_tokens=256),
    device=DeviceConfig(device="cpu", num_threads=1),
)
runner = ModelRunner.create(config, checkpoints.open_model(config.model))
from test_packed_cache import weights_of
print(weights_of(runner))
runner.close(keeps=True)
"""


def test_two_engines_that_start_at_once_have_the_same_weights(
    tmp_path: Path, folder: Path, started: Callable[..., str], num_packed: Callable[[], int]
) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"token_embd": "Q8_0"})
    here = Path(__file__).resolve()
    program = ENGINE.format(paths=[str(here.parent), str(here.parents[2])], model=str(path))
    engines = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [engine.communicate(timeout=120)[0].strip() for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0]
    assert sorted(each.suffix for each in folder.iterdir()) == ["", ".hash", ".packed"]
    assert said == [started(path)] * 2
    assert num_packed() == 0


@pytest.mark.parametrize("is_head", [False, True])
def test_what_an_entry_holds_multiplies_alike(is_head: bool) -> None:
    """From read-only memory, with pieces of which only the shape is known."""
    from tokenspeed.execution.packed_cache import _tensors
    from tokenspeed.kernels.ops.packed_linear import Piece
    from tokenspeed.kernels.ops.packed_linear.cases import drawn

    prepare = packed_linear.build(KernelContext("cpu", torch.float32))
    pieces = [drawn("q8_0", 21, 512)] if is_head else [drawn("q4_k", 21, 512), drawn("q8_0", 9, 512)]
    packed = prepare(pieces, is_head=is_head)
    copies = []
    for data in packed.data:
        room = np.zeros(len(data) + 64, np.uint8)
        begin = -room.ctypes.data % 64
        room[begin : begin + len(data)] = data.numpy()
        room.flags.writeable = False
        copies.append(room[begin : begin + len(data)])
    shapes = [
        Piece(each.format, torch.empty(each.blocks_NB.shape, dtype=torch.uint8, device="meta")) for each in pieces
    ]
    shapes = [Piece(each.format, each.blocks_NB.to("meta")) for each in pieces]
    again = prepare(shapes, is_head=is_head, data=_tensors(copies))
    assert again.in_planes is packed.in_planes is is_head
    x_TD = torch.randn(3, 512)
    assert torch.equal(again(x_TD, None), packed(x_TD, None))
    assert (again.num_bytes, again.num_outputs) == (packed.num_bytes, packed.num_outputs)
