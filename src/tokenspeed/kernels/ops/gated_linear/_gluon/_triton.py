# SPDX-License-Identifier: Apache-2.0
"""Device code of gated_linear for Hopper, in Gluon: one warpgroup brings tiles, others multiply. Knows no launches.

M: rows of x, N: outputs (F of them), K: inputs. A tile is PARTS * PART_M rows by TILE_N outputs; each consumer has
PART_M of its rows, and both the gate and the up of its outputs in one accumulator, so that they meet in a thread. A
step takes STEP_K inputs. A program takes tile after tile; tiles of the next are on their way while one ends.

Why no wait is for ever. Producer and consumers go through the same tiles (`_tile`, from the same numbers) and the same
NUM_STEPS of each, and count steps in `done`. Step s uses slot s % STAGES for the (s // STAGES)-th time, and that
number's lowest bit is the phase: `full` completes it once, by the bytes that are told to it and then come; `empty`
completes it once, by one arrival of each consumer, after its product of the step has read the slot. The producer waits
for the phase before its own (at first use: the one before all, which is complete), consumers for their own. So the
least step that anybody waits for can always go on. Of two phases a wait can tell them apart, since neither side is
ever more than STAGES steps ahead.

With SKEW, the other consumers wait at each tile until the first has done SKEW steps of it (`turn`, a phase a tile), so
that tensor cores have work while one ends a tile. It can do them: SKEW < STAGES, and the slots of its steps are free.
It is never two tiles ahead: a tile has at least STAGES steps, of which the others have given none back.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait

PARTS = gl.constexpr(2)
PART_M = gl.constexpr(64)
TILE_N = gl.constexpr(128)
STEP_K = gl.constexpr(64)


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    """So many barriers, each for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(num):
        mbarrier.init(barriers.index(place), count=count)
    return barriers


@gluon.jit
def _tile(tile, num_m, NUM_N: gl.constexpr, GROUP: gl.constexpr):
    """(Row, column) of a tile, in tiles: GROUP rows of them column by column, then the next rows, so that what programs
    read at a time stays in the cache."""
    group = tile // (GROUP * NUM_N)
    inside = tile % (GROUP * NUM_N)
    height = gl.minimum(num_m - group * GROUP, GROUP)
    return group * GROUP + inside % height, inside // height


@gluon.jit
def _bring(
    x, weight, boxes, barriers, num_m,
    NUM_N: gl.constexpr, NUM_STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer. Rows past the last come as zeros."""
    x_boxes, w_boxes = boxes
    full, empty, _turn = barriers
    num_bytes: gl.constexpr = (PARTS * PART_M + 2 * TILE_N) * STEP_K * x_boxes.dtype.primitive_bitwidth // 8
    done = 0
    for tile in range(gl.program_id(0), num_m * NUM_N, gl.num_programs(0)):
        m, n = _tile(tile, num_m, NUM_N, GROUP)
        for step in range(NUM_STEPS):
            stage = (done + step) % STAGES
            k = step * STEP_K
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES & 1) ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, num_bytes)
            for part in gl.static_range(PARTS):
                row = (m * PARTS + part) * PART_M
                tma.async_copy_global_to_shared(x, [row, k], barrier, x_boxes.index(stage * PARTS + part))
            for half in gl.static_range(2):
                row = (half * NUM_N + n) * TILE_N
                tma.async_copy_global_to_shared(weight, [row, k], barrier, w_boxes.index(2 * stage + half))
        done += NUM_STEPS


@gluon.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)) in two operations of the unit that is short. exp gives infinity or 0 where it must."""
    asm: gl.constexpr = """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
    }"""
    return gl.inline_asm_elementwise(asm, "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _gated(gate_MN, up_MN, GELU: gl.constexpr):
    """silu(gate) * up, or gelu(gate) * up by tanh: 1 + tanh(z) = 2 sigmoid(2 z)."""
    z_MN = gate_MN
    if GELU:
        z_MN = 1.5957691216057308 * (gate_MN + 0.044715 * gate_MN * gate_MN * gate_MN)
    return gate_MN * _sigmoid(z_MN) * up_MN


@gluon.jit
def _finish(
    acc, out, bias, out_smem, row, n,
    NUM_N: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A consumer's part of a tile, from its accumulator to memory. Rows past the last are not written."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_N, 16])
    gate_MN, up_MN = gl.split(gl.permute(gl.reshape(acc, [PART_M, 2, TILE_N]), (0, 2, 1)))
    gate_MN = gl.convert_layout(gate_MN, half, assert_trivial=True)
    up_MN = gl.convert_layout(up_MN, half, assert_trivial=True)
    if HAS_BIAS:
        outputs_N = n * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, half))
        gate_MN += gl.load(bias + outputs_N).to(gl.float32)[None, :]
        up_MN += gl.load(bias + NUM_N * TILE_N + outputs_N).to(gl.float32)[None, :]
    y_MN = _gated(gate_MN, up_MN, GELU).to(out.dtype)
    tma.store_wait(0)  # until the last one has been read
    out_smem.store(y_MN)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, n * TILE_N], out_smem)


