"""The compiled core: one extension module per concept, with no slow fallback beside it.

Importing this package imports none of them. In a source tree, where the ``.pyx`` files lie
beside it, it first looks whether each has been compiled for this interpreter, because
``No module named 'persia._core.store.store'`` does not say what to do. An installed
package carries no ``.pyx`` and skips the look.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from sys import implementation


def _check_built(directory: Path) -> None:
    """Raise ImportError unless every ``.pyx`` in ``directory`` has its extension beside it."""
    missing = sorted(
        source.stem
        for source in directory.rglob("*.pyx")
        if not any(source.with_suffix(suffix).exists() for suffix in EXTENSION_SUFFIXES)
    )
    if missing:
        raise ImportError(
            f"persia._core is not compiled for {implementation.cache_tag}: "
            f"no extension for {', '.join(missing)} in {directory}. "
            "Run `make build` or `pip install -e .` in the checkout that holds it. "
            "(To use an installed persia instead, start Python outside the checkout.)"
        )


_check_built(Path(__file__).parent)
