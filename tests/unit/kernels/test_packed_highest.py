# SPDX-License-Identifier: Apache-2.0
"""The highest output of each row, of a weight in planes: the one that the whole product would say, whatever was read of
the plane of lower bits; and the planes say the same numbers as the blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tokenspeed.kernels.ops.packed_linear import PackedMatrix, Piece
from tokenspeed.kernels.ops.packed_linear.cases import drawn
from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import KernelContext, Ok, bind

pytestmark = [
    pytest.mark.skipif(
        compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled CPU kernels are not built"
    ),
    pytest.mark.usefixtures("cpu_isa", "poisoned_memory"),
]
FORMATS = ("q8_0", "q6_k")
SCALES_AT = {"q8_0": 0, "q6_k": 208}


def matrix_of(piece: Piece, dtype: torch.dtype = torch.float32, *, is_head: bool = True) -> PackedMatrix:
    ctx = KernelContext("cpu", dtype, overrides={"packed_linear": "cpu"})
    return bind("packed_linear", ctx).call([piece], is_head=is_head)  # type: ignore[no-any-return]


@dataclasses.dataclass
class Finder:
    """A weight in planes; num_whole goes from call to call."""

    matrix: PackedMatrix
    num_whole: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def __call__(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and faults."""
        assert self.matrix.in_planes
        assert self.matrix.cpu_pieces_P3 is not None
        ids_T, is_faulty_T = torch.full((len(x_TD),), -7), torch.zeros(len(x_TD), dtype=torch.bool)
        require_cpu_module().packed_highest(
            x_TD.data_ptr(),
            self.matrix.cpu_pieces_P3.data_ptr(),
            ids_T.data_ptr(),
            is_faulty_T.data_ptr(),
            self.num_whole.ctypes.data,
            *x_TD.shape,
            x_TD.stride(0),
            CPU_DTYPES[x_TD.dtype],
        )
        return ids_T, is_faulty_T

    def agrees(self, x_TD: torch.Tensor) -> None:
        """With the whole product."""
        y_TN = self.matrix(x_TD, None, torch.float32)
        ids_T, is_faulty_T = self(x_TD)
        expected_faulty_T = (y_TN.isnan() | (y_TN == torch.inf)).any(1) | (y_TN == -torch.inf).all(1)
        assert is_faulty_T.tolist() == expected_faulty_T.tolist()
        expected_T = torch.from_numpy(np.argmax(y_TN.numpy(), axis=1))
        assert ids_T[~is_faulty_T].tolist() == expected_T[~is_faulty_T].tolist()


