from __future__ import annotations

import numpy as np

from persia._core.store.blocks import RowBlock


def test_a_block_counts_its_rows_and_bytes() -> None:
    block = RowBlock(
        policy=0,
        dtype="bfloat16",
        signs=np.arange(3, dtype=np.uint64),
        values=np.zeros((3, 5), np.uint16),
        states=np.zeros((3, 2), np.uint32),
        orders=np.zeros(3, np.uint64),
        uses=np.zeros(3, np.uint32),
        ages=np.zeros(3, np.uint64),
    )
    assert len(block) == 3
    assert (block.dim, block.state_words) == (5, 2)
    assert block.num_bytes == 3 * (8 + 10 + 8 + 8 + 4 + 8)
