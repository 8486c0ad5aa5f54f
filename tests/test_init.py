"""Importing PERSIA has no side effects, and nothing but what is used is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import persia

pytestmark = pytest.mark.usefixtures("no_job")

TORCH_FREE = (
    "config",
    "embedding",
    "embedding.data",
    "embedding.optim",
    "env",
    "errors",
    "helper",
    "launcher",
    "logger",
    "prelude",
    "service",
    "utils",
    "_rpc.serialization",
    "_rpc.messages",
    "_context_stack",
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )


def test_w51_import_prints_nothing_and_installs_nothing() -> None:
    done = run(
        "import logging, sys\n"
        "hook = sys.excepthook\n"
        "import persia\n"
        f"for name in {TORCH_FREE}:\n"
        "    __import__('persia.' + name)\n"
        "assert sys.excepthook is hook\n"
        "assert not logging.getLogger().handlers\n"
        "for log in logging.Logger.manager.loggerDict.values():\n"
        "    assert not getattr(log, 'handlers', None), log\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'pyarrow' not in sys.modules\n"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_submodules_load_on_first_use() -> None:
    run(
        "import sys, persia\n"
        "assert 'numpy' not in sys.modules\n"
        "assert persia.embedding.EmbeddingConfig().admit_probability == 1.0\n"
        "assert persia.env.get_mode() == 'embedded'\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_names() -> None:
    assert persia.__version__
    assert {"ctx", "data", "embedding", "env", "utils"} <= set(dir(persia))
    with pytest.raises(AttributeError, match="'persia' has no attribute 'nothing'"):
        _ = persia.nothing
