"""Which instruction-set variant of the kernels runs.

Every kernel exists once per level; the processor and its operating system are asked once, at
import, and the highest level they allow is taken. ``select`` forces another one, for tests and
for ``PERSIA_ISA``. All levels give the same bytes, so a change in mid-training is harmless.
"""

from persia.errors import ConfigError

cdef extern from "kernels.h" nogil:
    int persia_best_level() noexcept

NAMES = ("baseline", "avx2", "avx512")

cdef int best_level = persia_best_level()
cdef int level = best_level     # written by select() only; a plain word, read without a lock


cdef int isa_level() noexcept nogil:
    return level


def available():
    """Names of the levels that can run here, lowest first."""
    return NAMES[:best_level + 1]


def selected():
    """Name of the level that runs now."""
    return NAMES[level]


def select(name):
    """Run the kernels of level ``name`` from the next call on.

    Args:
        name: One of ``available()``; None takes the highest.

    Raises:
        ConfigError: If ``name`` is not available here; the level stays as it was.
    """
    # All levels give the same bytes, so a call that is under way may see either.
    global level
    if name is None:
        level = best_level
        return
    if name not in available():
        raise ConfigError(
            f"instruction set: expected one of {', '.join(available())}, got {name!r}"
        )
    level = NAMES.index(name)
