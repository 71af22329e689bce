# SPDX-License-Identifier: Apache-2.0
"""Runs steps: a plan goes in, the tokens that it sampled come out.

Steps are launched in order on a thread of their own and run in order on the device; whoever asks for a step's output
waits for it there, so that the next steps are planned and launched while one runs. A plan may also do no more than
move pages. Of several ranks each has a runner, given the same plans; the first one samples for all. Knows
neither what a plan is for nor what becomes of the tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from tokenspeed.checkpoints import ModelSource, ProgressFn
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import CapacityError, CheckpointError, StartError
from tokenspeed.core.ipc import KernelBinding, Vocabulary
from tokenspeed.core.plan import Int32Array, RowField, RowKind, Seating, StepPlan
from tokenspeed.core.request import SamplingParams
from tokenspeed.execution import kv_cache, placement
from tokenspeed.execution.cuda_graph import DECODE_ROWS_MAX, TOKENS_MAX, StepGraphs, step_sizes
from tokenspeed.execution.drawn import Drawn
from tokenspeed.execution.forward import Forward
from tokenspeed.execution.host_step import HostStep
from tokenspeed.execution.input_buffers import InputBuffers, Seats, StepInputs
from tokenspeed.execution.outputs import PromptLogprobs, RunnerInfo, StepHandle, StepOutput
from tokenspeed.execution.packed_cache import PackedCache
from tokenspeed.execution.packing import NOTHING_PACKED, has_blocks, plan_packing
from tokenspeed.execution.prompt_logprobs import PromptScorer
from tokenspeed.execution.ranked_sampler import RankedSampler
from tokenspeed.execution.sampler import Sampler, SamplingOps
from tokenspeed.execution.scripted import ScriptedModel
from tokenspeed.execution.step_output import output_of, without_tokens
from tokenspeed.execution.weights import WeightsSize, load_weights, num_parameters, require_memory
from tokenspeed.kernels.compile_ahead import compiled_ahead
from tokenspeed.kernels.ops.collective import Communicator
from tokenspeed.kernels.ops.decode_step import DecodeStep, Prepare
from tokenspeed.kernels.platform import num_cpus, set_num_threads
from tokenspeed.kernels.registry import BoundKernel, Reason
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.decoder import Decoder
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.transfer import BlockMover, FinishedMove
from tokenspeed.transfer import resolve as resolve_mover

_log = logging.getLogger(__name__)
_WARMUP_LEN = 64
_MOVER = "host"
_PLAN_ARRAYS = tuple(name for name in StepPlan.__struct_fields__ if name != "step_id")
_BEHIND_FORWARD = ("sampling", "logprobs")
"""Ops that can run op by op behind a captured forward."""


class _Job(msgspec.Struct, frozen=True):
    handle: StepHandle
    plan: StepPlan
    seatings: tuple[Seating, ...]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a runner is made of."""

    model: CausalLM | ScriptedModel
    forward: Forward
    seats: Seats
    buffers: InputBuffers
    sampling: RankedSampler
    prompt_scorer: PromptScorer
    mover: BlockMover
    packed_cache: PackedCache


