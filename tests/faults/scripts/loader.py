"""Sends the first batches of the job: loader.py COUNT [LARGE SIZE GATE | --ends NUMBER...].

With a gate there are two data-loaders, and batch LARGE has SIZE samples. Loader 1 begins when
loader 0 has sent two batches, that is, with one credit and in order, when it has none. Before
each batch whose number is an end, an epoch ends.
"""

import logging
import sys
from pathlib import Path

from persia import env
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    ends = [int(end) for end in sys.argv[3:]] if sys.argv[2:3] == ["--ends"] else []
    count, *sizes = map(int, sys.argv[1 : 2 if ends else 4])
    gate = Path(sys.argv[4]) if sizes else None  # a pipe: opening an end waits for the other
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        if gate is not None and index == 1:
            gate.read_bytes()
        for place, number in enumerate(range(index, count, size)):
            if gate is not None and index == 0 and place == 2:
                gate.write_bytes(b"x")
            if number in ends:
                ctx.end_epoch()
            ctx.send_data(make_batch(number, sizes[1] if number in sizes[:1] else 16))
    print(dict(ctx.stats()), flush=True)
