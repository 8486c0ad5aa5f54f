"""Kernels of users: the bytes of the built-in optimizer, and rows that a kernel fails for."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia import env
from persia._core.base import cpu
from persia._core.base.hashing import mix64_array
from persia._core.kernels import native
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.cpp_extension import get_kernels_include
from persia.errors import ConfigError, ExtensionError, KernelError
from tests.reference.ids import hash_of_half
from tests.support import kernels
from tests.support.processes import ROOT, run

Floats = NDArray[np.float32]
DIM = 8
PLAIN = ("-DPLAIN",)


def batch(rng: np.random.Generator, n: int, dim: int) -> Floats:
    return rng.standard_normal((n, dim), dtype=np.float32)


@pytest.mark.parametrize(("flags", "guard"), [((), True), (PLAIN, True), (PLAIN, False)])
@pytest.mark.parametrize("bound", [0.0, 0.7])
def test_adagrad_in_c_gives_the_bytes_of_the_built_in(
    flags: tuple[str, ...], guard: bool, bound: float
) -> None:
    options: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}
    ours = RowOptimizer("adagrad", bound, **options)
    theirs = RowOptimizer(kernels.load("adagrad", *flags), bound, guard=guard, **options)
    rng = np.random.default_rng(1)
    for dim in (*range(1, 71), 5000):
        assert theirs.state_words(dim) == dim
        rows = np.concatenate(
            [batch(rng, 70, dim), np.full((70, dim), 0.5, np.float32)], axis=1
        )
        np.testing.assert_array_equal(theirs.new_state(dim), ours.new_state(dim))
        others = rows.copy()
        for _ in range(3):
            grads = batch(rng, 70, dim)
            ours.step_rows(rows, grads)
            for one in cpu.available():
                cpu.select(one)
                stepped = others.copy()
                theirs.step_rows(stepped, grads)
                np.testing.assert_array_equal(stepped.view(np.uint32), rows.view(np.uint32))
            cpu.select(None)
            others = stepped


def faulty_rows(first: float) -> tuple[Floats, Floats]:
    """Rows with their state, and gradients of which that of row 40 makes the kernel fail."""
    rng = np.random.default_rng(3)
    rows = np.zeros((70, 2 * DIM + 1), np.float32)
    rows[:, :DIM] = batch(rng, 70, DIM)
    grads = batch(rng, 70, DIM)
    grads[40, 0] = first
    return rows, grads


@pytest.mark.parametrize(
    ("first", "message"),
    [(100.0, "wrote a NaN into a row that had none"), (200.0, "returned the error 7")],
)
def test_a_row_that_the_kernel_fails_for_is_put_back(first: float, message: str) -> None:
    optimizer = RowOptimizer(kernels.load("faulty"), lr=0.5)
    rows, grads = faulty_rows(first)
    before = rows.copy()
    with pytest.raises(KernelError, match=rf"{message}.* row 40; 1 rows are as they were"):
        optimizer.step_rows(rows, grads)
    np.testing.assert_array_equal(rows[40], before[40])
    others = np.arange(70) != 40
    np.testing.assert_array_equal(rows[others, DIM:], 1)
    stepped = before[:, :DIM] - np.float32(0.5) * grads
    np.testing.assert_array_equal(rows[others, :DIM], stepped[others])


def test_without_a_guard_a_nan_is_reported_too() -> None:
    optimizer = RowOptimizer(kernels.load("faulty"), lr=0.5, guard=False)
    rows, grads = faulty_rows(100.0)
    with pytest.raises(KernelError, match="row 40; 1 rows are as the kernel left them"):
        optimizer.step_rows(rows, grads)
    assert np.isnan(rows[:, :DIM]).sum() == 1
    rows, grads = faulty_rows(200.0)
    with pytest.raises(KernelError, match="error 7, row 32; 32 rows are as the kernel left"):
        optimizer.step_rows(rows, grads)


def test_a_nan_that_was_there_or_is_a_gradients_is_no_failure() -> None:
    optimizer = RowOptimizer(kernels.load("faulty"), lr=0.5)
    rows, grads = faulty_rows(0.0)
    rows[3, 1], grads[5, 2] = np.nan, np.nan
    optimizer.step_rows(rows, grads)
    assert np.argwhere(np.isnan(rows)).tolist() == [[3, 1], [5, 2]]


def hostile_rows(dim: int, count: int) -> tuple[Floats, Floats]:
    """Rows with sums of squares, and gradients; many of them are at the ends of floats."""
    rng = np.random.default_rng(dim)
    ends = np.array([0, -1, 1e20, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    rows, grads = np.abs(batch(rng, count, 2 * dim)), batch(rng, count, dim)
    for array in (rows, grads):
        for row in np.flatnonzero(rng.random(count) < 0.5):
            array[row, rng.integers(array.shape[1])] = rng.choice(ends)
    return rows, grads


@pytest.mark.parametrize("bound", [0.0, 5.0])
def test_rows_that_a_kernel_guards_are_those_that_a_server_would(bound: float) -> None:
    itself, copied = (
        RowOptimizer(kernels.load("adagrad", *flags), bound, lr=0.5) for flags in ((), PLAIN)
    )
    assert native.guards_rows(itself.name)
    for dim in (1, 2, 7, 8, 15, 16, 24, 32, 33, 64, 100, 500, 1024, 1030):
        rows, grads = hostile_rows(dim, 300)
        others, messages = rows.copy(), []
        for optimizer, stepped in ((itself, rows), (copied, others)):
            with pytest.raises(KernelError, match="wrote a NaN into a row that had") as caught:
                optimizer.step_rows(stepped, grads)
            messages.append(str(caught.value).partition(": ")[2])
        assert messages[0] == messages[1]
        # Not the bits: those of a NaN depend on the order of the two that it is of.
        np.testing.assert_array_equal(rows, others)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_store_names_the_sign_and_steps_all_others(dtype: str) -> None:
    optimizer = RowOptimizer(kernels.load("faulty"), 10.0, lr=0.5)
    stores = [EmbeddingStore(10_000, num_shards=4, seed=1, num_threads=2) for _ in range(2)]
    signs = np.arange(1, 301, dtype=np.uint64)
    rng = np.random.default_rng(5)
    grads = batch(rng, 300, DIM)
    for store in stores:
        store.configure(optimizer)
        out, hints = np.empty((300, DIM), np.float32), np.empty(300, np.uint32)
        uniform = Initializer("uniform", lower=-1.0, upper=1.0)
        store.lookup_train(signs, uniform, 1.0, 0, out, hints, dtype=dtype)
    others = signs != 77
    stores[0].update(signs[others], None, grads[others], dtype=dtype, number=9)
    grads[76, 0] = 100.0
    with pytest.raises(KernelError, match=r"sign 0x000000000000004d; 1 rows .* as they were"):
        stores[1].update(signs, None, grads, dtype=dtype, number=9)
    for ours, theirs in zip(
        *(store.read(signs, DIM, dtype=dtype) for store in stores), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


CRASH = """
import sys
import numpy as np
from pathlib import Path
from persia._build import kernel_library
from persia._core.kernels.optim import RowOptimizer

