"""The messages between the roles, and the Protocols that the roles implement.

A role's class takes and returns messages and knows no socket; embedded mode calls it directly.
Shapes: ``n`` signs of one table, ``D`` distinct ids of one feature, ``N`` ids of one feature,
``B`` samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from persia._core.ids.feature_batch import FeatureBatch

Signs = NDArray[np.uint64]
Numbers = NDArray[np.uint32]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
AnyArray = NDArray[Any]  # any dtype of the wire, any shape

# Metadata of fields whose floats may have 2 bytes each on the wire: which of ``WireDtypes``.
_ROWS = {"travels_as": "rows"}
_GRADIENTS = {"travels_as": "gradients"}


# --- settings -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WireDtypes:
    """How floats travel: ``float32``, ``float16`` or ``bfloat16``. Methods have f32 always."""

    rows: str = "float32"  # and what is pooled of them
    gradients: str = "float32"


@dataclass(frozen=True, slots=True)
class InitializationSettings:
    """A distribution by name (``uniform``, ``normal``, ...) and its parameters by name."""

    method: str = "uniform"
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """The settings of rows that ``EmbeddingConfig`` sends to every server at run time."""

    initialization: InitializationSettings
    admit_probability: float
    weight_bound: float  # absolute bound on every value after a step; <= 0 is no bound
    seed: int


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimizer by name (``sgd``, ``adagrad``, ...) and all its options."""

    name: str
    options: Mapping[str, float | bool]


# --- embedding-worker to parameter server ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableSigns:
    """Distinct signs of one table. Tables number the row settings of the schema."""

    table: int
    signs: Signs


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """``batch_id`` keys the admission draw, so that a repeated call draws the same.

    A training lookup with a ``ref`` has its signs and row numbers kept by the server, for an
    update that names it: an incarnation of an embedding-worker, and its number of the batch.
    """

    batch_id: int
    is_training: bool
    tables: tuple[TableSigns, ...]
    version: str = ""  # of the rows wanted, if they are still there; "" is any
    ref: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows f32 [n, dim] in the order asked for; zeros where nothing is stored."""

    table: int
    rows: Floats = field(metadata=_ROWS)
    # [n] row numbers for the update that follows, checked before use; None if they are kept.
    hints: Numbers | None


@dataclass(frozen=True, slots=True)
class LookupReply:
    """Rows, all of one version: the checkpoint that a server for inference has them from.

    Replies of one set with other versions do not belong together. Servers that train have none.
    """

    tables: tuple[TableRows, ...]
    version: str = ""
    # Of rows that are trained, the load that brought them, 0 without one: for the update.
    load_id: int | None = None


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Summed gradients f32 [n, dim], one per sign, with the hints of the lookup."""

    table: int
    signs: Signs  # empty where the request names its lookup: those of the lookup
    hints: Numbers | None
    gradients: Floats = field(metadata=_GRADIENTS)
    lr: float | None = None  # of this step; None is the registered optimizer's
    # [n] places of the signs among those of the table's lookup; None is all of these in order.
    places: Numbers | None = None


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Gradients that a server applies at most once."""

    update_id: tuple[int, int]  # an incarnation of an nn-worker, and its number, which grows
    tables: tuple[TableGradients, ...]
    ref: tuple[int, int] | None = None  # of the lookup whose signs it has; None: it brings them
    load_id: int | None = None  # as the lookup's reply had it; None is not checked


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update skipped, by feature name; zero counts are absent.

    Of a server, which knows signs and no features: the first and the last field.
    """

    num_missing: int = 0  # signs that had no row any more; each skipped its own gradient only
    nan_samples: Mapping[str, int] = field(default_factory=dict)  # rows of the gradient
    nan_rows: Mapping[str, int] = field(default_factory=dict)  # sums that overflowed
    skipped: tuple[str, ...] = ()  # slots without a gradient
    repeated: bool = False  # it was applied before: this is the report of that call, again


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Whole rows; a read answers with those of its signs that have one, in their order."""

    table: int
    signs: Signs
    values: Floats  # [n, dim]
    states: NDArray[np.uint32] | None  # [n, words]; None in a write: those of new rows
    keeps_states: bool = False  # of a write without states: rows that are there keep theirs


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Rows by sign, of one table; a sign may come more than once."""

    table: int
    signs: Signs
    with_states: bool
    # Where there is no row, what training would begin with, in place of zeros.
    with_initial: bool


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Rows in the order asked for."""

    found: NDArray[np.uint8]  # [n], 1 where there is a row
    values: Floats  # [n, dim]
    states: NDArray[np.uint32] | None  # [n, words], zeros where there is no row


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A piece of the rows of one group: the first one, or the one at a reply's cursor."""

    table: int
    prefix: int  # of the group's signs
    cursor: int  # 0 is the first
    max_rows: int
    with_states: bool


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Some rows of a server, and where it goes on; each row that stays is in one piece."""

    signs: Signs
    values: Floats  # [n, dim]
    states: NDArray[np.uint32] | None  # [n, words]
    cursor: int | None  # None: there are no more
    # Another one: rows were replaced as a whole meanwhile, and the cursor means nothing.
    generation: int


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Begin a snapshot of this moment. The caller holds updates back meanwhile."""

    cut_id: int  # drawn by the caller: asked again, a server answers for the cut it has
    changes: str | None  # only rows changed since the last committed cut of this name


