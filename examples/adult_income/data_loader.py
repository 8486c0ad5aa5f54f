"""Send the training batches of UCI Adult to the trainer, in the order of the file.

    python examples/adult_income/data_loader.py

Finds the servers by PERSIA_EMBEDDING_WORKERS and PERSIA_NN_WORKERS. Of REPLICA_SIZE
data-loaders the one with REPLICA_INDEX sends every REPLICA_SIZE-th batch, so that they arrive
in the order of the file together. In embedded mode train.py starts this script by itself.
"""

from __future__ import annotations

from batches import batches
from prepare_data import load

from persia import env
from persia.ctx import DataCtx
from persia.utils import ArgumentParser


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "persia-launcher data-loader data_loader.py")
    parser.parse_args(argv)
    train_data, _ = load()
    index, size = env.get_replica_index() or 0, env.get_replica_size() or 1
    with DataCtx() as ctx:
        for batch in batches(train_data, requires_grad=True, index=index, size=size):
            ctx.send_data(batch)


if __name__ == "__main__":
    main()
