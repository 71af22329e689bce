# SPDX-License-Identifier: Apache-2.0
"""A feed-forward block uses the fused op where one is better than the reference, and only where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels import registry
from tokenspeed.kernels.ops.gated_linear.reference import Reference
from tokenspeed.kernels.registry import PLUGIN_API_VERSION, Band, Ok, Plugin, Solution
from tokenspeed.layers.activation import GatedMLP
from tokenspeed.layers.build import BuildContext

ROWS_MIN = 5


class Fused(Reference):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, *args: Any) -> torch.Tensor:
        self.calls.append(args[3])
        return super().__call__(*args)

    def pays(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> bool:
        return len(x_TD) >= ROWS_MIN


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    """A solution of the op that runs here."""
    kernel = Fused()
    solution = Solution("theirs", Band.PLUGIN, lambda _ctx: Ok(), lambda _ctx: kernel)
    plugins = {"them": Plugin(PLUGIN_API_VERSION, {"gated_linear": (solution,)})}
    monkeypatch.setattr(registry, "_plugins", lambda: plugins)
    return kernel


def block(
    activation: str = "silu_mul",
    overrides: Mapping[str, str] | None = None,
    deterministic: bool = False,
    bias: bool = False,
) -> tuple[GatedMLP, BuildContext]:
    torch.manual_seed(0)
    ctx = BuildContext("cpu", torch.float32, overrides, deterministic=deterministic)
    mlp = GatedMLP(ctx, 24, 32, activation, bias, names=("gate", "up", "down"))
    for each in mlp.parameters():
        each.data.normal_()
    return mlp, ctx


@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("bias", [False, True])
def test_is_fused_where_it_pays_and_computes_the_same(activation: str, bias: bool, fused: Fused) -> None:
    mlp, ctx = block(activation, bias=bias)
    assert ctx.bindings["gated_linear"].solution == "theirs"
    x_TD = torch.randn(ROWS_MIN, 24)
    several_TD = mlp(x_TD)
    assert fused.calls == [activation.removesuffix("_mul")]
    few_TD = mlp(x_TD[1:])
    assert len(fused.calls) == 1
    torch.testing.assert_close(several_TD[1:], few_TD, rtol=1e-4, atol=1e-3)


def test_is_left_to_two_ops_where_there_is_only_the_reference() -> None:
    mlp, ctx = block()
    assert "gated_linear" not in ctx.bindings
    assert "gated_linear" not in ctx.uncapturable()
    assert mlp._fused is None


def test_an_override_takes_the_reference_for_two_ops(fused: Fused) -> None:
    mlp, ctx = block(overrides={"gated_linear": "reference"})
    assert "gated_linear" not in ctx.bindings
    mlp(torch.randn(ROWS_MIN, 24))
    assert not fused.calls
    with pytest.raises(ConfigError, match="gated_linear=gluon! would force it"):
        block(overrides={"gated_linear": "gluon"})


def test_is_not_fused_where_rows_must_not_feel_each_other(fused: Fused) -> None:
    mlp, ctx = block(deterministic=True)
    assert "gated_linear" not in ctx.bindings
    mlp(torch.randn(ROWS_MIN, 24))
    assert not fused.calls


def test_packed_weights_stay_as_they_are(fused: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, _ctx = block()
    x_TD = torch.randn(ROWS_MIN, 24)
    wanted_TD = mlp(x_TD)
    weight_ND = mlp.gate_up.weight.clone()
    packed = lambda x, bias, out_dtype=None: torch.nn.functional.linear(x, weight_ND, bias)  # noqa: E731
    monkeypatch.setattr(mlp.gate_up.matrix, "packed", packed)
    mlp.gate_up.weight.data.fill_(float("nan"))
    torch.testing.assert_close(mlp(x_TD), wanted_TD, rtol=1e-4, atol=1e-3)
    assert len(fused.calls) == 1
