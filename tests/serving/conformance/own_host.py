"""Our own server with the models of the suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tritonclient.utils import np_to_triton_dtype

from persia._serving.versions import ModelRepository, VersionPolicy
from persia.errors import DataError
from tests.serving.conformance.models import MODELS, Arrays, SuiteModel
from tests.serving.conformance.triton_host import Host
from tests.serving.oip.serving_models import serving
from tests.support.waiting import PATIENCE_S

TOKEN = "control-" * 4


class CheckedModel:
    """A model of the suite that checks its inputs, as every ``Servable`` has to."""

    def __init__(self, model: SuiteModel) -> None:
        self._model = model
        self.version = model.version
        self.is_batch_independent = model.is_batch_independent
        self.metadata, self.close = model.metadata, model.close

    def __call__(self, inputs: Arrays) -> dict[str, Any]:
        known = {name: (datatype, shape) for name, datatype, shape in self._model.inputs}
        for name, values in inputs.items():
            if name not in known:
                raise DataError(f"unexpected inference input {name!r}")
            datatype, shape = known[name]
            found = np_to_triton_dtype(values.dtype)
            if found != datatype:
                raise DataError(f"{name}: expected {datatype}, got {found}")
            is_so = len(shape) == values.ndim and all(
                size in (-1, got) for size, got in zip(shape, values.shape, strict=True)
            )
            if not is_so:
                raise DataError(f"{name}: expected shape {shape}, got {[*values.shape]}")
        try:
            return self._model(inputs)
        except ValueError as error:
            raise DataError(str(error)) from error


def load_model(folder: Path) -> CheckedModel:
    (model,) = [model for model, _ in MODELS if model.name == folder.parent.name]
    return CheckedModel(model(folder))


@contextmanager
def own_server(folder: Path) -> Iterator[Host]:
    """Serve the models until the end."""
    for model, versions in MODELS:
        for version in versions:
            (folder / "models" / model.name / str(version)).mkdir(parents=True)
            about = folder / "models" / model.name / str(version) / "persia-model.json"
            about.write_text("{}")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    policy = VersionPolicy("all")
    with ModelRepository(
        folder / "models", load=load_model, default_policy=policy
    ) as repository:
        repository.wait_ready(PATIENCE_S)
        with serving(cast("Any", repository), control_token_file=token) as running:
            control = {"authorization": f"Bearer {TOKEN}"}
            yield Host("persia", running.http, running.grpc, control)