@dataclass(frozen=True, slots=True)
class CutInfo:
    num_rows: int  # at the moment of the cut
    is_full: bool  # every row comes, whatever was asked for
    about: str  # what the rows mean and were trained with, as JSON for the manifest


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write a cut under ``prefix`` of the storage at ``url``, in the background."""

    cut_id: int
    url: str
    prefix: str


@dataclass(frozen=True, slots=True)
class CutStatus:
    """How far a cut is."""

    state: str  # begun, writing, written or failed
    num_rows: int  # written so far
    error: str
    meta: NDArray[np.uint8]  # once written: JSON of ``parts``, ``deleted`` and ``files``


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Load this server's share of a checkpoint; the same request again asks how far it is.

    ``step`` is ``verify``, which changes nothing, ``commit``, both in the background, and
    ``finish`` once every server has committed, or ``drop``. From ``commit`` to ``finish`` a
    server refuses to train: its rows, or another's, are not all there.
    """

    load_id: int  # drawn by the caller
    step: str
    url: str
    checkpoint: str  # id in the catalog there; "" is the latest
    features: tuple[str, ...] | None  # None is all that the config has


@dataclass(frozen=True, slots=True)
class LoadNote:
    """What the user should know of a load, and what kind of thing it is.

    ``new``: features without rows there. ``optimizer``: rows whose state begins again.
    ``seed``: another one for new rows. ``counts``: ids not admitted yet are counted from 0.
    ``other``: all else, of which some rows may be lost or mean something else.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """How far a load is: verifying, verified, loading, loaded, finished, or failed."""

    state: str
    done: int  # bytes of the step so far
    total: int
    num_rows: int  # loaded so far
    error: str
    notes: tuple[LoadNote, ...]


class ParameterServer(Protocol):
    """The methods of an embedding-parameter-server."""

    @property
    def replica_index(self) -> int: ...
    @property
    def replica_size(self) -> int: ...
    @property
    def schema_fingerprint(self) -> str: ...
    def configure(self, settings: HyperParameters) -> None: ...
    def register_optimizer(self, settings: OptimizerSettings) -> None: ...
    def ready_for_serving(self) -> bool: ...
    def lookup(self, request: LookupRequest) -> LookupReply: ...
    def update(self, request: UpdateRequest) -> UpdateReport: ...
    def set_embedding(self, tables: Sequence[TableEntries]) -> None: ...
    def read_embedding(self, tables: Sequence[TableSigns]) -> tuple[TableEntries, ...]: ...
    def read_rows(self, request: RowsRequest) -> FoundRows: ...
    def delete_rows(self, part: TableSigns) -> int: ...
    def scan_rows(self, request: ScanRequest) -> RowPiece: ...
    def count_rows(self, table: int, prefix: int) -> int: ...
    def get_embedding_size(self) -> int: ...
    def clear_embeddings(self) -> None: ...
    def begin_cut(self, request: CutRequest) -> CutInfo: ...
    def write_cut(self, request: WriteRequest) -> None: ...
    def cut_status(self, cut_id: int) -> CutStatus: ...
    def end_cut(self, cut_id: int, committed: bool) -> None: ...
    def load(self, request: LoadRequest) -> LoadStatus: ...
    def stats(self) -> Mapping[str, int]: ...


# --- nn-worker to embedding-worker ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IDFeatures:
    """The id features of one batch, in the order the user gave them."""

    features: tuple[FeatureBatch, ...]
    batch_id: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """One vector per sample: values f32 [B, dim].

    ``index`` [B] numbers samples so that those of one number have the same vector; None where
    that is not known. Those that repeat are then sent once; who receives them has all vectors,
    and no index.
    """

    name: str
    values: Floats = field(metadata=_ROWS)
    index: Numbers | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RawOutput:
    """Distinct vectors f32 [D + 1, dim], row 0 zeros; index i64 [B * sample_fixed_size].

    ``index`` holds 1 + the number of the distinct id at that position, 0 for padding.
    """

    name: str
    rows: Floats = field(metadata=_ROWS)
    index: Indices
    sample_fixed_size: int


@dataclass(frozen=True, slots=True)
class JaggedOutput:
    """Distinct vectors f32 [D, dim]; index i64 [N] into them; offsets i64 [B + 1]."""

    name: str
    rows: Floats = field(metadata=_ROWS)
    index: Indices
    offsets: Indices


SlotOutput = PooledOutput | RawOutput | JaggedOutput


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Outputs in the order of the batch's features; ``ref`` is None without gradients."""

    outputs: tuple[SlotOutput, ...]
    ref: int | None


