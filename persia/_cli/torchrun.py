"""torchrun without a traceback of its own after that of the script.

    python -m persia._cli.torchrun --standalone --nproc-per-node=2 -m module ...

is ``python -m torch.distributed.run`` with the same arguments. Each rank that failed is one
line; ranks ended by a signal are none.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run torchrun, and exit as its ranks did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
    except ChildFailedError as failed:
        for rank, failure in failed.failures.items():
            how = f"exit code {failure.exitcode}"
            print(f"rank {rank} (process {failure.pid}) ended with {how}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
