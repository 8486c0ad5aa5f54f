"""Send the training lines of a log in Criteo's layout to the trainer.

    python examples/criteo/data_loader.py

Finds the servers by PERSIA_EMBEDDING_WORKERS and PERSIA_NN_WORKERS. Of REPLICA_SIZE
data-loaders each reads its own part of the files. In embedded mode train.py starts this script
by itself. A run that continues from a checkpoint begins where that one was.
"""

from __future__ import annotations

from criteo_log import BATCH_SIZE, folder

from persia.ctx import DataCtx
from persia.readers import CriteoReader
from persia.utils import ArgumentParser


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "persia-launcher data-loader data_loader.py")
    parser.parse_args(argv)
    reader = CriteoReader(folder() / "train", BATCH_SIZE)
    with DataCtx() as ctx:
        reader.send(ctx)


if __name__ == "__main__":
    main()