from persia._core.kernels.initial import Initializer
from persia._core.kernels.native import hash_ids
from persia._core.store.store import EmbeddingStore

name = kernel_library.load_file(Path(sys.argv[1]), sys.argv[2])
rows = np.zeros((1, 17), np.float32)
{}
"""
CRASHES = {
    "faulty": "RowOptimizer(name, lr=0.5).step_rows(rows, np.full((1, 8), 300, np.float32))",
    "initial": "Initializer(name, crash_at=77).values(1, 77, 8)",
    "hash": "hash_ids(name, np.full(1, 77, np.uint64))",
    "scorer": """
store = EmbeddingStore(100, policies=[(name, None, 0)])
store.configure(RowOptimizer("sgd", lr=0.5))
signs = np.full(1, 77, np.uint64)
store.lookup_train(signs, Initializer(), 1.0, 0, rows, np.empty(1, np.uint32), policy=1)
""",
}


@pytest.mark.parametrize("kernel", CRASHES)
def test_a_crash_in_a_kernel_is_said_by_its_name(kernel: str) -> None:
    flags = ["-DCRASH_AT=77"] if kernel in ("scorer", "hash") else []
    library = kernels.library(kernel, *flags)
    command = [sys.executable, "-c", CRASH.format(CRASHES[kernel]), str(library), kernel]
    # A sanitizer, if there is one, is to leave the signal to us.
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:handle_segv=0"
    ended = subprocess.run(
        command,
        env=env.of_child(PYTHONPATH=str(ROOT), ASAN_OPTIONS=options),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -11
    assert f"persia: kernel {kernel} (sha256 " in ended.stderr
    assert "crashed with SIGSEGV; this process ends" in ended.stderr


def test_parameters_are_those_of_the_library() -> None:
    name = kernels.load("adagrad")
    assert native.is_native(name)
    assert native.kernels_of(name)["optimizer"]["eps"] == 1e-10
    with pytest.raises(ConfigError, match=r"no option 'epps', did you mean 'eps'"):
        RowOptimizer(name, lr=0.1, epps=1.0)
    with pytest.raises(ConfigError, match="lr must be a number, it was not given"):
        RowOptimizer(name)
    with pytest.raises(ConfigError, match="guard must be True or False"):
        RowOptimizer(name, lr=0.1, guard=1.0)
    with pytest.raises(ConfigError, match="has not loaded its library"):
        RowOptimizer(name[:-1] + "x", lr=0.1)


def test_rows_without_their_library_are_neither_stepped_nor_created() -> None:
    name = "native:absent:" + "0" * 64
    made = RowOptimizer(name, 1.0, kept_words={4: 9}, lr=0.1, beta=0.5)
    for optimizer in (made, made.with_lr(0.2), pickle.loads(pickle.dumps(made))):
        assert (optimizer.name, optimizer.state_words(4)) == (name, 9)
        with pytest.raises(ConfigError, match="the rows loaded have no dim 5"):
            optimizer.state_words(5)
        with pytest.raises(ExtensionError, match=f"a step: the library of {name} was not"):
            optimizer.step_rows(np.zeros((1, 13), np.float32), np.zeros((1, 4), np.float32))
    assert made.with_lr(0.2).options == {"lr": 0.2, "beta": 0.5}
    store = EmbeddingStore(100)
    signs, rows = np.arange(3, dtype=np.uint64), np.zeros((3, 4), np.float32)
    hints = np.zeros(3, np.uint32)
    with pytest.raises(ExtensionError, match="a training lookup: the library of"):
        store.lookup_train(signs, Initializer(), 1.0, 0, rows, hints, made)
    with pytest.raises(ExtensionError, match="an update: the library of"):
        store.update(signs, None, rows, made)
    with pytest.raises(ExtensionError, match="writing rows: the library of"):
        store.write(signs, rows, None, made)
    assert len(store) == 0


def test_a_hash_is_of_each_id_alone() -> None:
    name = kernels.load("hash")
    ids = np.random.default_rng(1).integers(14, 2**64, 1000, np.uint64)
    ids[:4] = 0, 1, 12, 2**64 - 1
    assert native.hash_ids(name, ids).tolist() == [hash_of_half(x) for x in ids.tolist()]
    assert (
        native.hash_ids(name, ids[::-3]).tolist() == native.hash_ids(name, ids)[::-3].tolist()
    )
    assert native.hash_ids(name, ids[:0]).tolist() == []
    ids[500] = 13
    with pytest.raises(KernelError, match=f"hash {name}: .* the error 7 for 1000 ids"):
        native.hash_ids(name, ids)
    with pytest.raises(
        ConfigError, match="expected a library with a hash, it has its optimizer"
    ):
        native.hash_ids(kernels.load("adagrad"), ids)


OUTSIDE = """
# cython: language_level=3
from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport uint64_t
from persia._core.kernels.native cimport persia_block_t, persia_optimizer_t


