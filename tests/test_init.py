"""Importing PERSIA has no side effects, and nothing but what is used is loaded."""

from __future__ import annotations

import pytest

import persia
from tests.support.processes import run

pytestmark = pytest.mark.usefixtures("no_job")

# Which load without torch: tests/meta/test_layers.py.
MODULES = (
    *("config", "ctx", "embedding.data", "embedding.optim", "helper", "launcher", "prelude"),
    "_files.manifest",
)


def test_w51_import_prints_nothing_installs_nothing_and_loads_what_is_used() -> None:
    done = run(
        "-c",
        "import logging, sys\n"
        "hook = sys.excepthook\n"
        "import persia\n"
        "assert [n for n in sys.modules if 'persia.' in n] == ['persia.version']\n"
        "assert 'numpy' not in sys.modules\n"
        "assert persia.embedding.EmbeddingConfig().admit_probability == 1.0\n"
        "assert persia.env.get_mode() == 'embedded'\n"
        f"for name in {MODULES}:\n"
        "    __import__('persia.' + name)\n"
        "assert sys.excepthook is hook\n"
        "assert not logging.getLogger().handlers\n"
        "for log in logging.Logger.manager.loggerDict.values():\n"
        "    assert not getattr(log, 'handlers', None), log\n"
        "assert not {'pyarrow', 'pydantic'} & sys.modules.keys()\n"
        "persia.config.EmbeddingSchema.load({'slots_config': {'a': {'dim': 8}}})\n"
        "assert 'pydantic' in sys.modules  # with the first document\n"
        "persia.ctx.DataCtx()\n"
        "assert persia.readers.Columns(['user']).names == ['user']\n"
        "assert not {'torch', 'datasets'} & sys.modules.keys()\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names() -> None:
    assert persia.__version__
    assert {"ctx", "data", "embedding", "env", "utils"} <= set(dir(persia))
    with pytest.raises(AttributeError, match="'persia' has no attribute 'nothing'"):
        _ = persia.nothing
