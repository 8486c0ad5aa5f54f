"""Two ranks of a script, forked from a process that has loaded torch: forked.py SCRIPT OUTPUT.

Torch takes seconds to load, and torchrun would load it three times.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import torch.distributed  # noqa: F401  # once, for all
from torch._C._distributed_c10d import TCPStore

NUM_RANKS = 2
HOST = "127.0.0.1"


def meet(rank: int, port: str) -> None:
    """Have ``init_process_group`` find the store of the parent, as torchrun does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def main() -> int:
    _, script, *arguments = sys.argv
    children = {}
    # First of all, while there are no threads: the store has one.
    for rank in range(NUM_RANKS):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writes)
            meet(rank, os.read(reads, 16).decode())
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
        os.close(reads)
        children[pid] = writes
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    for writes in children.values():
        os.write(writes, str(store.port).encode())
        os.close(writes)
    failed = 0
    while children:
        pid, status = os.wait()
        del children[pid]
        if status:
            failed = 1
            for other in children:  # it may wait for that one, for half an hour
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
