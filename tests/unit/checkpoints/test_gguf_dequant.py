# SPDX-License-Identifier: Apache-2.0
"""Every block reader agrees with the public reference to the bit, on random blocks and across chunk borders."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tokenspeed.checkpoints.gguf import BLOCKS
from tokenspeed.checkpoints.gguf_dequant import dequantize

QUANTISED = [name for name, (block_len, _) in BLOCKS.items() if block_len > 1]

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,)}


def random_blocks(type_name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Random bytes whose float16 scales are finite."""
    raw = np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCKS[type_name][1]), np.uint8)
    for begin in HALVES.get(type_name, (0,)):
        raw[:, begin + 1] &= 0xBF  # clears an exponent bit: no infinity, no NaN
    return raw


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("num_elements", [256, 256 * 5, 256 * 1537])
def test_equal_to_the_reference(type_name: str, num_elements: int) -> None:
    num_blocks = num_elements // BLOCKS[type_name][0]
    raw = random_blocks(type_name, num_blocks, seed=num_elements)
    out = np.full(num_elements, np.nan, np.float32)
    dequantize(type_name, raw.reshape(-1), out)
    expected = quants.dequantize(raw, GGMLQuantizationType[type_name]).reshape(-1)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_a_wrong_size_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no whole Q8_0 blocks"):
        dequantize("Q8_0", np.zeros(35, np.uint8), np.zeros(32, np.float32))
    with pytest.raises(AssertionError, match="do not fill"):
        dequantize("Q8_0", np.zeros(34, np.uint8), np.zeros(64, np.float32))
