# SPDX-License-Identifier: Apache-2.0
"""Fills a built model from a checkpoint, strictly: every parameter is filled or packed and every tensor has a place.

A rank takes its part of each. Knows names and shapes, not file formats. Reads one tensor at a time, so that memory
holds the model and one tensor.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.checkpoints import ProgressFn, Repeated, TensorInfo, Weights
from tokenspeed.core.errors import CapacityError, CheckpointError
from tokenspeed.execution.packing import (
    NOTHING_BEFORE,
    NOTHING_PACKED,
    AnyMatrix,
    PackedBefore,
    PackedPart,
    Packing,
    place_of,
)
from tokenspeed.execution.placement import available_memory_bytes
from tokenspeed.models import CausalLM, WeightMap

_NAMES_SHOWN = 3


def load_weights(
    model: CausalLM,
    weights: Weights,
    path: Path,
    progress: ProgressFn | None = None,
    packing: Packing = NOTHING_PACKED,
    *,
    packed_before: PackedBefore = NOTHING_BEFORE,
) -> None:
    """packing: what stays packed. packed_before: what of that was packed once already. Raises CheckpointError, before
    anything is read, when a tensor is missing, surplus or of another shape than the model's; path is for the
    message."""
    weight_map = model.weight_map().for_checkpoint(weights.infos() or ())
    _assert_covers(model, weight_map)
    names = _match(weight_map, weights, path)
    packed: dict[object, AnyMatrix] = {
        place_of(part.slot): matrix for matrix, parts in packing.items() for part in parts
    }
    homes = [packed.get(place_of(slot)) for slot in weight_map]  # before the first is packed: it moves
    last_name, whole = "", None
    for done, (slot, name, matrix) in enumerate(zip(weight_map, names, homes, strict=True)):
        if matrix is not None:
            if matrix.packed is None:
                _pack(matrix, packing[matrix], packed_before.get(matrix))
        elif slot.target.numel() > 0:
            if whole is None or name != last_name:  # parts of one tensor follow one another
                last_name, whole = name, _as_tensor(weights.read(name, slot.cut.shape), slot.target)
            slot.fill(whole)
        if progress is not None:
            progress("load", done + 1, len(names), "tensors")


def _pack(matrix: AnyMatrix, parts: Sequence[PackedPart], data: Sequence[torch.Tensor] | None) -> None:
    matrix.pack([part.piece() if data is None else part.shape_only() for part in parts], data)


def num_parameters(model: CausalLM) -> int:
    """Parameters of the model over all ranks, shared ones once."""
    shapes = {slot.name: slot.cut.shape for slot in model.weight_map()}
    return sum(math.prod(shape) for shape in shapes.values())


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """Bytes of the parameters of this rank, and those of them that stay packed."""

    num_bytes: int
    num_packed_bytes: int

    @classmethod
    def of(cls, model: CausalLM, packing: Packing) -> WeightsSize:
        """Known before anything is read, and the same afterwards."""
        packed = {id(matrix.weight) for matrix in packing}
        plain = sum(each.numel() * each.element_size() for each in model.parameters() if id(each) not in packed)
        num_packed_bytes = sum(part.num_bytes for parts in packing.values() for part in parts)
        return cls(plain + num_packed_bytes, num_packed_bytes)


def require_memory(model: CausalLM, path: Path, device: torch.device, packing: Packing = NOTHING_PACKED) -> None:
    """CapacityError when the parameters would not fit. Memory of a CPU is taken only as they are filled; elsewhere it
    is taken already."""
    if device.type != "cpu":
        return
    needed = WeightsSize.of(model, packing).num_bytes
    available = available_memory_bytes(device)
    if needed > available:
        raise CapacityError(
            f"{path}: out of memory: the weights need {needed >> 20} MiB and {available >> 20} MiB are available; "
            "use a smaller model, or --dtype bfloat16 to halve what float32 takes"
        )


def _match(weight_map: WeightMap, weights: Weights, path: Path) -> list[str]:
    """The checkpoint name of each slot."""
    infos = weights.infos()
    if infos is None:
        return [slot.name for slot in weight_map]
    found = [next((name for name in slot.names if name in infos), None) for slot in weight_map]
    missing = [slot.name for slot, name in zip(weight_map, found, strict=True) if name is None]
    faults = [
        *_listed("missing", list(dict.fromkeys(missing))),
        *_listed("unexpected", _surplus(weight_map, infos, found)),
        *_listed("of another shape", list(dict.fromkeys(_misshapen(weight_map, infos, found)))),
    ]
    if faults:
        raise CheckpointError(f"{path}: the tensors do not match the model's configuration: {'; '.join(faults)}")
    return [name for name in found if name is not None]


def _surplus(weight_map: WeightMap, infos: Iterable[str], found: Sequence[str | None]) -> list[str]:
    used = set(found)
    return [name for name in infos if name not in used and not weight_map.ignores(name)]


def _misshapen(weight_map: WeightMap, infos: Mapping[str, TensorInfo], found: Sequence[str | None]) -> Iterator[str]:
    for slot, name in zip(weight_map, found, strict=True):
        if name is not None and infos[name].shape != slot.cut.shape:
            yield f"{name} is {list(infos[name].shape)}, the model has {list(slot.cut.shape)}"


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{len(names)} {what}: {shown}{more}"]


def _assert_covers(model: CausalLM, weight_map: WeightMap) -> None:
    """Slots are views that tile the parameters: each storage is filled exactly once."""
    filled: Counter[int] = Counter()
    for slot in weight_map:
        filled[slot.target.untyped_storage().data_ptr()] += slot.target.numel()
    for parameter in model.parameters():
        covered = filled[parameter.untyped_storage().data_ptr()]
        assert covered == parameter.numel(), f"slots fill {covered} of {parameter.numel()} values of a parameter"


def _as_tensor(array: NDArray[np.generic] | Repeated, target: torch.Tensor) -> torch.Tensor:
    """bf16 travels as uint16 bit patterns. torch warns of arrays it could write to: a view of a mapped file is only
    read here. What repeats is made whole on the target's device."""
    if isinstance(array, Repeated):
        return _repeat(torch.from_numpy(array.period).to(target.device), array.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _repeat(period_N: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape)
    whole = period_N.new_empty(size)
    num_periods = size // max(1, len(period_N))
    body = num_periods * len(period_N)
    whole[:body].view(num_periods, len(period_N)).copy_(period_N)
    whole[body:] = period_N[: size - body]
    return whole.view(shape)
