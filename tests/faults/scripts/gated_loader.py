"""One of two data-loaders, the second of which waits: gated_loader.py COUNT LARGE SIZE GATE.

Batch LARGE has SIZE samples. Loader 1 begins when loader 0 has sent two batches, that is, with
one credit and in order, when it has none.
"""

import logging
import sys
from pathlib import Path

from persia import env
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    count, large, size = map(int, sys.argv[1:4])
    gate = Path(sys.argv[4])  # a pipe: opening an end waits for the other
    index = env.get_replica_index() or 0
    with DataCtx() as ctx:
        if index == 1:
            gate.read_bytes()
        for place, number in enumerate(range(index, count, 2)):
            if index == 0 and place == 2:
                gate.write_bytes(b"x")
            ctx.send_data(make_batch(number, size if number == large else 16))
