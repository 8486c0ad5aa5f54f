from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class Split:
    """A request's signs by shard."""

@final
class Request:
    """One request: its arguments, and its signs in shard order."""

def kept_numbers(count: int) -> NDArray[np.uint32]:
    """Return room for the row numbers of a lookup that keeps its split beside them.

    An update with this very array, and with the very array of signs that was looked up, does
    not split them again; that one must not have been written to.
    """
