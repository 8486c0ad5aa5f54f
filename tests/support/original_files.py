"""A writer of the checkpoints that the original PERSIA's servers wrote.

Nodes stand in any order in a file; their links are the order of use. Numbers are little-endian,
lengths of vectors u32, and there is no header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MARKER = "embedding_dump_done"


@dataclass
class OldRow:
    """One entry: its values, and behind them what the optimizer keeps."""

    sign: int
    values: np.ndarray
    state: np.ndarray

    def entry(self) -> bytes:
        inner = np.concatenate([self.values, self.state]).astype("<f4")
        head = struct.pack("<I", len(inner))
        return head + inner.tobytes() + struct.pack("<QQ", len(self.values), self.sign)


def shard_file(rows: Sequence[OldRow], num_nodes: int, seed: int = 0) -> bytes:
    """The bytes of one shard: ``rows`` from the oldest to the newest, in places at random."""
    places = np.random.default_rng(seed).permutation(num_nodes)[: len(rows)].tolist()
    node_of = {place: number for number, place in enumerate(places)}
    numbers = [place + 1 for place in places]  # from 1 on; 0 is none
    links = [0, *numbers, 0]
    nodes = []
    for place in range(num_nodes):
        if place in node_of:
            at = node_of[place]
            nodes.append(struct.pack("<IIB", links[at + 2], links[at], 1) + rows[at].entry())
        else:
            nodes.append(struct.pack("<IIB", 0, 0, 0))
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    head = struct.pack("<QIIIII", len(rows), first, last, 0, num_nodes, num_nodes)
    return head + b"".join(nodes)


def write_dump(folder: Path, servers: Sequence[Sequence[Sequence[OldRow]]]) -> None:
    """Write a dump of these rows, by server and shard of it."""
    text = (
        f"num_shards: {len(servers)}\nnum_internal_shards: {len(servers[0])}\n"
        "datetime:\n  secs_since_epoch: 1640000000\n  nanos_since_epoch: 0\n"
    )
    for server, shards in enumerate(servers):
        own = folder / f"s{server}"
        own.mkdir(parents=True)
        for number, rows in enumerate(shards):
            content = shard_file(rows, len(rows) + 3, seed=server * 100 + number)
            (own / f"replica_{server}_shard_{number}.emb").write_bytes(content)
        (own / MARKER).write_text(text)
    (folder / MARKER).write_text(text)
