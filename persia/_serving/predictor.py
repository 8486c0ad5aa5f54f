"""A version of a model in memory: a request's arrays in, scores out, no server around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import JaggedOutput, PooledOutput
from persia._serving.bundle import DENSE, Bundle, ServedModel, ServedTensor
from persia._serving.inputs import BATCH, InputDecoder
from persia._serving.lookup import RowLookup
from persia._serving.module_lookups import use_rows
from persia._serving.program import Layout, Tensors, load_program
from persia._serving.remote_rows import RowServers
from persia._serving.servable import Inputs, Outputs
from persia._training.batch import DeviceTransfer, NamedList, PersiaTrainingBatch
from persia.errors import CheckpointError, DataError

# What the Open Inference Protocol calls numpy's dtypes.
DATATYPES = {
    "bool": "BOOL",
    **{
        f"{sign}int{bits}": f"{sign.upper()}INT{bits}"
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


class Predictor:
    """Scores requests with one version of a model; any number of threads may call it.

    Args:
        bundle: A ``Bundle``, or its folder.
        num_threads: Of torch, in one call; None leaves torch as it is.
        row_dtype: How rows are held: float32, float16, bfloat16 or int8.
        follow_interval_s: Seconds between two looks into the change log of the rows, if the
            version was published with one.
        row_servers: Servers to take rows from, if they are not to be held here; ``row_dtype``
            and ``follow_interval_s`` are theirs then.
        rows_within: Folders or URLs below which rows and change logs may be that are not in
            the bundle's own folder; None: wherever it says.
        allow_native: Whether a dense net of machine code is loaded (``format="aot"``).

    Raises:
        CheckpointError: If the bundle or its rows are damaged, or cannot be read.
        ServiceError: If the servers cannot be asked, or have rows of another checkpoint.

    Example:
        >>> predictor = Predictor("models/clicks/3")  # doctest: +SKIP
        >>> predictor({"user": np.array([7]), "item": np.arange(100)})["output"].shape
        (100, 1)
    """

    def __init__(
        self,
        bundle: Bundle | Path | str,
        *,
        num_threads: int | None = 1,
        row_dtype: str = "float32",
        follow_interval_s: float = 0.25,
        row_servers: RowServers | None = None,
        rows_within: Sequence[str] | None = None,
        allow_native: bool = False,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        model = self.model = self.bundle.model
        self.bundle.verify()
        if rows_within is not None:
            self.bundle.check_places(rows_within)
        name = DENSE[model.format]
        self._program = load_program(
            self.bundle.read(name),
            model.format,
            str(self.bundle.folder / name),
            allow_native=allow_native,
            processor=model.processor,
        )
        schema = self.bundle.schema()
        looked_up = model.tables or model.features
        for feature in looked_up:
            slot = schema.slots.get(feature.name)
            is_jagged = slot is not None and slot.pooling == "jagged"
            if slot is None or slot.dim != feature.dim or (model.tables and not is_jagged):
                raise CheckpointError(
                    f"{self.bundle.folder}: feature {feature.name!r}: expected a "
                    f"{'jagged ' * bool(model.tables)}slot of dim {feature.dim} in its "
                    "embedding config"
                )
        dense_names = [one.name for one in model.dense] if model.has_dense_names else []
        self._layout = Layout(
            len(model.dense),
            tuple(dense_names),
            tuple(one.name for one in model.features),
            tuple("jagged" if one.kind == "ids" else one.kind for one in model.features),
        )
        sizes = {name: slot.sample_fixed_size for name, slot in schema.slots.items()}
        self._decode = InputDecoder(model.features, model.dense, sizes, model.id_inputs)
        self._names = [one.name for one in model.outputs]
        self._transfer = DeviceTransfer(torch.device("cpu"))
        self._num_threads = num_threads
        self._local = threading.local()
        self._lookup: RowLookup | None = RowLookup(
            schema,
            looked_up,
            self.bundle.rows_url,
            model.rows,
            dtype=row_dtype,
            follow_interval_s=follow_interval_s,
            servers=row_servers,
        )

    @property
    def version(self) -> int:
        """Its number in the repository."""
        return self.model.version

    @property
    def is_batch_independent(self) -> bool:
        """Whether a sample's outputs depend on that sample only."""
        return self.model.is_batch_independent

    @property
    def spent_ns(self) -> tuple[int, int]:
        """Nanoseconds that the last call of this thread looked rows up, and ran the net."""
        return getattr(self._local, "lookup_ns", 0), getattr(self._local, "forward_ns", 0)

    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the outputs by name, each [B, ...].

        Args:
            inputs: Arrays by name: of each id feature ``name`` [B], [B, 1] or padded [B, L]
                (with ``name.pad``), or ``name.values``, ``name.offsets`` and perhaps
                ``name.weights``; integers or texts. Of each dense input [B, ...]. What has
                one sample beside others of B is the same for all of them. Or ``batch``, the
                bytes of a PersiaBatch, alone.

        Raises:
            DataError: If the inputs are not what ``metadata`` says; names the input.
        """
        lookup = self._lookup
        if lookup is None:
            raise DataError(f"model {self.model.name} {self.version} is closed")
        features, arrays, size = self._decode(inputs)
        dense = [torch.from_numpy(array) for array in arrays]
        self._limit_threads()
        self._local.lookup_ns = self._local.forward_ns = 0
        with torch.inference_mode():
            if self.model.tables:
                tensors = (*dense, *_tensors_of(features))
                rows: AbstractContextManager[None] = use_rows(partial(self._rows_of, lookup))
            else:
                tensors = self._with_embeddings(dense, features, size, lookup)
                rows = nullcontext()
            if size < self.model.min_samples:
                tensors = self._layout.double(tensors)
            began, before = time.perf_counter_ns(), self._local.lookup_ns
            with rows:
                found = self._program(*tensors)
            looked_up = self._local.lookup_ns - before  # by the program itself
            self._local.forward_ns = time.perf_counter_ns() - began - looked_up
            return {
                name: one[:size].numpy() for name, one in zip(self._names, found, strict=True)
            }

    def _with_embeddings(
        self,
        dense: Sequence[torch.Tensor],
        features: tuple[FeatureBatch, ...],
        size: int,
        lookup: RowLookup,
    ) -> Tensors:
        started = time.perf_counter_ns()
        outputs = lookup(features)
        # Pooled vectors are as the program takes them, in memory of their own.
        pooled = [torch.from_numpy(one.values) for one in outputs if type(one) is PooledOutput]
        if len(pooled) == len(outputs):
            self._local.lookup_ns = time.perf_counter_ns() - started
            return (*dense, *pooled)
        batch = PersiaTrainingBatch(NamedList(dense), NamedList(), None, size)
        self._transfer.stage(batch, outputs)
        self._local.lookup_ns = time.perf_counter_ns() - started
        return self._layout.flatten(batch.non_id_type_tensors, batch.embedding_tensors)

    def _rows_of(
        self, lookup: RowLookup, asked: Sequence[FeatureBatch]
    ) -> list[NDArray[np.float32]]:
        """Return the rows [D, dim] of distinct ids, for a program that looks up by itself."""
        started = time.perf_counter_ns()
        outputs = lookup(tuple(asked))
        self._local.lookup_ns += time.perf_counter_ns() - started
        return [one.rows for one in outputs if isinstance(one, JaggedOutput)]

    def _limit_threads(self) -> None:
        """Have torch compute in the calling thread only; the main one stays as it is."""
        if self._num_threads is None or getattr(self._local, "is_limited", False):
            return
        if threading.current_thread() is not threading.main_thread():
            torch.set_num_threads(self._num_threads)
        self._local.is_limited = True

    def metadata(self) -> Mapping[str, Any]:
        """Return names, datatypes and shapes as the Open Inference Protocol has them."""
        return describe(self.model)

    def stats(self) -> Mapping[str, Any]:
        """Return counts: ``rows``, ``bytes``, packets ``applied``, ``missing`` ids by feature.

        ``row_ages``: seconds since the last packet applied was written, by training server.
        """
        lookup = self._lookup
        if lookup is None:
            return {}
        ages = getattr(lookup.rows, "ages", None)  # of rows in this process
        return {**lookup.stats(), "row_ages": ages(time.time()) if ages else {}}

    def close(self) -> None:
        """Give rows and program up; no call may come afterwards."""
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.close()


def describe(model: ServedModel) -> Mapping[str, Any]:
    """Return the metadata of a bundle."""
    inputs: list[dict[str, Any]] = [
        {
            "name": one.name,
            "datatype": "INT64",
            "shape": [-1, -1],
            "parameters": {
                "kind": "id",
                # A program that looks up by itself takes ids, whose tables have the dims.
                **({} if one.kind == "ids" else {"dim": one.dim}),
                "optional": one.optional,
                "single": one.single,
            },
        }
        for one in model.features
    ]
    for one in model.dense:
        kind = "id" if one.name in model.id_inputs else "dense"
        inputs.append({**_described(one), "parameters": {"kind": kind}})
    return {
        "name": model.name,
        "versions": [str(model.version)],
        "platform": "persia_bundle",
        "inputs": inputs,
        "outputs": [_described(one) for one in model.outputs],
        "parameters": {"batch_input": BATCH},
    }


def _tensors_of(features: Sequence[FeatureBatch]) -> Iterator[torch.Tensor]:
    """Yield ids int64 [N] and offsets [B + 1] of each feature."""
    for one in features:
        ids = one.distinct[one.inverse].view(np.int64)
        edges = np.arange(one.batch_size + 1) if one.offsets is None else one.offsets
        yield torch.from_numpy(ids)
        yield torch.from_numpy(edges.astype(np.int64))


def _described(tensor: ServedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "datatype": DATATYPES[tensor.dtype],
        "shape": [-1, *tensor.shape],
    }
