"""What a check of kernels finds: each source breaks one promise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from persia import cpp_extension
from persia._build import kernel_check
from persia.errors import ConfigError, ExtensionError, KernelError
from tests.support import kernels

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


def test_a_kernel_that_fails_in_other_threads_is_seen(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="returned the error 7"):
        check(tmp_path, OTHER_THREAD)


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
