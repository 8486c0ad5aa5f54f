"""What ``python -m persia.cpp_extension check`` looks at: whether kernels do what they promise.

Each check returns a line about what was seen, or raises an ExtensionError.
"""

from __future__ import annotations

import functools
import runpy
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
_Result = TypeVar("_Result")

_DIMS = (*range(1, 71), 96, 128, 256, 1000)
_NUM_ROWS = 70  # three calls of a kernel, the last with a few rows
_NUM_STEPS = 4
_NUM_THREADS = 4
_DEADLINE_S = 600.0  # of each check
_SEEDS_AND_SIGNS = ((0, 0), (0, 1), (7, 1 << 50), (2**64 - 1, 2**64 - 1))
_NUM_IDS = 1 << 17
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
        model: A Python file with ``step``, ``fill`` or ``hash_ids``, of each kernel that the
            library has one for; None checks nothing against it.
        tolerance: Largest difference from the model, as a part of the value or of 1.
        params: Parameters, if not the defaults.

    Raises:
        ExtensionError: At the first check that is not passed.
        ConfigError: If the model's file has no such function, or no kernel such a parameter, or
            none of the library's has a model.
    """
    library = kernel_library.compile_kernels(sources, name)
    named = kernel_library.load_file(library, name)
    known, given = native.kernels_of(named), _params_of(named, params)
    if known.keys() == {"scorer"} and model is not None:
        raise ConfigError(f"{named}: expected no model of a scorer, got {model}")
    checks: list[Callable[[], str]] = []
    optimizer = None
    if "optimizer" in known:
        optimizer = RowOptimizer(named, lr=_LR, **given["optimizer"])
        if model is not None:
            checks.append(partial(_step_against_model, optimizer, model, tolerance))
        if native.guards_rows(named):
            checks.append(partial(_guard, optimizer))
        checks += [partial(one, optimizer) for one in (_alignment, _company, _threads)]
    if "initializer" in known:
        initializer = Initializer(named, **given["initializer"])
        if model is not None:
            checks.append(partial(_fill_against_model, initializer, model, tolerance))
        checks.append(partial(_same_rows, initializer))
    if "hash" in known:
        if model is not None:
            checks.append(partial(_hash_against_model, named, model))
        checks.append(partial(_same_hashes, named))
    yield f"compiled: {library}"
    yield f"named: {named}"
    yield "tried out: it writes nothing beside rows of any dim"
    for one in checks:
        yield _at_once(named, [one])[0]
    yield _sanitizers(sources, name)
    if optimizer is not None:
        yield _at_once(named, [partial(_speed, optimizer)])[0]


def _params_of(named: str, params: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the parameters of each kernel; one that no kernel has is refused by any."""
    known = native.kernels_of(named)
    unknown = params.keys() - {param for its in known.values() for param in its}
    if unknown and known.keys().isdisjoint(("optimizer", "initializer")):
        names = f"{' and '.join(known)}, without parameters, got {', '.join(sorted(unknown))}"
        raise ConfigError(f"{named}: it has its {names}")
    return {
        kernel: {one: x for one, x in params.items() if one in its or one in unknown}
        for kernel, its in known.items()
    }


def _function(path: Path, name: str, arguments: str) -> Callable[..., Any]:
    found = runpy.run_path(str(path)).get(name)
    if not callable(found):
        raise ConfigError(f"{path}: expected a function {name}({arguments})")
    function: Callable[..., Any] = found
    return function


@dataclass(slots=True)
class _Comparison:
    """How near the values of a kernel are to those of a model's file."""

    kernel: str
    path: Path
    tolerance: float
    largest: float = 0.0
    is_same: bool = True

    def add(self, where: str, got: Floats, want: Floats, dim: int) -> None:
        """Compare a row: its values by the tolerance, and whether all of it has equal bits."""
        self.is_same &= want.tobytes() == got.tobytes()
        values = want[:dim]
        error = float((np.abs(values - got[:dim]) / np.maximum(np.abs(values), 1)).max())
        self.largest = max(self.largest, error)
        if not self.largest <= self.tolerance:
            raise ExtensionError(
                f"{self.kernel}: {where}: values differ from {self.path}'s by {error:.3g}, "
                f"more than {self.tolerance:g}"
            )

    def __str__(self) -> str:
        how = "bit for bit" if self.is_same else f"to {self.largest:.2g}"
        return f"agree with {self.path}, {how}"


def _fill_against_model(initializer: Initializer, path: Path, tolerance: float) -> str:
    fill = _function(path, "fill", "seed, sign, dim, params")
    found = _Comparison(initializer.name, path, tolerance)
    for dim in _DIMS:
        for seed, sign in _SEEDS_AND_SIGNS:
            got = initializer.values(seed, sign, dim)
            want = np.asarray(fill(seed, sign, dim, dict(initializer.options)), np.float32)
            found.add(f"dim {dim}, seed {seed}, sign {sign}", got, want, dim)
    return f"model: initial values of {len(_DIMS)} dims {found}"


def _hash_against_model(name: str, path: Path) -> str:
    model = _function(path, "hash_ids", "ids")
    ids = _some_ids()
    got, want = native.hash_ids(name, ids), np.asarray(model(ids.copy()))
    if want.dtype != np.uint64 or want.shape != ids.shape:
        raise ConfigError(
            f"{path}: hash_ids: expected an array uint64 [{len(ids)}], got {want.dtype} "
            f"{list(want.shape)}"
        )
    differing = np.flatnonzero(got != want)
    if len(differing):
        at = differing[0]
        raise ExtensionError(
            f"{name}: the hash of id {ids[at]} is {got[at]:#x}, {path} has {want[at]:#x}"
        )
    return f"model: hashes of {len(ids)} ids are those of {path}"