@dataclass(frozen=True, slots=True)
class SlotGradient:
    """Gradient of one slot's output: f32 or f16, [B, dim] if pooled, else [D, dim]."""

    name: str
    # None: it has no part in the loss.
    gradient: NDArray[np.float32] | NDArray[np.float16] | None = field(metadata=_GRADIENTS)


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of one table's rows."""

    table: int
    lr: float


@dataclass(frozen=True, slots=True)
class BatchGradients:
    """Gradients of one lookup."""

    ref: int
    update_id: tuple[int, int]
    gradients: tuple[SlotGradient, ...]
    scale: float = 1.0  # what the loss was multiplied with, and the ranks of their mean
    learning_rates: tuple[LearningRate, ...] = ()  # other tables: the registered optimizer's
    num_averaged: int = 1  # ranks over which the gradients are averaged, a part of ``scale``
    # Whether each is a sum over samples, of a distinct id, whatever the slot's pooling: such
    # ones are not corrected by samples.
    is_by_id: bool = False


@dataclass(frozen=True, slots=True)
class FeatureStats:
    """An embedding-worker's statistics of one feature, evaluation included."""

    name: str
    dim: int
    num_samples: int
    num_empty: int  # samples without an id
    num_ids: int
    registers: NDArray[np.uint8]  # [4096], a sketch of its distinct ids


@dataclass(frozen=True, slots=True)
class TableInfo:
    """The rows of a feature, as the embedding config has them."""

    feature: str
    group: str  # of the features that share these rows
    features: tuple[str, ...]  # all of the group
    dim: int
    dtype: str  # in which values are kept
    index_bits: int  # of an id; higher ones are cut off, or refused with ``strict_ids``
    strict_ids: bool
    hash_stack_rounds: int  # rows that are summed for an id; 0: an id has a row of its own
    num_servers: int


@dataclass(frozen=True, slots=True)
class IDsRequest:
    """Rows by id, of one feature; an id may come more than once."""

    feature: str
    ids: Signs
    with_states: bool
    with_initial: bool  # as of ``RowsRequest``


@dataclass(frozen=True, slots=True)
class IDRows:
    """Rows to be written, one an id; ids are distinct."""

    feature: str
    ids: Signs
    values: Floats  # [n, dim]
    states: NDArray[np.uint32] | None  # [n, words]; None: kept, and those of new rows


@dataclass(frozen=True, slots=True)
class FeatureScan:
    """As ``ScanRequest``, of one server's rows of a feature."""

    feature: str
    server: int
    cursor: int
    max_rows: int
    with_states: bool


@dataclass(frozen=True, slots=True)
class FeatureOrder:
    """Names of what a model receives, in the order that its training began with."""

    ids: tuple[str, ...]
    dense: tuple[str, ...]  # empty where they have no names, as are the labels
    labels: tuple[str, ...]


