"""What a check of kernels finds: each source breaks one promise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from persia import cpp_extension
from persia._build import kernel_check
from persia.errors import ConfigError, ExtensionError, KernelError
from tests.support import kernels
from tests.support.processes import run

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SOURCE = """
#include <pthread.h>
#include <stdlib.h>
#include "persia_kernels.h"
static int step(const persia_block_t *rows)
{
    for (size_t i = 0; i < rows->num_rows; i++)
        for (size_t j = 0; j < rows->dim; j++)
            rows->values[i][j] -= (float)rows->lr * rows->grads[i][j];
    %s
    return 0;
}
static const persia_optimizer_t optimizer = {.size = sizeof optimizer, .step = step};
PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
"""
MODEL = """
import numpy as np

def step(values, state, gradient, lr, step, params):
    return values - np.float32(%s * lr) * gradient, state
"""


def check(tmp_path: Path, statement: str, model: str = "1") -> list[str]:
    source, formula = tmp_path / "sgd.c", tmp_path / "model.py"
    source.write_text(SOURCE % statement)
    formula.write_text(MODEL % model)
    return list(kernel_check.check([source], "sgd", formula, 1e-5, {}))


def test_what_a_good_kernel_passes(tmp_path: Path) -> None:
    lines = check(tmp_path, "")
    heads = [line.partition(":")[0] for line in lines]
    assert heads == [
        *("compiled", "named", "tried out", "model", "alignment", "company", "threads"),
        *("sanitizers", "speed"),
    ]
    assert "of sgd's" in lines[-1]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("rows->values[0][0] += (float)rows->num_rows;", "values differ from .*model.py"),
        ("if (rows->dim == 8) rows->values[0][0] += 1e-7f * rows->num_rows;", "in a call"),
        ("if ((size_t)rows->values[0] % 64 == 8) rows->values[0][0] *= 1.000001f;", "further"),
        (
            "char *volatile p = malloc(8); for (int k = 0; k < 9; k++) p[k] = 1; free(p);",
            "heap-buffer-overflow",
        ),
    ],
)
def test_what_breaks_a_promise_is_named(tmp_path: Path, statement: str, message: str) -> None:
    with pytest.raises(ExtensionError, match=message):
        check(tmp_path, statement)


# The first call is from the thread that checks.
OTHER_THREAD = """
    static pthread_t first;
    static int is_known;
    if (!is_known) { first = pthread_self(); is_known = 1; }
    if (!pthread_equal(first, pthread_self())) return 7;
"""


def test_a_kernel_that_guards_its_rows_is_checked_at_every_dim(tmp_path: Path) -> None:
    source = (kernels.FOLDER / "adagrad.c").read_text()
    lines = list(kernel_check.check([kernels.FOLDER / "adagrad.c"], "adagrad", None, 0.0, {}))
    assert [line.partition(":")[0] for line in lines[3:5]] == ["guard", "alignment"]
    assert "without the guard" not in lines[-1]
    # Not looked at when it is loaded: a dim between those that are tried.
    body = "    return decay == 0.0f ?"
    assert source.count(body) == 1
    forgets = "    if (rows->dim == 21) { PERSIA_STEP_ROWS(rows, ROW, dim); return 0; }"
    changed = f"{forgets}\n{body}"
    (tmp_path / "adagrad.c").write_text(source.replace(body, changed))
    with pytest.raises(ExtensionError, match=r"dim 21: \.guards is 1, but step returned 0"):
        list(kernel_check.check([tmp_path / "adagrad.c"], "adagrad", None, 0.0, {}))


def test_a_kernel_that_fails_in_other_threads_is_seen(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="returned the error 7"):
        check(tmp_path, OTHER_THREAD)


HANGS = """
import sys
from persia import cpp_extension
from persia._build import kernel_check
kernel_check._DEADLINE_S = 2.0
sys.exit(cpp_extension._main(["check", sys.argv[1]]))
"""


def test_a_kernel_that_hangs_ends_the_command(tmp_path: Path) -> None:
    """In other threads than the first, and with more rows than are tried out."""
    in_others = OTHER_THREAD.replace("return 7", "pause()")
    for statement in (in_others, "if (rows->num_rows == 32) pause();"):
        source = tmp_path / "sgd.c"
        source.write_text("#include <unistd.h>\n" + SOURCE % statement)
        ran = run("-c", HANGS, source, timeout_s=60.0)
        assert ran.returncode == 1, ran.stderr
        assert "of its kernels have not returned within 2 s" in ran.stdout.splitlines()[-1]


def test_the_command_prints_what_a_kernel_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "sgd.c"
    source.write_text(SOURCE % "if (rows->dim == 8) return 7;")
    assert cpp_extension._main(["check", str(source)]) == 1
    assert "not passed: " in capsys.readouterr().out.splitlines()[-1]


def test_a_model_that_is_another_one_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="dim 1: values differ"):
        check(tmp_path, "", "1.01")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="expected a function step"):
        list(
            kernel_check.check(
                [kernels.FOLDER / "adagrad.c"], "adagrad", tmp_path / "empty.py", 0.0, {}
            )
        )


def test_the_command_prints_what_was_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cpp_extension._main(["check", str(tmp_path / "absent.c")]) == 1
    assert "not passed: " in capsys.readouterr().out


FILL = """
#include "persia_kernels.h"
static const char *const names[] = {"scale"};
static const double defaults[] = {0.5};
static int fill(float *values, uint32_t dim, uint64_t seed, uint64_t sign, const double *params)
{
    const uint64_t key = persia_mix64(sign ^ persia_mix64(seed));
    for (uint32_t j = 0; j < dim; j++)
        values[j] = (float)(params[0] * (double)(persia_mix64(key + j) >> 40) * 0x1p-24);
    %s
    return 0;
}
static const persia_initializer_t initializer = {
    .size = sizeof initializer, .num_params = 1, .param_names = names,
    .param_defaults = defaults, .fill = fill};
