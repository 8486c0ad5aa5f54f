"""What ``python -m persia.cpp_extension check`` looks at: whether kernels do what they promise.

Each check returns a line about what was seen, or raises an ExtensionError.
"""

from __future__ import annotations

import functools
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._build import kernel_library, toolchain
from persia._core.kernels import native
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import OPTIONS, RowOptimizer
from persia.errors import ConfigError, ExtensionError

Floats = NDArray[np.float32]
# Values [dim], state [words], gradient [dim], lr, step, parameters -> values and state.
Model = Callable[..., tuple[Floats, Floats]]

_DIMS = (*range(1, 71), 96, 128, 256, 1000)
_NUM_ROWS = 70  # three calls of a kernel, the last with a few rows
_NUM_STEPS = 4
_NUM_THREADS = 4
_DEADLINE_S = 600.0  # of what is run beside, or by threads
_SEEDS_AND_SIGNS = ((0, 0), (0, 1), (7, 1 << 50), (2**64 - 1, 2**64 - 1))
_PAIRS = 31
_LR = 0.05


@dataclass(frozen=True, slots=True)
class TriedRows:
    """Rows as servers hold them, f32 [n, dim + words], and the gradients of some steps."""

    rows: Floats
    gradients: list[Floats]

    @staticmethod
    def of(optimizer: RowOptimizer, dim: int, count: int = _NUM_ROWS) -> TriedRows:
        """Draw rows that were never stepped, the same ones for a dim."""
        random = np.random.default_rng(dim)
        state = optimizer.new_state(dim).view(np.float32)
        values = random.standard_normal((count, dim), dtype=np.float32)
        rows = np.concatenate([values, np.tile(state, (count, 1))], axis=1)
        steps = [
            random.standard_normal((count, dim), dtype=np.float32) for _ in range(_NUM_STEPS)
        ]
        return TriedRows(rows, steps)

    def stepped(self, optimizer: RowOptimizer) -> Floats:
        """Return the rows after all steps."""
        rows: Floats = self.rows.copy()
        for number, gradients in enumerate(self.gradients):
            optimizer.step_rows(rows, gradients, number=number)
        return rows


def check(
    sources: list[Path],
    name: str,
    model: Path | None,
    tolerance: float,
    params: Mapping[str, float],
) -> Iterator[str]:
    """Yield a line for each check that was passed.

    Args:
        sources: The kernel's.
        name: Of the library.
        model: A Python file with ``step`` or ``fill``; None checks nothing against it.
        tolerance: Largest difference from the model, as a part of the value or of 1.
        params: Parameters, if not the defaults.

    Raises:
        ExtensionError: At the first check that is not passed.
        ConfigError: If the model's file has no such function, or no kernel such a parameter.
    """
    library = kernel_library.compile_kernels(sources, name)
    named = kernel_library.load_file(library, name)
    known = native.kernels_of(named)
    unknown = params.keys() - {param for its in known.values() for param in its}
    given = {
        kernel: {one: x for one, x in params.items() if one in its or one in unknown}
        for kernel, its in known.items()
    }
    yield f"compiled: {library}"
    yield f"named: {named}"
    yield "tried out: it writes nothing beside rows of any dim"
    optimizer = None
    if "optimizer" in known:
        optimizer = RowOptimizer(named, lr=_LR, **given["optimizer"])
        if model is not None:
            yield _against_model(optimizer, model, tolerance)
        yield _alignment(optimizer)
        yield _company(optimizer)
        yield _threads(optimizer)
    if "initializer" in known:
        initializer = Initializer(named, **given["initializer"])
        if model is not None:
            yield _fill_against_model(initializer, model, tolerance)
        yield _same_rows(initializer)
    yield _sanitizers(sources, name)
    if optimizer is not None:
        yield _speed(optimizer)


def _function(path: Path, name: str, arguments: str) -> Callable[..., Any]:
    found = runpy.run_path(str(path)).get(name)
    if not callable(found):
        raise ConfigError(f"{path}: expected a function {name}({arguments})")
    function: Callable[..., Any] = found
    return function