class ModelRunner:
    """One rank of a model on one device. launch from one thread at a time."""

    def __init__(self, info: RunnerInfo, parts: _Parts) -> None:
        self.info = info
        self._mover = parts.mover
        self._packed_cache = parts.packed_cache
        self._mover_lock = threading.Lock()
        self._elsewhere: list[FinishedMove] = []
        self._model = parts.model
        self._forward = parts.forward
        self._seats = parts.seats
        self._buffers = parts.buffers
        self._sampling = parts.sampling
        self._graphs: StepGraphs | None = None
        self._host_step: HostStep | None = None
        self._prompt_scorer = parts.prompt_scorer
        self._spoilt: set[int] = set()  # seats of steps that failed, until somebody else takes them
        self._jobs: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._own_stream = placement.own_stream(torch.device(info.device))
        self._thread = threading.Thread(target=self._work, name="model-runner", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        source: ModelSource,
        progress: ProgressFn | None = None,
        communicator: Communicator | None = None,
    ) -> ModelRunner:
        """Build the model that the source describes, load and warm it. communicator: the ranks among which this is one,
        and which all do this at the same time; None for a replica of one. Raises a StartError subclass."""
        started = time.monotonic()
        device = placement.resolve_device(config.device)
        num_threads = placement.resolve_num_threads(config.device)
        set_num_threads(num_threads)
        dtype = placement.resolve_dtype(config.model.dtype, device, source.config)
        mesh, rank = _mesh(config, communicator), 0 if communicator is None else communicator.rank
        overrides, deterministic = dict(config.device.kernel_overrides), config.device.deterministic
        ctx = BuildContext(str(device), dtype, overrides, mesh, rank, deterministic=deterministic)
        model, model_type, weights, packed_cache = _build(config, source, ctx, progress)
        forward = Forward(model, ctx, communicator)
        ops, update_tables = SamplingOps(ctx.bind("sampling"), ctx.bind("logprobs")), ctx.bind("page_table_update")
        agree = _min_over_ranks(communicator)
        size = kv_cache.size_pool(config, model.kv_specs, model.max_model_len, ctx, agree)
        layers = kv_cache.allocate(size, model.kv_specs, ctx)
        mover = resolve_mover(_MOVER)(kv_cache.page_groups(size, layers))
        seats = Seats(config.scheduler.max_num_seqs, mesh, mesh.index(rank, mesh.axes_of(Group.ATTENTION_DP)))
        info = RunnerInfo(
            model_type=model_type,
            num_parameters=0 if isinstance(model, ScriptedModel) else num_parameters(model),
            device=str(device),
            dtype=placement.dtype_name(dtype),
            num_threads=num_threads,
            block_size=size.block_size,
            num_kv_blocks=size.num_blocks,
            kv_bytes=size.kv_bytes,
            max_model_len=size.max_model_len,
            max_num_batched_tokens=placement.step_tokens(config.scheduler, device, None),
            vocab_size=model.vocab_size,
            load_s=0.0,
            groups=size.groups,
            weight_bytes=weights.num_bytes,
            packed_bytes=weights.num_packed_bytes,
            kernels=tuple(_binding(kernel) for kernel in ctx.bindings.values()),
        )
        buffers = InputBuffers(size, seats, layers, device, update_tables)
        sampler = Sampler(ops, seats.num_seats, model.vocab_size, device)
        sampling = RankedSampler(sampler, communicator, device)
        scorer = PromptScorer(ops.logprobs, model.vocab_size)
        runner = cls(info, _Parts(model, forward, seats, buffers, sampling, scorer, mover, packed_cache))
        if not isinstance(model, ScriptedModel):
            placement.wait_for(device)
            if device.type == "cpu" and mesh.num_ranks == 1:
                runner._host_step = runner._prepare_host_step(ctx)
            try:
                if device.type == "cuda" and not _unfit_for_capture(ctx):
                    runner._compile_ahead()
                token_s = runner._warm_up(progress)
                if device.type != "cpu" and mesh.num_ranks == 1:
                    runner._prepare_graphs(config, ctx, progress)
            except StartError:
                runner.close()
                raise
            info = dataclasses.replace(
                info, max_num_batched_tokens=placement.step_tokens(config.scheduler, device, token_s)
            )
            kv_cache.zero_pages(layers, torch.zeros(1, dtype=torch.int64, device=device))
            placement.wait_for(device)
        runner.info = dataclasses.replace(info, load_s=time.monotonic() - started)
        packed_cache.keep()
        return runner

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> StepHandle:
        """Run this plan after those launched before. Copies the plan's arrays, which the planner reuses. seatings:
        one for each of plan.seated."""
        assert len(seatings) == len(plan.seated), (len(seatings), len(plan.seated))
        handle = StepHandle(plan.step_id)
        self._jobs.put(_Job(handle, _copy(plan), tuple(seatings)))
        return handle

    def know(self, vocabulary: Vocabulary) -> None:
        """What grammars need; before the first seating that has one. Any thread."""
        self._sampling.know(vocabulary)

    def poll_transfers(self) -> tuple[FinishedMove, ...]:
        """Transfers that finished since the last step's output, for a caller that has no step to launch and waits for
        one. Each is told once, here or in a StepOutput."""
        with self._mover_lock:
            elsewhere, self._elsewhere = self._elsewhere, []
            return (*elsewhere, *self._mover.poll())

    def close(self, *, keeps: bool = False) -> None:
        """Finish the launched steps and end the threads. keeps: after packed weights are on disk. Idempotent."""
        self._jobs.put(None)
        self._thread.join()
        self._packed_cache.close(waits=keeps)
        self._sampling.close()

    def _work(self) -> None:
        set_num_threads(self.info.num_threads)
        with self._own_stream(), torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                if isinstance(job, _Job):
                    job.handle.launched(self._run(job))
                else:
                    job()

    def _run(self, job: _Job) -> Callable[[], StepOutput]:
        """What reads the output of the step that was launched."""
        self._start_transfers(job.plan)
        try:
            read = self._step(job)
        except Exception:  # noqa: BLE001 - whatever went wrong ends the requests of this step, never the process
            failed = self._failed(job.plan.step_id, job.plan)
            return lambda: msgspec.structs.replace(failed, transfers=self.poll_transfers())

        def output() -> StepOutput:
            try:
                done = read()
            except Exception:  # noqa: BLE001 - likewise: what goes wrong on a device shows here
                done = self._failed(job.plan.step_id, job.plan)
            transfers = self.poll_transfers()
            return msgspec.structs.replace(done, transfers=transfers) if transfers else done

        return output

    def _failed(self, step_id: int, plan: StepPlan) -> StepOutput:
        _log.exception("step %d failed", step_id)
        self._spoilt.update(plan.rows[:, RowField.SEAT].tolist())
        return without_tokens(plan, fault=True)

    def _start_transfers(self, plan: StepPlan) -> None:
        """Those of this rank's partition; what others move is done as far as this rank goes."""
        if not len(plan.load) and not len(plan.store):
            return
        num_groups, partition = len(self.info.groups), self._seats.partition
        own = [rows[rows[:, 1] // num_groups == partition] for rows in (plan.load, plan.store)]
        leases = {int(lease) for rows in (plan.load, plan.store) for lease in rows[:, 0]}
        elsewhere = leases - {int(lease) for rows in own for lease in rows[:, 0]}
        first_group = np.array([0, partition * num_groups, 0, 0], dtype=np.int32)
        with self._mover_lock:
            self._elsewhere += [(lease, True) for lease in sorted(elsewhere)]
            self._mover.start(own[0] - first_group, own[1] - first_group)

    def _step(self, job: _Job) -> Callable[[], StepOutput]:
        plan, buffers = job.plan, self._buffers
        buffers.apply(plan)
        for seating in job.seatings:
            self._seat(seating)
        if len(plan.rows) == 0:
            buffers.tables.flush()
            return lambda: without_tokens(plan, fault=False)
        inputs = buffers.read(plan)
        prompt_logprobs: tuple[PromptLogprobs | None, ...] = (None,) * len(plan.rows)
        drawn = self._most_likely(inputs)
        if drawn is None:
            drawn, prompt_logprobs = self._sampled(inputs)
        if not drawn.is_known:
            buffers.commit(inputs, drawn.token_ids_S)
        buffers.advance(inputs)
        is_spoilt_R = np.isin(inputs.seats_R, list(self._spoilt)) if self._spoilt else None
        return lambda: output_of(plan.step_id, inputs, drawn.read(), prompt_logprobs, is_spoilt_R)

    def _most_likely(self, inputs: StepInputs) -> Drawn | None:
        """The step's tokens, where it can do without logits."""
        host_step, num_rows = self._host_step, len(inputs.seats_S)
        if host_step is None or not host_step.finds_most_likely(num_rows) or not host_step.takes(inputs):
            return None
        if not self._sampling.is_greedy(inputs.seats_S) or self._prompt_scorer.has_work(inputs):
            return None
        return Drawn(host_step.most_likely(inputs), num_rows)

    def _sampled(self, inputs: StepInputs) -> tuple[Drawn, tuple[PromptLogprobs | None, ...]]:
        """The step's tokens, and of each row what its prompt scored."""
        buffers = self._buffers
        prompt_logprobs: tuple[PromptLogprobs | None, ...] = (None,) * len(inputs.seats_R)
        scores = self._prompt_scorer.has_work(inputs)
        graphs, prepared = self._graphs, None
        size = None if scores or graphs is None else graphs.fitting(inputs)
        if scores:
            logits_SV, hidden_TD = self._forward.logits_and_hidden(buffers.step(inputs))
            prompt_logprobs = self._prompt_scorer.score(inputs, hidden_TD, self._forward.head)
        elif graphs is not None and size is not None:
            logits_SV = graphs.forward(inputs, size, self._sampling.draw_columns(inputs.seats_S))
            prepared = graphs.sampling(size)
        else:
            logits_SV = self._logits(inputs)
        if graphs is not None and size is None:
            prepared = graphs.sampling_behind(logits_SV, inputs, self._sampling.draw_columns(inputs.seats_S))
        return self._sampling.sample(logits_SV, inputs.seats_S, inputs.position_S, prepared), prompt_logprobs

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        if self._host_step is not None and self._host_step.takes(inputs):
            return self._host_step.logits(inputs)
        return self._forward.logits(self._buffers.step(inputs))

    def _seat(self, seating: Seating) -> None:
        if isinstance(self._model, ScriptedModel):
            seating = self._model.seating(seating)
        self._spoilt.discard(seating.seat)
        self._sampling.seat(seating)
        self._prompt_scorer.seat(seating)

    def _prepare_graphs(self, config: EngineConfig, ctx: BuildContext, progress: ProgressFn | None) -> None:
        sample, decode_step = ctx.bindings["sampling"], self._whole_decode_step(ctx)
        sizes = step_sizes(config.scheduler.max_num_seqs, self.info.max_num_batched_tokens)
        unfit = _unfit_for_capture(ctx)
        if unfit:
            _log.info("steps are not captured as graphs: %s cannot be", ", ".join(unfit))
        captures = config.device.graphs and not unfit
        graphs = StepGraphs(
            self._forward,
            self._buffers,
            sample.call,
            self._sampling.penalties,
            sizes,
            captures=captures,
            samples=sample.traits.graph_safe,
            decode_step=decode_step,
        )
        self._on_thread(lambda: graphs.prepare(progress))
        self._graphs = graphs
        for plan, seatings in self._large_steps():
            self.launch(plan, seatings).wait()

    def _compile_ahead(self) -> None:
        """The kernels of steps that run op by op. Tokens that nobody computed may be any number."""

        def act() -> None:
            with compiled_ahead(num_cpus()):
                self._prompt_scorer.touch(torch.device(self.info.device))
                for plan, seatings in (*self._small_steps(), *self._large_steps()):
                    self._step(_Job(StepHandle(plan.step_id), plan, seatings))
                    self._buffers.last_token.zero_()

        self._on_thread(act)

    def _small_steps(self) -> list[tuple[StepPlan, tuple[Seating, ...]]]:
        """A prefill and a decode on the null page, and the prefill again."""
        prompt = np.zeros(max(1, min(_WARMUP_LEN, self.info.max_model_len - 1)), dtype=np.int32)
        prefill = _plain_plan(0, RowKind.PREFILL_LAST, prompt, seated=True)
        decode = _plain_plan(1, RowKind.DECODE, prompt[:0], seated=False)
        seatings = (_warm_seating(prompt),)
        return [(prefill, seatings), (decode, ()), (msgspec.structs.replace(prefill, step_id=2), seatings)]

    def _large_steps(self) -> list[tuple[StepPlan, tuple[Seating, ...]]]:
        """Of more tokens than are prepared: a kernel is compiled anew where a number is a multiple of 16."""
        most = min(self.info.max_num_batched_tokens, self.info.max_model_len - 1) // 16 * 16
        prompts = [np.zeros(each, dtype=np.int32) for each in (most, most - 1)] if most > TOKENS_MAX + 1 else []
        return [
            (_plain_plan(0, RowKind.PREFILL_LAST, prompt, seated=True), (_warm_seating(prompt),)) for prompt in prompts
        ]

    def _prepare_host_step(self, ctx: BuildContext) -> HostStep | None:
        """What computes a decode step on a CPU, where its bits are those of the layers. Ops that somebody chose run one
        by one."""
        if set(ctx.kernels.overrides) - {"decode_step"}:
            return None
        ctx.bind("decode_step")
        bound = ctx.bindings.pop("decode_step")
        step = self._prepared_step(ctx, bound, self._seats.num_seats) if bound.traits.batch_invariant else None
        return None if step is None else HostStep(step, self._buffers)

    def _whole_decode_step(self, ctx: BuildContext) -> DecodeStep | None:
        """What computes a small decode step as one op, where there is such for this model."""
        if ctx.dtype is not torch.bfloat16 and "decode_step" not in ctx.kernels.overrides:
            return None  # float32 is chosen to compare with other devices, and on these layers run one by one
        if ctx.kernels.batch_invariant:
            return None  # it sums in another order than the layers do, which compute the steps that do more than decode
        ctx.bind("decode_step")
        bound = ctx.bindings.pop("decode_step")
        return self._prepared_step(ctx, bound, DECODE_ROWS_MAX) if bound.traits.graph_safe else None

    def _prepared_step(self, ctx: BuildContext, bound: BoundKernel, max_rows: int) -> DecodeStep | None:
        prepare: Prepare = bound.call
        if not isinstance(self._model, Decoder):
            return None
        dense = self._model.dense(self._buffers.kv_layers)
        step = dense if isinstance(dense, str) else prepare(dense, max_rows)
        if isinstance(step, str | Reason):
            _log.info("small decode steps run layer by layer: %s", step if isinstance(step, str) else step.text)
            return None
        ctx.bindings["decode_step"] = bound
        return step

    def _on_thread(self, act: Callable[[], None]) -> None:
        """Act where steps are launched. Raises what it raises."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                act()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - who waits for it gets it
                future.set_exception(error)

        self._jobs.put(run)
        future.result()

    def _warm_up(self, progress: ProgressFn | None) -> float:
        """A prefill and a decode on the null page, so that the first request pays for no lazy set-up, and the prefill
        once more for its time: seconds a token."""
        took_s, steps = 0.0, self._small_steps()
        for done, (plan, seatings) in enumerate(steps):
            started = time.monotonic()
            result = self.launch(plan, seatings).wait().result
            if result.row_faults.any():
                raise CheckpointError("the model's weights give logits that are not finite; the checkpoint is damaged")
            took_s = time.monotonic() - started
            if progress is not None:
                progress("warmup", done + 1, len(steps), "steps")
        return took_s / len(steps[-1][0].token_ids)


def _unfit_for_capture(ctx: BuildContext) -> list[str]:
    """The ops of a forward pass that cannot be captured."""
    return [name for name in ctx.uncapturable() if name not in _BEHIND_FORWARD]


def _build(
    config: EngineConfig, source: ModelSource, ctx: BuildContext, progress: ProgressFn | None
) -> tuple[CausalLM | ScriptedModel, str, WeightsSize, PackedCache]:
    """The loaded model, its type, its size and what may keep its packed matrices. Settles what pages keep, in which the
    weights have a say."""
    device = torch.device(ctx.device)
    if source.script is not None:
        ctx.kv_dtype = placement.resolve_kv_dtype(config.cache, device, ctx.dtype)
        return ScriptedModel(source.config, source.script.step_s), "scripted", WeightsSize(0, 0), PackedCache()
    family = resolve(source.config)
    weights = source.weights()
    try:
        keeps_packed = placement.keeps_packed(config.model.weights, device) and has_blocks(weights)
        ctx.kv_dtype = placement.resolve_kv_dtype(config.cache, device, ctx.dtype, is_packed=keeps_packed)
        model = family.build(source.config, ctx)
        packing = plan_packing(model, weights, ctx) if keeps_packed else NOTHING_PACKED
        require_memory(model, source.path, device, packing)
        packed_cache = PackedCache.of(config.model, source.file, packing, ctx)
        load_weights(model, weights, source.path, progress, packing, packed_before=packed_cache.find())
        packed_cache.collect()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(f"{source.path}: out of memory while loading the weights") from error
    finally:
        weights.close()
    return model, family.model_type, WeightsSize.of(model, packing), packed_cache


def _binding(kernel: BoundKernel) -> KernelBinding:
    return KernelBinding(kernel.op, kernel.solution, kernel.passed_over)


def _warm_seating(prompt: Int32Array) -> Seating:
    return Seating(0, "warm-up", SamplingParams(temperature=0.0, seed=0), (), prompt, len(prompt))


def _plain_plan(step_id: int, kind: RowKind, token_ids: Int32Array, *, seated: bool) -> StepPlan:
    """A plan of one row in seat 0 with an empty page table."""
    rows = np.array([[0, kind, 0, max(1, len(token_ids)), 0]], dtype=np.int32)
    seats = np.zeros((1 if seated else 0, 3), dtype=np.int32)
    nothing = [np.zeros((0, width), dtype=np.int32) for width in (4, 2, 3, 4, 4)]
    return StepPlan(step_id, rows, token_ids, seats, *nothing)


def _copy(plan: StepPlan) -> StepPlan:
    """Nothing of the planner's memory: a view of it would keep the planner alive. Most arrays are empty."""
    arrays = [getattr(plan, name) for name in _PLAN_ARRAYS]
    return StepPlan(plan.step_id, *[array.copy() if len(array) else _empty(array.shape) for array in arrays])


@functools.cache
def _empty(shape: tuple[int, ...]) -> Int32Array:
    """The same for all plans."""
    array = np.zeros(shape, dtype=np.int32)
    array.flags.writeable = False
    return array


def _mesh(config: EngineConfig, communicator: Communicator | None) -> Mesh:
    """The mesh that the configuration asks for."""
    parallel = config.parallel
    mesh = Mesh.of(
        GroupSizes.of(parallel.tp, attention_dp=parallel.dp_attention, ep=parallel.ep, moe_tp=parallel.moe_tp)
    )
    num_ranks = 1 if communicator is None else communicator.world_size
    assert mesh.num_ranks == num_ranks, f"{num_ranks} ranks for {mesh}"
    return mesh


def _min_over_ranks(communicator: Communicator | None) -> Callable[[int], int]:
    return lambda number: number if communicator is None else min(map(int, communicator.gather(str(number))))
