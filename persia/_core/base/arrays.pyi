import numpy as np
from numpy.typing import NDArray

def empty_floats(*shape: int) -> NDArray[np.float32]: ...