PERSIA_EXPORT_KERNELS(.initializer = &initializer)
"""
FILL_MODEL = """
WORD = (1 << 64) - 1

def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)

def fill(seed, sign, dim, params):
    key = mix64(sign ^ mix64(seed))
    draws = [mix64((key + j) & WORD) >> 40 for j in range(dim)]
    return [params["scale"] * draw * 2.0**-24 for draw in draws]
"""


def check_fill(tmp_path: Path, statement: str, **params: float) -> list[str]:
    source, formula = tmp_path / "values.c", tmp_path / "model.py"
    source.write_text(FILL % statement)
    formula.write_text(FILL_MODEL)
    return list(kernel_check.check([source], "values", formula, 1e-5, params))


def test_what_a_good_initializer_passes(tmp_path: Path) -> None:
    lines = check_fill(tmp_path, "", scale=2.0)
    heads = [line.partition(":")[0] for line in lines]
    assert heads == [
        *("compiled", "named", "tried out", "model", "initial values", "sanitizers")
    ]
    assert "model.py, bit for bit" in lines[3]
    with pytest.raises(ConfigError, match="has no option 'scales', did you mean 'scale'"):
        check_fill(tmp_path, "", scales=2.0)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("values[0] += 0.1f;", "seed 0, sign 0: values differ from .*model.py"),
        (
            "static int n; if (sign > 8 && n++ % 1024 == 1023) values[0] += 1e-6f;",
            "in another order",
        ),
    ],
)
def test_what_an_initializer_breaks_is_named(
    tmp_path: Path, statement: str, message: str
) -> None:
    with pytest.raises(ExtensionError, match=message):
        check_fill(tmp_path, statement)


HASH = """
#include "persia_kernels.h"
static int hash(const uint64_t *ids, size_t num_ids, uint64_t *hashes)
{
    for (size_t i = 0; i < num_ids; i++)
        hashes[i] = ids[i] %% 1000 * 0x9E3779B97F4A7C15u;
    %s
    return 0;
}
static const persia_hash_t fibonacci = {.size = sizeof fibonacci, .hash = hash};
PERSIA_EXPORT_KERNELS(.hash = &fibonacci)
"""
HASH_MODEL = """
import numpy as np

def hash_ids(ids):
    return ids %% np.uint64(1000) * np.uint64(0x9E3779B97F4A7C15)%s
"""


def check_hash(tmp_path: Path, statement: str, model: str = "") -> list[str]:
    source, formula = tmp_path / "hash.c", tmp_path / "model.py"
    source.write_text(HASH % statement)
    formula.write_text(HASH_MODEL % model)
    return list(kernel_check.check([source], "hash", formula, 0.0, {}))


def test_what_a_good_hash_passes(tmp_path: Path) -> None:
    lines = check_hash(tmp_path, "")
    heads = [line.partition(":")[0] for line in lines]
    assert heads == ["compiled", "named", "tried out", "model", "hashes", "sanitizers"]
    assert "the ids 0 to 131071 have 1000 different ones in 56 bits" in lines[4]


@pytest.mark.parametrize(
    ("statement", "model", "message"),
    [
        ("if (hashes[0] == 1) hashes[0] = 2;", " + np.uint64(1)", "of id 0 is 0x0, .* has 0x1"),
        ("if (num_ids > 9) hashes[9] += num_ids;", "", "the hash of id 9 is"),
        ("if (num_ids == 262) hashes[5]++;", "", "other hashes in another order, in parts"),
    ],
)
def test_what_a_hash_breaks_is_named(
    tmp_path: Path, statement: str, model: str, message: str
) -> None:
    with pytest.raises(ExtensionError, match=message):
        check_hash(tmp_path, statement, model)


def test_a_model_of_another_shape_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected an array uint64 \[262144\], got float64"):
        check_hash(tmp_path, "", " * 1.0")


SCORER = """
#include "persia_kernels.h"
static uint32_t score(const persia_use_t *use)
{
    return use->values[0] + %s < 0.0f;
}
static const persia_scorer_t scorer = {.size = sizeof scorer, .score = score};
PERSIA_EXPORT_KERNELS(.scorer = &scorer)
"""


def check_scorer(tmp_path: Path, read: str, model: Path | None = None, **params: float) -> None:
    source = tmp_path / "scorer.c"
    source.write_text(SCORER % read)
    for _ in kernel_check.check([source], "scorer", model, 0.0, params):
        pass


@pytest.mark.parametrize("read", ["use->state[0]", "use->values[use->dim]"])
def test_a_scorer_that_reads_beside_its_row_is_seen(tmp_path: Path, read: str) -> None:
    with pytest.raises(ExtensionError, match="heap-buffer-overflow"):
        check_scorer(tmp_path, read)


def test_what_a_scorer_does_not_take_is_refused(tmp_path: Path) -> None:
    check_scorer(tmp_path, "use->values[use->dim - 1]")
    with pytest.raises(ConfigError, match=r"expected no model of a scorer, got .*model\.py"):
        check_scorer(tmp_path, "0", tmp_path / "model.py")
    with pytest.raises(ConfigError, match="it has its scorer, without parameters, got scale"):
        check_scorer(tmp_path, "0", scale=1.0)
