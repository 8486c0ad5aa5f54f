"""Models of persia.nn over the servers that the environment names, step by step beside torch's.

Usage: alike.py OPTIMIZER eager|compiled. Each case has tables of its own; its name is printed
when its losses and rows were equal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.support.twins import OF_MODES, OF_WAYS, train_alike, twins


def main() -> None:
    optimizer, kind = sys.argv[1:]
    cases = OF_WAYS if kind == "compiled" else OF_WAYS | OF_MODES
    for case, options in cases.items():
        way = case.partition("-")[0]
        both = twins(optimizer, prefix=f"{case}.", **options)
        compiled: Any = None
        if kind == "compiled":
            compiled = torch.compile(both.ours, backend="aot_eager", fullgraph=True)
        train_alike(both, way, compiled=compiled)
        print(case, flush=True)


if __name__ == "__main__":
    main()
