from typing import final

from typing_extensions import Self

VERSION: int
PREFIX: str
SYMBOL: str

def is_native(name: str) -> bool: ...
def loaded() -> tuple[str, ...]: ...
def kernels_of(name: str) -> dict[str, dict[str, float]]: ...
def load(path: str, name: str) -> None: ...
def try_out(name: str) -> None: ...

@final
class NativeLibrary:
    name: str
    params: dict[str, float]
    initializer_params: dict[str, float]
    def __new__(cls, name: str) -> Self: ...