cdef int step(const persia_block_t *rows) noexcept nogil:
    cdef size_t i, j
    for i in range(rows.num_rows):
        for j in range(rows.dim):
            rows.values[i][j] -= <float> rows.lr * rows.grads[i][j]
    return 0


def stepped(float value, float gradient, double lr):
    cdef float *values = &value
    cdef const float *grads = &gradient
    cdef persia_block_t rows
    cdef persia_optimizer_t optimizer
    rows.num_rows, rows.dim, rows.lr = 1, 1, lr
    rows.values, rows.grads = &values, &grads
    optimizer.step = step
    optimizer.step(&rows)
    return value


def mixed(uint64_t x):
    return mix64(x)
"""


def test_a_module_outside_of_the_tree_cimports_what_is_stable(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "outside.pyx").write_text(OUTSIDE)
    paths = [f"-I{get_kernels_include()}", f"-I{sysconfig.get_path('include')}"]
    module = f"outside{sysconfig.get_config_var('EXT_SUFFIX')}"
    commands: list[list[str]] = [
        [sys.executable, "-m", "cython", "-3", "outside.pyx"],
        ["cc", "-O1", "-shared", "-fPIC", *paths, "outside.c", "-o", module],
        [sys.executable, "-c", "import outside as o; print(o.stepped(1, 2, 0.25), o.mixed(1))"],
    ]
    variables = env.of_child(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    for command in commands:
        ended = run(*command, cwd=tmp_path, env=variables)
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0.5", str(mix64_array(np.array([1], np.uint64))[0])]