def heavy(num_rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Activations of which a few are many times the others."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_t(1.5, (num_rows, num_inputs)).astype(np.float32))


def with_rows(piece: Piece, blocks_NB: torch.Tensor) -> Piece:
    return dataclasses.replace(piece, blocks_NB=blocks_NB.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_planes_say_what_blocks_say(format_name: str, dtype: torch.dtype) -> None:
    piece = drawn(format_name, 29, 768)
    planes, blocks = (matrix_of(piece, dtype, is_head=is_head) for is_head in (True, False))
    assert (planes.in_planes, blocks.in_planes) == (True, False)
    for num_rows in (1, 3, 4, 9, 140):
        x_TD = heavy(num_rows, 768).to(dtype)
        assert torch.equal(planes(x_TD, None), blocks(x_TD, None))
    ids_T = torch.tensor([28, 0, 7, 8, 8])
    assert torch.equal(planes.rows(ids_T), blocks.rows(ids_T))


@pytest.mark.parametrize("format_name", FORMATS)
def test_planes_take_a_byte_more_for_each_row(format_name: str) -> None:
    planes, blocks = (matrix_of(drawn(format_name, 256, 256), is_head=is_head) for is_head in (True, False))
    assert planes.num_bytes == blocks.num_bytes + 256


@pytest.mark.parametrize("others", [("q8_0", "q8_0"), ("q4_k",)], ids=str)
def test_what_has_no_planes_stays_in_blocks(others: tuple[str, ...]) -> None:
    ctx = KernelContext("cpu", torch.float32, overrides={"packed_linear": "cpu"})
    pieces = [drawn(name, 9, 256, seed) for seed, name in enumerate(others)]
    assert not bind("packed_linear", ctx).call(pieces, is_head=True).in_planes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("num_outputs", [1, 7, 8, 17, 1000, 4099])
def test_it_is_the_one_that_the_product_says(num_outputs: int, format_name: str, dtype: torch.dtype) -> None:
    finder = Finder(matrix_of(drawn(format_name, num_outputs, 512, seed=num_outputs), dtype))
    for num_rows, num_whole in ((1, 0), (1, 3), (2, -5), (3, 1), (4, 1000), (5, 0), (9, 16)):
        finder.num_whole[0] = num_whole
        finder.agrees(heavy(num_rows, 512, seed=num_rows).to(dtype))
        finder.agrees(torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(num_rows)).to(dtype))


@pytest.mark.parametrize("num_whole", [0, 2])
@pytest.mark.parametrize("format_name", FORMATS)
def test_rows_that_only_lower_bits_tell_apart(format_name: str, num_whole: int) -> None:
    """All have the upper bits of one row, and random lower ones: near ties everywhere, which no bound may cut short."""
    rng = np.random.default_rng(5)
    piece = drawn(format_name, 1, 256)
    blocks = piece.blocks_NB.numpy().repeat(700, axis=0)
    kept = [slice(0, 2)] if format_name == "q8_0" else [slice(128, 210)]  # scales, and upper bits
    lower_bits = 15 if format_name == "q8_0" else 51  # of Q6_K two of the four that a byte of `ql` has of each code
    num_bytes = 34 if format_name == "q8_0" else 210
    noise = rng.integers(0, 256, blocks.shape, np.uint8) & np.uint8(lower_bits)
    noise = noise.reshape(700, -1, num_bytes)
    for each in kept:
        noise[:, :, each] = 0
    finder = Finder(matrix_of(with_rows(piece, torch.from_numpy(blocks ^ noise.reshape(blocks.shape)))))
    for seed in range(40):
        finder.num_whole[0] = num_whole
        finder.agrees(heavy(1, 256, seed))


def q8_0_of(codes_NI: np.ndarray) -> Piece:
    """A weight of codes from -128 on, with scales of one."""
    blocks = np.zeros((len(codes_NI), codes_NI.shape[1] // 32, 34), dtype=np.uint8)
    blocks[:, :, :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    blocks[:, :, 2:] = codes_NI.astype(np.int8).view(np.uint8).reshape(len(codes_NI), -1, 32)
    return Piece("q8_0", torch.from_numpy(blocks.reshape(len(codes_NI), -1)))


def q6_k_of(codes_NI: np.ndarray) -> Piece:
    """A weight of 256 codes from -32 on, with scales of one."""
    blocks = np.zeros((len(codes_NI), 210), dtype=np.uint8)
    blocks[:, 208:] = np.array([1.0], dtype=np.float16).view(np.uint8)
    blocks[:, 192:208] = 1
    for i, codes in enumerate((codes_NI + 32).astype(np.uint8).T):
        half, part, place = i // 128, i % 128 // 32, i % 32
        blocks[:, 64 * half + 32 * (part % 2) + place] |= (codes & 15) << (4 * (part // 2))
        blocks[:, 128 + 32 * half + place] |= (codes >> 4) << (2 * part)
    return Piece("q6_k", torch.from_numpy(blocks))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_no_smaller_than_what_lower_bits_can_do(format_name: str, seed: int) -> None:
    """Lower bits that all go with the activations, or all against them, reach it. One output promises more by 1.9
    bounds, and is less in the end by a little."""
    rng = np.random.default_rng(seed)
    sign_I = rng.choice((-1, 1), 256)
    step, num_lower = (16, 29) if format_name == "q8_0" else (4, 23)  # of 32 inputs, where the other's step is lower
    above_I, below_I = np.where(sign_I > 0, step - 1, 0), np.where(sign_I > 0, 0, step - 1)
    is_lower_I = np.arange(256) % 32 < num_lower
    favourite_I, winner_I = below_I, above_I - step * sign_I * is_lower_I
    assert 0 < int((winner_I - favourite_I) @ sign_I) < step * 256 / 8
    codes_NI = np.tile(-6 * step * sign_I, (300, 1))
    first, second = rng.choice(300, 2, replace=False)
    codes_NI[first], codes_NI[second] = favourite_I, winner_I
    finder = Finder(matrix_of((q8_0_of if format_name == "q8_0" else q6_k_of)(codes_NI)))
    x_TD = torch.from_numpy(sign_I.astype(np.float32))[None]
    finder.agrees(x_TD)
    assert finder(x_TD)[0].tolist() == [second]


@pytest.mark.parametrize("format_name", FORMATS)
def test_of_equal_ones_the_first(format_name: str) -> None:
    piece = drawn(format_name, 90, 256)
    finder = Finder(matrix_of(with_rows(piece, piece.blocks_NB.repeat(5, 1))))
    x_TD = heavy(3, 256)
    finder.agrees(x_TD)
    assert int(finder(x_TD)[0].max()) < 90
    same = Finder(matrix_of(with_rows(piece, piece.blocks_NB[:1].repeat(33, 1))))
    assert same(x_TD)[0].tolist() == [0, 0, 0]
    assert same(torch.zeros(2, 256))[0].tolist() == [0, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_whole", [0, 3])
def test_an_activation_that_is_not_finite_spoils_its_row_alone(value: float, num_whole: int) -> None:
    finder = Finder(matrix_of(drawn("q8_0", 400, 256)))
    for place in (0, 131, 255):
        finder.num_whole[0] = num_whole
        x_TD = heavy(4, 256)
        x_TD[2, place] = value
        assert finder(x_TD)[1].tolist() == [False, False, True, False]
        finder.agrees(x_TD)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 0.0, -0.25])
def test_scales_of_every_kind(scale: float, format_name: str) -> None:
    """One that is not finite is found where it is in one row of many, though its output may be anything."""
    piece = drawn(format_name, 800, 512)
    blocks_NB, at = piece.blocks_NB.clone(), SCALES_AT[format_name]
    blocks_NB[777, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    finder = Finder(matrix_of(with_rows(piece, blocks_NB)))
    for seed in range(5):
        finder.num_whole[0] = seed
        finder.agrees(heavy(2, 512, seed))


def test_numbers_that_overflow() -> None:
    finder = Finder(matrix_of(drawn("q8_0", 300, 256)))
    finder.agrees(torch.tensor([[1e37], [3e38], [-3e38]]) * heavy(3, 256).clamp(-1, 1))


def test_more_blocks_are_read_whole_where_many_outputs_are_left_and_fewer_where_few_are() -> None:
    """Of equal ones all are left; of others none, where one is the favourite."""
    num_blocks = 8
    piece = drawn("q8_0", 1, 32 * num_blocks)
    flat = Finder(matrix_of(with_rows(piece, piece.blocks_NB.repeat(2000, 1))))
    x_TD = torch.randn(1, 32 * num_blocks, generator=torch.Generator().manual_seed(0))
    for _ in range(3 * num_blocks):
        flat.agrees(x_TD)
        assert 0 <= int(flat.num_whole[0]) <= num_blocks
    assert int(flat.num_whole[0]) == num_blocks
    codes = torch.zeros(2000, num_blocks, 34, dtype=torch.uint8)
    codes[:, :, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    codes[1234, :, 2:] = 100
    peaked = Finder(matrix_of(Piece("q8_0", codes.view(2000, -1))), flat.num_whole)
    for _ in range(num_blocks):
        peaked.agrees(torch.ones(1, 32 * num_blocks))
    assert int(peaked.num_whole[0]) == 0