def _some_ids() -> NDArray[np.uint64]:
    """Return ids in a row from 0 on, and as many from the whole range."""
    wide = np.random.default_rng(1).integers(0, 1 << 64, _NUM_IDS, np.uint64)
    return np.concatenate([np.arange(_NUM_IDS, dtype=np.uint64), wide])


def _same_hashes(name: str) -> str:
    """Hash ids in another order, in parts, and from several threads at a time."""
    ids = _some_ids()
    want = native.hash_ids(name, ids)
    parts = [native.hash_ids(name, part) for part in np.array_split(ids, 1000)]
    found = [native.hash_ids(name, ids[::-1].copy())[::-1], np.concatenate(parts)]
    found += _by_threads(name, lambda: native.hash_ids(name, ids))
    if any((got != want).any() for got in found):
        raise ExtensionError(
            f"{name}: other hashes in another order, in parts, or where several threads hash"
        )
    kept = np.unique(want[:_NUM_IDS] & np.uint64((1 << 56) - 1))
    return (
        f"hashes: the same in another order, in parts and from {_NUM_THREADS} threads at a "
        f"time; the ids 0 to {_NUM_IDS - 1} have {len(kept)} different ones in 56 bits"
    )


def _same_rows(initializer: Initializer) -> str:
    """Fill rows in another order, and from several threads at a time."""
    signs = np.arange(2000, dtype=np.uint64) << np.uint64(40)

    def filled(some: NDArray[np.uint64]) -> Floats:
        rows = np.empty((len(some), 16), np.float32)
        initializer.fill_rows(1, some, rows)
        return rows

    want = filled(signs)
    found = [filled(signs[::-1].copy())[::-1]]
    found += _by_threads(initializer.name, lambda: filled(signs))
    if any(got.tobytes() != want.tobytes() for got in found):
        raise ExtensionError(
            f"{initializer.name}: other initial values in another order, or where several "
            "threads fill rows"
        )
    return (
        f"initial values: the same in another order and from {_NUM_THREADS} threads at a time"
    )


def _step_against_model(optimizer: RowOptimizer, path: Path, tolerance: float) -> str:
    step: Model = _function(path, "step", "values, state, gradient, ...")
    params = {k: v for k, v in optimizer.options.items() if k not in ("lr", "guard")}
    found = _Comparison(optimizer.name, path, tolerance)
    for dim in _DIMS:
        given = TriedRows.of(optimizer, dim, 5)
        got = given.stepped(optimizer)
        for row in range(5):
            values, state = np.split(given.rows[row].copy(), [dim])
            for number, gradients in enumerate(given.gradients):
                values, state = step(values, state, gradients[row], _LR, number, params)
            want = np.concatenate([values, state]).astype(np.float32)
            found.add(f"dim {dim}", got[row], want, dim)
    return f"model: {len(_DIMS)} dims up to {_DIMS[-1]} {found}"


def _guard(optimizer: RowOptimizer) -> str:
    """Have a kernel that says so guard rows of every dim, at every offset of 4 bytes."""
    params = [x for option, x in optimizer.options.items() if option not in ("lr", "guard")]
    for dim in _DIMS:
        for offset in range(16):
            problem = native.try_guard(optimizer.name, params, dim, offset)
            if problem is not None:
                raise ExtensionError(f"{optimizer.name}: dim {dim}: {problem}")
    return "guard: no NaN without a cause is left or passed over, and values are bounded"


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
    for got in _by_threads(optimizer.name, lambda: given.stepped(optimizer)):
        _expect_same("where several threads step", optimizer, 16, got, want)
    return f"threads: the same bytes from {_NUM_THREADS} at a time"


def _by_threads(kernels: str, make: Callable[[], NDArray[Any]]) -> list[NDArray[Any]]:
    """Return what several threads made at a time, ten times each."""
    made = _at_once(kernels, [lambda: [make() for _ in range(10)]] * _NUM_THREADS)
    return [one for its in made for one in its]


def _at_once(kernels: str, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Return what calls return that run at a time, each in a thread of its own.

    Threads that a kernel does not return in are left alone, and keep no process alive.
    """
    results: list[futures.Future[_Result]] = [futures.Future() for _ in calls]

    def run(call: Callable[[], _Result], result: futures.Future[_Result]) -> None:
        try:
            result.set_result(call())
        except BaseException as exc:
            result.set_exception(exc)  # raised below

    for call, result in zip(calls, results, strict=True):
        threading.Thread(target=run, args=(call, result), daemon=True).start()
    ended, waiting = futures.wait(results, _DEADLINE_S, futures.FIRST_EXCEPTION)
    for result in ended:
        result.result()  # raises what its call did
    if waiting:
        raise ExtensionError(
            f"{kernels}: calls of its kernels have not returned within {_DEADLINE_S:g} s"
        )
    return [result.result() for result in results]


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

    def ratio(guard: bool) -> str:
        options = {**optimizer.options, "guard": guard}
        return f"{_ratio(near, RowOptimizer(optimizer.name, 10.0, **options), dim):.2f}"

    # One that guards its rows does so in any case.
    has_choice = not native.guards_rows(optimizer.name)
    unguarded = f", {ratio(guard=False)} without the guard" if has_choice else ""
    return (
        f"speed: {ratio(guard=True)} of {near.name}'s ({near.state_words(dim)} words of state "
        f"at dim {dim}, here {words}){unguarded}; cached rows, one thread"
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