@gluon.jit
def _multiply(
    part, shared,
    NUM_N: gl.constexpr, NUM_STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SKEW: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A consumer: its rows of each tile. A step's slot is given back once the product after it is on its way."""
    out, bias, smem, barriers, num_m = shared
    x_smem, w_smem, out_room = smem
    full, empty, turn = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * TILE_N, 16])
    done = 0
    count = 0
    for tile in range(gl.program_id(0), num_m * NUM_N, gl.num_programs(0)):
        m, n = _tile(tile, num_m, NUM_N, GROUP)
        acc = gl.zeros([PART_M, 2 * TILE_N], gl.float32, layout)
        if SKEW > 0 and part > 0:
            mbarrier.wait(turn, count & 1)
        for step in range(NUM_STEPS):
            stage = (done + step) % STAGES
            mbarrier.wait(full.index(stage), (done + step) // STAGES & 1)
            x_MK, w_NK = x_smem.index(stage * PARTS + part), w_smem.index(stage)
            acc = mma(x_MK, w_NK.permute((1, 0)), acc, is_async=True)
            acc = mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((done + step + STAGES - 1) % STAGES), pred=step > 0)
            if SKEW > 0 and part == 0:
                mbarrier.arrive(turn, pred=step == SKEW)
        done += NUM_STEPS
        count += 1
        acc = mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((done - 1) % STAGES))
        row = (m * PARTS + part) * PART_M
        _finish(acc, out, bias, out_room.index(part), row, n, NUM_N, HAS_BIAS, GELU)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def product(
    x, weight, bias, out, num_rows,
    NUM_N: gl.constexpr, NUM_STEPS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SKEW: gl.constexpr, HAS_BIAS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """x, weight, out: descriptors of (T, D) by PART_M x STEP_K, (2 F, D) by TILE_N x STEP_K and (T, F) by PART_M x
    TILE_N. NUM_N: F in tiles, NUM_STEPS: D in steps."""
    dtype: gl.constexpr = x.dtype
    x_boxes = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART_M, STEP_K], x.layout)
    w_boxes = gl.allocate_shared_memory(dtype, [2 * STAGES, TILE_N, STEP_K], weight.layout)
    w_smem = w_boxes._reinterpret(dtype, [STAGES, 2 * TILE_N, STEP_K], weight.layout)
    out_room = gl.allocate_shared_memory(dtype, [PARTS, PART_M, TILE_N], out.layout)
    barriers = (_barriers(STAGES, 1), _barriers(STAGES, PARTS), _barriers(1, 1).index(0))
    fence_async_shared()
    num_m = (num_rows + PARTS * PART_M - 1) // (PARTS * PART_M)
    boxes = (x_boxes, w_boxes)
    shared = (out, bias, (x_boxes, w_smem, out_room), barriers, num_m)
    gl.warp_specialize(
        [
            (_bring, (x, weight, boxes, barriers, num_m, NUM_N, NUM_STEPS, GROUP, STAGES)),
            (_multiply, (0, shared, NUM_N, NUM_STEPS, GROUP, STAGES, SKEW, HAS_BIAS, GELU)),
            (_multiply, (1, shared, NUM_N, NUM_STEPS, GROUP, STAGES, SKEW, HAS_BIAS, GELU)),
        ],
        [4, 4],
        [240, 240],
    )
