"""Sends the batches of the benchmark."""

from persia.ctx import DataCtx
from tests.benchmarks.local.dlrm import parse, raw_batches

if __name__ == "__main__":
    raws = raw_batches(parse().quick)
    with DataCtx() as ctx:
        for raw in raws:
            ctx.send_data(raw.batch())
