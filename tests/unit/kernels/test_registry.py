# SPDX-License-Identifier: Apache-2.0
"""How a solution is chosen: bands, reasons, overrides, ties, plugins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels import registry
from tokenspeed.kernels.registry import (
    PLUGIN_API_VERSION,
    Band,
    KernelContext,
    Ok,
    Plugin,
    Reason,
    Solution,
    bind,
    bindings_table,
    check_overrides,
    op_names,
    solutions_of,
)

CPU = KernelContext("cpu", torch.float32)
GRAPHED = (
    "linear",
    "logprobs",
    "page_table_update",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write",
    "sampling",
    "silu_mul",
)
"""What the captured steps of a dense model are made of."""


def solution(name: str, band: Band = Band.PLUGIN, support: Ok | Reason | None = None) -> Solution:
    return Solution(name, band, lambda _ctx: support or Ok(), lambda _ctx: lambda x_TF: name)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Plugin]]:
    """Stands in for the entry points; registry._plugins is what reads them."""
    installed: dict[str, Plugin] = {}
    monkeypatch.setattr(registry, "_plugins", lambda: installed)
    return installed


def plugin(*solutions: Solution, api_version: int = PLUGIN_API_VERSION) -> Plugin:
    return Plugin(api_version, {"silu_mul": solutions})


def test_every_op_has_a_reference_that_runs_anywhere() -> None:
    for op in op_names():
        [reference] = [each for each in solutions_of(op) if each.band is Band.REFERENCE]
        assert reference.supports(KernelContext("cuda", torch.float16)) == Ok()


def test_every_op_but_latent_attention_can_be_held_to_rows_alone() -> None:
    invariant, refused = dataclasses.replace(CPU, batch_invariant=True), set()
    for op in op_names():
        try:
            bind(op, invariant)
        except ConfigError:
            refused.add(op)
    assert refused == {"mla_attention"}
    on_gpus = {op: [each for each in solutions_of(op) if each.batch_invariant and each.graph_safe] for op in GRAPHED}
    assert all(on_gpus.values()), on_gpus


def test_a_file_with_a_leading_underscore_is_no_solution() -> None:
    folder = Path(registry.__file__).parent / "ops" / "collective"
    assert (folder / "_process_groups.py").exists()
    assert {each.name for each in solutions_of("collective")} == {"reference", "gloo", "nccl"}


def test_highest_supported_band_wins_and_the_others_say_why(plugins: Mapping[str, Plugin]) -> None:
    bound = bind("silu_mul", KernelContext("cpu", torch.float16))
    assert bound.solution == "reference"
    assert dict(bound.passed_over)["cpu"] == "torch.float16 is not float32 or bfloat16"


def test_override_is_kept_and_reported(plugins: Mapping[str, Plugin]) -> None:
    bound = bind("silu_mul", dataclasses.replace(CPU, overrides={"silu_mul": "reference"}))
    assert bound.solution == "reference"
    assert ("cpu", "overridden by silu_mul=reference") in bound.passed_over


@pytest.mark.parametrize(
    ("override", "says"),
    [("nonsense", "no such solution; silu_mul has cpu, triton, reference"), ("cpu", "silu_mul=cpu! would force it")],
)
def test_override_that_can_not_be_kept_is_refused(override: str, says: str, plugins: Mapping[str, Plugin]) -> None:
    with pytest.raises(ConfigError, match=says):
        bind("silu_mul", KernelContext("cpu", torch.float16, {"silu_mul": override}))


def test_forced_override_skips_the_support_check(plugins: dict[str, Plugin]) -> None:
    plugins["mine"] = plugin(solution("fancy", support=Reason("needs a machine that nobody has")))
    assert bind("silu_mul", dataclasses.replace(CPU, overrides={"silu_mul": "fancy!"})).solution == "fancy"


def test_override_of_an_unknown_op_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such op; ops are .*paged_attention"):
        check_overrides({"paged_atention": "cpu"})


def test_plugin_outranks_the_built_in_and_can_be_disabled(plugins: dict[str, Plugin]) -> None:
    plugins["mine"] = plugin(solution("fancy"))
    assert bind("silu_mul", CPU).call(None) == "fancy"
    assert bind("silu_mul", dataclasses.replace(CPU, disabled_plugins=frozenset({"mine"}))).solution != "fancy"


def test_tie_is_an_error_that_an_override_settles(plugins: dict[str, Plugin]) -> None:
    plugins["mine"] = plugin(solution("fancy"), solution("plain"))
    with pytest.raises(ConfigError, match="fancy and plain both claim band plugin"):
        bind("silu_mul", CPU)
    assert bind("silu_mul", dataclasses.replace(CPU, overrides={"silu_mul": "plain"})).solution == "plain"


def test_nothing_is_replaced_silently(plugins: dict[str, Plugin]) -> None:
    plugins["mine"] = plugin(solution("reference"))
    with pytest.raises(ConfigError, match="two solutions are called 'reference'"):
        bind("silu_mul", CPU)


def test_a_solution_has_no_feature_that_it_does_not_name(plugins: dict[str, Plugin]) -> None:
    able = dataclasses.replace(solution("fancy"), features=frozenset({"sinks", "log-sum-exp"}))
    plugins["mine"] = Plugin(PLUGIN_API_VERSION, {"paged_attention": (solution("plain"), able)})
    with_sinks = dataclasses.replace(CPU, features=frozenset({"sinks"}))
    bound = bind("paged_attention", with_sinks)
    assert bound.solution == "fancy"
    assert ("plain", "has no sinks") in bound.passed_over
    with pytest.raises(ConfigError, match="has no sinks; paged_attention=plain! would force it"):
        bind("paged_attention", dataclasses.replace(with_sinks, overrides={"paged_attention": "plain"}))


def test_where_bits_must_not_depend_on_the_batch_only_invariant_solutions_serve(plugins: dict[str, Plugin]) -> None:
    invariant = dataclasses.replace(CPU, batch_invariant=True)
    plugins["mine"] = plugin(solution("fancy"))
    bound = bind("silu_mul", invariant)
    assert bound.traits.batch_invariant
    assert dict(bound.passed_over)["fancy"] == "a row's bits depend on the rest of the batch"
    with pytest.raises(ConfigError, match=r"op linear has no solution here: .*a row's bits depend"):
        bind("linear", dataclasses.replace(invariant, dtype=torch.float16))


def test_plugin_must_claim_its_own_band(plugins: dict[str, Plugin]) -> None:
    plugins["mine"] = plugin(solution("fancy", Band.SPECIALISED))
    with pytest.raises(ConfigError, match=r"silu_mul/fancy must use Band\.PLUGIN"):
        bind("silu_mul", CPU)


def test_plugin_of_another_api_is_passed_over(plugins: dict[str, Plugin]) -> None:
    plugins["old"] = plugin(solution("fancy"), api_version=PLUGIN_API_VERSION + 1)
    reasons = dict(bind("silu_mul", CPU).passed_over)
    assert reasons["fancy"] == f"plugin old speaks API {PLUGIN_API_VERSION + 1}, this build speaks {PLUGIN_API_VERSION}"


def test_entry_points_are_read_from_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "broken", "somewhere:thing"

        def load(self) -> object:
            return object()

    def entry_points(**query: str) -> list[Any]:
        assert query == {"group": "tokenspeed.kernels"}
        return [Entry()]

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)
    with pytest.raises(ConfigError, match=r"kernel plugin broken: somewhere:thing is not a .*Plugin"):
        registry._plugins.__wrapped__()


def test_table_lists_every_op() -> None:
    assert [bound.op for bound in bindings_table(CPU)] == list(op_names())
    assert [bound.op for bound in bindings_table(CPU, ("linear",))] == ["linear"]