class EmbeddingWorker(Protocol):
    """The methods of an embedding-worker."""

    def register(self, features: IDFeatures) -> int: ...
    def lookup(self, ref: int, is_training: bool) -> LookupResult: ...
    def lookup_direct(self, features: IDFeatures) -> LookupResult: ...
    def update(self, gradients: BatchGradients) -> UpdateReport: ...
    def release(self, ref: int) -> None: ...
    def configure(self, settings: HyperParameters) -> None: ...
    def register_optimizer(self, settings: OptimizerSettings) -> None: ...
    def feature_order(self) -> FeatureOrder | None: ...
    def fix_feature_order(
        self, order: FeatureOrder, replaces: FeatureOrder | None
    ) -> FeatureOrder: ...
    def tables_at_rate(self, group: str | None) -> tuple[int, ...]: ...
    def ready_for_serving(self) -> bool: ...
    def set_embedding(self, tables: Sequence[TableEntries]) -> None: ...
    def table_info(self, feature: str) -> TableInfo: ...
    def read_rows(self, request: IDsRequest) -> FoundRows: ...
    def write_rows(self, rows: IDRows) -> None: ...
    def delete_rows(self, feature: str, ids: Signs) -> int: ...
    def scan_rows(self, request: FeatureScan) -> RowPiece: ...
    def count_rows(self, feature: str) -> list[int]: ...
    def get_embedding_size(self) -> list[int]: ...
    def clear_embeddings(self) -> None: ...
    def begin_cut(self, request: CutRequest) -> tuple[CutInfo, ...]: ...
    def write_cut(self, request: WriteRequest) -> None: ...
    def cut_status(self, cut_id: int) -> tuple[CutStatus, ...]: ...
    def end_cut(self, cut_id: int, committed: bool) -> None: ...
    def load(self, request: LoadRequest) -> tuple[LoadStatus, ...]: ...
    def stats(self) -> Mapping[str, int]: ...
    def server_stats(self) -> list[Mapping[str, int]]: ...
    def feature_stats(self) -> tuple[FeatureStats, ...]: ...


# --- data-loader to nn-worker ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedArray:
    """A dense feature or label: array [B, ...] of any dtype that a batch takes."""

    name: str
    array: AnyArray


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """Where the ids of a batch are: a ref of an embedding-worker."""

    worker: int  # replica index
    ref: int


@dataclass(frozen=True, slots=True)
class StreamedBatch:
    """The part of a batch that goes to an nn-worker; its ids are at the embedding-worker."""

    batch_id: int  # i * n + l of batch i of data-loader l of n; its rank is id % world_size
    batch_size: int
    requires_grad: bool
    ids: RemoteRef
    non_id_type_features: tuple[NamedArray, ...]
    labels: tuple[NamedArray, ...]
    meta: NDArray[np.uint8] | None
    epoch: int = 0  # of its data-loader; one pass takes one


@dataclass(frozen=True, slots=True)
class StreamOpening:
    """A data-loader begins, or meets an nn-worker that was restarted."""

    loader: int
    num_loaders: int
    incarnation: int  # drawn by each DataCtx
    first_batch_id: int  # the oldest that it holds unacknowledged, or the next it will send
    epoch: int = 0  # of that batch


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a data-loader's stream at the rank."""

    next_batch_id: int  # those below were received, from this incarnation or the one before
    wanted: tuple[int, ...]  # to be sent again: no embedding-worker holds their ids
    unfinished: tuple[int, ...] = ()  # have not ended, and may be wanted yet
    is_resumed: bool = False  # the rank goes on from a checkpoint in this pass


@dataclass(frozen=True, slots=True)
class StreamNews:
    """Changes at the rank since the ``version`` that the data-loader received last."""

    version: int
    credits: int  # batches that may have been delivered in all since the opening
    acknowledged: tuple[int, ...]  # have ended, and their ids need not be kept
    wanted: tuple[int, ...]  # to be registered again and relocated: their refs are unknown
    is_closed: bool  # nothing more is read, and nothing more need be sent


class NNWorker(Protocol):
    """The methods of an nn-worker. ``stream`` is (loader, incarnation) of an opening."""

    @property
    def replica_index(self) -> int: ...  # the rank
    @property
    def replica_size(self) -> int: ...  # the world size
    def open_stream(self, opening: StreamOpening) -> StreamState: ...
    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None: ...
    def relocate(self, stream: tuple[int, int], batch_id: int, ids: RemoteRef) -> None: ...
    def end_stream(
        self, stream: tuple[int, int], next_batch_id: int, failure: str, epoch: int
    ) -> None: ...  # the last batch that it sent, to any rank, is of this epoch
    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews: ...


# --- the end of a job -----------------------------------------------------------------------


class Job(Protocol):
    """The methods of every server, beside those of its role and ``hello``."""

    def finish_job(self, status: int, took_part: bool) -> None: ...
    def job_status(self, watcher: str) -> int | None: ...
