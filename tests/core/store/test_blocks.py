from __future__ import annotations

import numpy as np

from tests.core.stores import block_with


def test_a_block_counts_its_rows_and_bytes() -> None:
    values, states = np.zeros((3, 5), np.uint16), np.zeros((3, 2), np.uint32)
    block = block_with(dtype="bfloat16", values=values, states=states)
    assert len(block) == 3
    assert (block.dim, block.state_words) == (5, 2)
    assert block.num_bytes == 3 * (8 + 10 + 8 + 8 + 4 + 8)