def _fill_against_model(initializer: Initializer, path: Path, tolerance: float) -> str:
    fill = _function(path, "fill", "seed, sign, dim, params")
    largest, same = 0.0, True
    for dim in _DIMS:
        for seed, sign in _SEEDS_AND_SIGNS:
            got = initializer.values(seed, sign, dim)
            want = np.asarray(fill(seed, sign, dim, dict(initializer.options)), np.float32)
            same &= want.tobytes() == got.tobytes()
            error = float((np.abs(want - got) / np.maximum(np.abs(want), 1)).max())
            largest = max(largest, error)
            if not largest <= tolerance:
                raise ExtensionError(
                    f"{initializer.name}: dim {dim}, seed {seed}, sign {sign}: values differ "
                    f"from {path}'s by {error:.3g}, more than {tolerance:g}"
                )
    how = "bit for bit" if same else f"to {largest:.2g}"
    return f"model: initial values of {len(_DIMS)} dims agree with {path}, {how}"


def _same_rows(initializer: Initializer) -> str:
    """Fill rows in another order, and from several threads at a time."""
    signs = np.arange(2000, dtype=np.uint64) << np.uint64(40)

    def filled(some: NDArray[np.uint64]) -> Floats:
        rows = np.empty((len(some), 16), np.float32)
        initializer.fill_rows(1, some, rows)
        return rows

    want = filled(signs)
    found = [filled(signs[::-1].copy())[::-1], *_at_once(lambda: filled(signs))]
    if any(got.tobytes() != want.tobytes() for got in found):
        raise ExtensionError(
            f"{initializer.name}: other initial values in another order, or where several "
            "threads fill rows"
        )
    return (
        f"initial values: the same in another order and from {_NUM_THREADS} threads at a time"
    )


def _against_model(optimizer: RowOptimizer, path: Path, tolerance: float) -> str:
    step: Model = _function(path, "step", "values, state, gradient, ...")
    params = {k: v for k, v in optimizer.options.items() if k not in ("lr", "guard")}
    largest, same = 0.0, True
    for dim in _DIMS:
        given = TriedRows.of(optimizer, dim, 5)
        got = given.stepped(optimizer)
        for row in range(5):
            values, state = np.split(given.rows[row].copy(), [dim])
            for number, gradients in enumerate(given.gradients):
                values, state = step(values, state, gradients[row], _LR, number, params)
            want = np.concatenate([values, state]).astype(np.float32)
            same &= bool((want.view(np.uint32) == got[row].view(np.uint32)).all())
            error = np.abs(want[:dim] - got[row, :dim]) / np.maximum(np.abs(want[:dim]), 1)
            largest = max(largest, float(error.max()))
            if not largest <= tolerance:
                raise ExtensionError(
                    f"{optimizer.name}: dim {dim}: values differ from {path}'s by "
                    f"{float(error.max()):.3g}, more than {tolerance:g}"
                )
    how = "bit for bit" if same else f"to {largest:.2g}"
    return f"model: {len(_DIMS)} dims up to {_DIMS[-1]} agree with {path}, {how}"


def _expect_same(
    what: str, optimizer: RowOptimizer, dim: int, got: Floats, want: Floats
) -> None:
    if got.tobytes() != want.tobytes():
        raise ExtensionError(f"{optimizer.name}: dim {dim}: other bytes {what}")


def _alignment(optimizer: RowOptimizer) -> str:
    for dim in (1, 7, 8, 16, 33, 64):
        given = TriedRows.of(optimizer, dim)
        want = given.stepped(optimizer)
        for offset in range(1, 16):
            place = np.empty(want.size + offset, np.float32)[offset:].reshape(want.shape)
            place[:] = given.rows
            moved = TriedRows(place, given.gradients)
            for number, gradients in enumerate(moved.gradients):
                optimizer.step_rows(place, gradients, number=number)
            _expect_same(f"{4 * offset} bytes further", optimizer, dim, place, want)
    return "alignment: the same bytes at all 16 offsets of 4 bytes"


