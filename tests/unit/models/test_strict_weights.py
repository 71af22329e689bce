# SPDX-License-Identifier: Apache-2.0
"""Every family reads the tensors that its checkpoints are published with, each exactly once, and names the one that is
missing, surplus, renamed or of another shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tokenspeed.checkpoints import TensorInfo
from tokenspeed.core.errors import CheckpointError
from tokenspeed.execution.weights import load_weights
from tokenspeed.models import WeightMap

PATH = Path("checkpoint")
Tensors = Mapping[str, torch.Tensor]


class DictWeights:
    """A checkpoint in memory."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.was_read: list[str] = []

    def infos(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), "f32") for name, tensor in self._tensors.items()}

    def read(self, name: str, _shape: tuple[int, ...]) -> Any:
        self.was_read.append(name)
        return self._tensors[name].numpy()

    def close(self) -> None:
        pass


class OneModel:
    """A model to load anew, from tensors as they are published and as the twin holds them."""

    def __init__(self, twin: Any, folder: Path) -> None:
        self.ours = twin.ours
        self.expected = [parameter.clone() for parameter in twin.ours.parameters()]
        twin.theirs.save_pretrained(folder)
        self.forms: Mapping[str, Tensors] = {
            "published": safetensors.torch.load_file(folder / "model.safetensors"),
            "held": dict(twin.theirs.state_dict()),
        }

    def load(self, tensors: Tensors) -> list[str]:
        """Names of the tensors that were read."""
        weights = DictWeights(tensors)
        load_weights(self.ours, weights, PATH)
        return weights.was_read


@pytest.fixture
def model(family: str, new_twin: Callable[..., Any], tmp_path: Path) -> OneModel:
    return OneModel(new_twin(family), tmp_path)


def kinds(tensors: Tensors, weight_map: WeightMap) -> Iterator[str]:
    """One name for each kind of tensor that is read: those that differ by numbers only are one kind."""
    seen: set[str] = set()
    for name in tensors:
        kind = re.sub(r"\.\d+\.", ".#.", name)
        if kind not in seen and not weight_map.ignores(name):
            seen.add(kind)
            yield name


def test_both_forms_fill_the_same_parameters(model: OneModel) -> None:
    for tensors in model.forms.values():
        for parameter in model.ours.parameters():
            parameter.data.fill_(float("nan"))
        read = model.load(tensors)
        assert len(read) == len(set(read))
        assert all(model.ours.weight_map().ignores(name) for name in set(tensors) - set(read))
        for actual, expected in zip(model.ours.parameters(), model.expected, strict=True):
            assert torch.equal(actual, expected)


def test_a_fault_in_any_tensor_is_named(model: OneModel) -> None:
    published, held = model.forms.values()
    check_faults(model, published)
    if set(published) != set(held):
        check_faults(model, held)


def check_faults(model: OneModel, tensors: Tensors) -> None:
    for name in kinds(tensors, model.ours.weight_map()):
        without = {each: tensor for each, tensor in tensors.items() if each != name}
        shape = list(tensors[name].shape)
        longer = torch.zeros(shape[0] + 1, *shape[1:])
        faults: list[tuple[Tensors, str]] = [
            (without, "missing: {usual}"),
            ({**without, f"{name}.renamed": tensors[name]}, "missing: {usual}; 1 unexpected: {name}.renamed"),
            ({**tensors, f"{name}.more": tensors[name]}, "unexpected: {name}.more"),
            ({**without, name: longer}, "of another shape: {name} is {longer}, the model has {shape}"),
        ]
        for faulty, says in faults:
            message = says.format(name=name, usual=usual(model, tensors, name), longer=list(longer.shape), shape=shape)
            with pytest.raises(CheckpointError, match=re.escape(message) + "$"):
                model.load(faulty)


def usual(model: OneModel, tensors: Tensors, name: str) -> str:
    """What a message calls a tensor that several names are accepted for."""
    return next(slot.name for slot in model.ours.weight_map().for_checkpoint(tensors) if name in slot.names)
