"""The examples as modules; they are scripts, and import their neighbours by plain names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(example: str) -> Any:
    """Return the module ``train.py`` of an example."""
    name = f"{example}_train"
    if name not in sys.modules:
        path = EXAMPLES / example / "train.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[name]


def run_quickstart(train: Any, rows_of: Callable[[Any], Any], **options: Any) -> Any:
    """Run the quickstart; returns its report, and what ``rows_of`` says of its context."""
    chosen = train.Options(quiet=True, **options)
    log = train.generate(chosen.samples, chosen.seed)
    with train.build_ctx(chosen) as ctx:
        return train.run(ctx, log, chosen), rows_of(ctx)