def _company(optimizer: RowOptimizer) -> str:
    for dim in (1, 8, 16, 33):
        given = TriedRows.of(optimizer, dim)
        want = given.stepped(optimizer)
        for row in range(_NUM_ROWS):
            alone = TriedRows(
                given.rows[row : row + 1], [g[row : row + 1] for g in given.gradients]
            )
            got = alone.stepped(optimizer)
            _expect_same(
                "where a row is alone in a call", optimizer, dim, got, want[row : row + 1]
            )
    return "company: the same bytes, whichever rows come in one call"


def _threads(optimizer: RowOptimizer) -> str:
    given = TriedRows.of(optimizer, 16, 2000)
    want = given.stepped(optimizer)
    for got in _at_once(lambda: given.stepped(optimizer)):
        _expect_same("where several threads step", optimizer, 16, got, want)
    return f"threads: the same bytes from {_NUM_THREADS} at a time"


def _at_once(make: Callable[[], Floats]) -> list[Floats]:
    """Return what several threads made at a time, ten times each."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return list(
            threads.map(lambda _: make(), range(10 * _NUM_THREADS), timeout=_DEADLINE_S)
        )


def _sanitizers(sources: list[Path], name: str) -> str:
    compiler = toolchain.need_compiler("c", name)
    runtimes = []
    for runtime in ("libasan.so", "libubsan.so"):
        asked = [*compiler.command, f"-print-file-name={runtime}"]
        runtimes.append(_run(asked, name).stdout.strip())
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        return "sanitizers: this compiler has none, nothing was checked"
    flags: tuple[str, ...] = ("-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined")
    flags = (*flags, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    library = kernel_library.compile_kernels(sources, name, cflags=flags)
    command = [sys.executable, "-m", "persia._build.kernel_child", str(library)]
    variables = env.of_child(LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0")
    ended = _run([*command, f"native:{name}:sanitized"], name, variables)
    if ended.returncode:
        raise ExtensionError(
            f"{name}: under AddressSanitizer and UBSan:\n{ended.stdout}{ended.stderr[:4000]}"
        )
    return "sanitizers: AddressSanitizer and UBSan report nothing"


def _run(
    command: list[str], name: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ExtensionError(
            f"{name}: {' '.join(command):.200} did not end within {_DEADLINE_S:.0f} s"
        ) from None


@functools.cache
def _built_ins() -> tuple[RowOptimizer, ...]:
    variants: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in OPTIONS]
    variants += [("adagrad", {"vectorwise_shared": True}), ("sgd", {"momentum": 0.9})]
    return tuple(RowOptimizer(name, 10.0, **{"lr": _LR, **more}) for name, more in variants)


def _speed(optimizer: RowOptimizer) -> str:
    """Compare with the built-in optimizer whose state is the nearest in size."""
    dim = 16
    words = optimizer.state_words(dim)
    near = min(_built_ins(), key=lambda one: abs(one.state_words(dim) - words))
    options = dict(optimizer.options)
    free = RowOptimizer(optimizer.name, 10.0, **{**options, "guard": False})
    guarded = RowOptimizer(optimizer.name, 10.0, **{**options, "guard": True})
    ratios = [_ratio(near, one, dim) for one in (guarded, free)]
    return (
        f"speed: {ratios[0]:.2f} of {near.name}'s ({near.state_words(dim)} words of state at "
        f"dim {dim}, here {words}), {ratios[1]:.2f} without the guard; cached rows, one thread"
    )


def _ratio(one: RowOptimizer, other: RowOptimizer, dim: int) -> float:
    """Return how fast the other one is as a part of the first's speed, paired."""
    first, second = TriedRows.of(one, dim, 2048), TriedRows.of(other, dim, 2048)

    def seconds(optimizer: RowOptimizer, given: TriedRows) -> float:
        begin = time.perf_counter()
        optimizer.step_rows(given.rows, given.gradients[0])
        return time.perf_counter() - begin

    ratios = []
    for _ in range(_PAIRS):
        times = [seconds(one, first), seconds(other, second)]
        times = [*times, seconds(other, second), seconds(one, first)]
        ratios.append((times[0] + times[3]) / (times[1] + times[2]))
    return statistics.median(ratios)
