"""One rank that trains each of some Parquet files in a pass, and says how many steps it made.

Usage: one_file.py FILE...
"""

from __future__ import annotations

import sys

from persia.data import DataLoader
from persia.readers import Columns, ParquetReader
from tests.faults.job import make_ctx, step

if __name__ == "__main__":
    columns = Columns(["user", "item"], labels=["click"])
    with make_ctx() as ctx:
        for path in sys.argv[1:]:
            reader = ParquetReader(path, columns, 8, shuffle_seed=1)
            count = len([step(ctx, batch) for batch in DataLoader(reader)])
            # In one write, or the lines of two ranks may be mixed.
            sys.stdout.write(f"rank {ctx.rank_id} made {count} steps\n")
            sys.stdout.flush()
