"""Every name of 2021 that the table knows: found with one warning, or gone with advice."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from persia._core.store import store
from persia.compat import EVERYTHING, OLD_KEYWORDS, OLD_NAMES, launcher
from persia.compat.contexts import LooseCtx, RenamedCtx, _training
from persia.compat.data import Dataloader
from persia.ctx import EmbeddingCtx, PreprocessMode, TrainCtx
from persia.data import DataLoader
from persia.distributed import DDPOption
from persia.embedding.optim import SGD
from tests.support.processes import ROOT, run

NAMES = [
    (module, name, old) for module, names in OLD_NAMES.items() for name, old in names.items()
]
PATH = re.compile(r"persia(?:\.\w+)+")


@pytest.mark.parametrize(("module", "name", "old"), NAMES, ids=lambda x: str(x)[:30])
def test_an_old_name_says_once_what_to_write(module: str, name: str, old: Any) -> None:
    name = name.replace(EVERYTHING, "Embedding")
    if not old.found:
        gone = re.escape(f"{module}.{name} is gone; write {old.today}")
        with pytest.raises(ImportError, match=gone):
            getattr(import_module(module), name)
        with pytest.raises(ImportError, match=gone):
            exec(f"from {module} import {name}")
        return
    with pytest.warns(DeprecationWarning, match=re.escape(old.today)) as caught:
        found = getattr(import_module(module), name)
    assert found is not None
    assert [each.filename for each in caught] == [__file__]


def test_what_to_write_today_exists_and_is_no_old_name() -> None:
    texts = [old.today for _, _, old in NAMES] + list(OLD_KEYWORDS.values())
    paths = [path for text in texts for path in PATH.findall(text)]
    assert len(paths) > 20
    for path in paths:
        assert resolve_name(path) is not None  # every warning is an error here


def test_the_page_shows_every_one() -> None:
    page = (ROOT / "docs" / "moving-from-old-persia.md").read_text(encoding="utf-8")
    for module, name, _ in NAMES:
        assert f"`{module}`" in page
        assert name == EVERYTHING or f"`{name}`" in page
    for keyword in OLD_KEYWORDS:
        assert f"`{keyword}=`" in page


def test_a_name_that_never_was_is_an_error_as_ever() -> None:
    for module, names in OLD_NAMES.items():
        if EVERYTHING in names:
            continue
        with pytest.raises(AttributeError, match="has no attribute 'Persai'"):
            getattr(import_module(module), "Persai")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'Persai'"):
        from persia.ctx import Persai  # type: ignore[attr-defined]  # noqa: F401


def test_statements_of_then_run() -> None:
    program = (
        "from persia.sparse.optim import SGD, Adam, Adagrad, Optimizer\n"
        "from persia.backend import init_backend, get_backend\n"
        "from persia.prelude import PyPersiaBatchData\n"
        "from persia.error import PersiaRuntimeException, FileNotFoundException\n"
        "import persia.sparse.emb, persia.wrapper\n"
        "assert init_backend(worker_size=4) is get_backend()\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    ran = run("-W", "always", "-c", program)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall("DeprecationWarning", ran.stderr)) == 9


# A value for each keyword with which a context can be made here.
VALUES: dict[str, Any] = {
    "sparse_optimizer": SGD(lr=0.1),
    "grad_scaler": torch.amp.GradScaler("cpu", enabled=False),
    "emb_initialization": (-0.5, 0.5),
    "admit_probability": 0.5,
    "weight_bound": 3,
    "checkpoint_dir": None,
    "is_training": True,
    "enable_backward": True,
    "backend_worker_size": 7,
    "middleware_services": ["localhost:1"],
    "output_addrs": ["localhost:2"],
    "wait_server_ready": True,
    "init_output": True,
    "forward_buffer_size": 3,
    "deserialize_buffer_size": 4,
    "data_queue_size": 9,
    "port": 8000,
    "torch_distributed_port": 23456,
}
SLOTS = {"slots_config": {"item": {"dim": 4}}}


@pytest.mark.parametrize("name", OLD_KEYWORDS)
@pytest.mark.parametrize("has_model", [True, False])
def test_an_old_keyword_says_once_what_to_write(name: str, has_model: bool) -> None:
    model = torch.nn.Linear(1, 1)
    given: dict[str, Any] = {"embedding_optimizer": SGD(lr=0.1), "embedding_config": SLOTS}
    if has_model:
        given |= {"model": model, "dense_optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    if name == "sparse_optimizer":
        del given["embedding_optimizer"]
    with pytest.warns(DeprecationWarning, match=re.escape(OLD_KEYWORDS[name])) as caught:
        ctx = TrainCtx(**given, **{name: VALUES[name]})
    assert [each.filename for each in caught] == [__file__]
    assert isinstance(ctx, TrainCtx)
    config = ctx.embedding_config
    if hasattr(config, name):
        assert getattr(config, name) == VALUES[name]
    assert isinstance(ctx.embedding_optimizer, SGD)


def test_ddp_meets_at_the_old_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.env.get_world_size", lambda: 2)
    option = _training({"torch_distributed_port": 23457})["distributed_option"]
    assert isinstance(option, DDPOption)
    assert option.master_port == 23457
    assert option.backend == "gloo"


def test_signatures_stay_readable_and_an_evaluating_context_has_its_settings() -> None:
    old: dict[str, Any] = {"weight_bound": 3}
    with pytest.warns(DeprecationWarning, match="weight_bound"):
        ctx = EmbeddingCtx(PreprocessMode.EVAL, embedding_config=SLOTS, **old)
    assert ctx.embedding_config.weight_bound == 3
    # The hook for old keywords must not hide the arguments from help() and editors.
    for cls in (TrainCtx, EmbeddingCtx, DataLoader, RenamedCtx, LooseCtx):
        assert "args" not in inspect.signature(cls).parameters
    shown = inspect.signature(RenamedCtx).parameters
    assert {*OLD_KEYWORDS, "model"} <= shown.keys()
    assert [shown[f"{name}_size"].default for name in ("forward_buffer", "data_queue")] == [
        10,
        5,
    ]

    class Own(RenamedCtx):
        def __init__(self, path: str) -> None:
            pass

    assert list(inspect.signature(Own).parameters) == ["path"]
    assert "reproducible" in inspect.signature(Dataloader).parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'models'"):
        TrainCtx(SGD(0.1), None, models=1)  # type: ignore[arg-type, call-arg]


def test_the_older_script_runs_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["persia_launcher", "--help"])
    with pytest.warns(DeprecationWarning, match="persia-launcher"), pytest.raises(SystemExit):
        launcher()


def test_w73_the_package_names_what_it_needs_and_is_one_package() -> None:
    # The original declared neither torch nor numpy, and its compiled part was a package of its
    # own, beside persia or in it depending on how it was installed.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    for name in ("numpy", "torch"):
        assert f'"{name}>=' in needed
    compiled = Path(str(store.__file__))
    assert Path(str(import_module("persia").__file__)).parent / "_core" in compiled.parents
    with pytest.raises(ModuleNotFoundError):
        import_module("persia_core")
