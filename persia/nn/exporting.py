"""``export`` of a whole model with modules: one program, and the rows that it looks up.

    forward of the model --torch.export--> a program with ``persia::lookup`` nodes
    these nodes ------------------------> ``persia::served_lookup``, by the names of tables
    rows of the tables -----------------> a checkpoint in the version's folder

The program takes ids and dense tensors as ``forward`` does, so that a request has them by their
names. It is traced, and compared with the model, in another process, which has no rows: there
each id has a row drawn by the id, so that no two are alike.
"""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from persia import ops
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import PER_ID
from persia._core.kernels.optim import RowOptimizer
from persia._files import catalog
from persia._files.manifest import Manifest
from persia._files.mapping import Mapping as SchemaMapping
from persia._files.open import open_storage
from persia._files.part_writer import PartWriter
from persia._files.rows import rows_of
from persia._files.schema import SavedSchema
from persia._modules.homes import has_home, home_of
from persia._modules.tables import ModuleTable, find
from persia._serving.bundle import ROWS, Missing, ServedFeature, ServedRows
from persia._serving.export import DenseCut, ExportOptions, model_folder, write_version
from persia._serving.module_lookups import served_lookup, use_rows
from persia._serving.program import TOLERANCE, Layout, Tensors, served_tensor
from persia._training.checkpoint import CheckpointWriter, unwrap
from persia.config import EmbeddingSchema, load_configs
from persia.errors import ConfigError, DataError
from persia.nn.base import RowModule
from persia.nn.checkpoints import await_updates, by_rank_0, stores_of
from persia.nn.modules import Embedding

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray
    from torch.export import ExportedProgram
    from torch.fx import Node

    from persia._modules.homes import RowHome
    from persia._rpc.messages import Floats

    Stores = Sequence[tuple[RowHome, list[ModuleTable]]]

PaddingRows = dict[tuple[str, int], list[float]]  # by name of a table and padding id

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def export(
    model: torch.nn.Module,
    dst: str | os.PathLike[str],
    inputs: Any,
    *,
    ragged: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    missing: Missing | Mapping[str, Missing] = "zeros",
    keep_last: int = 3,
    tolerance: float = TOLERANCE,
) -> int:
    """Write a model with modules of ``persia.nn``, and its rows, as a version to be served.

    Served scores are the model's in ``eval()``, bit for bit, in one thread of torch; where
    torch has a shorter way in evaluation, as for attention, within ``tolerance``. Inputs are
    named as ``forward``'s arguments, or as the keys of a mapping among them. Of several ranks
    each calls it.

    Args:
        model: It stays as it is.
        dst: The folder of the model in a repository, ``models/clicks``.
        inputs: A batch, as ``forward`` takes it: a tensor, a tuple of arguments, or a mapping.
            Each tensor is [B, ...]; a pair (ids [N], offsets [B + 1]) is ragged.
        ragged: Of arguments that are ids [N], by name the argument that is their offsets, [B]
            or [B + 1].
        outputs: Names of the outputs, in their order; None keeps the model's own.
        missing: By name of a table, or for all, what an id without a row is: ``zeros``,
            ``initial`` or ``mean``.
        keep_last: Versions that stay, at least.
        tolerance: Largest difference of the exported program to the model.

    Returns:
        The number of the version; 0 on ranks other than 0, which writes.

    Raises:
        ConfigError: If the model has no tables, or cannot be exported.
        CheckpointError: If a file cannot be written.
        ServiceError: If another rank failed, has gone or did not come.
    """
    options = ExportOptions(
        outputs=outputs,
        missing=missing,
        keep_last=keep_last,
        tolerance=tolerance,
    )
    model_folder(dst)
    own = unwrap(getattr(model, "_orig_mod", model))
    stores = stores_of(own)
    cut = _cut(own, inputs, ragged or {}, options, stores)
    schema = _schema(stores, options)
    versions = [0]

    def write() -> None:
        versions[0] = write_version(
            dst, cut, schema, options, lambda folder: _write_rows(folder, stores, schema)
        )

    by_rank_0("export", lambda: await_updates(list(stores)), write)
    return versions[0]


# --- what the model is called with ----------------------------------------------------------


@dataclass(slots=True)
class _TensorPlace:
    """Stands for a tensor in what ``forward`` is called with."""

    index: int = -1  # among the flat tensors
    has_no_end: bool = False  # offsets without the number of all ids behind them


@dataclass
class _Inputs:
    """The tensors of a call, by name, and the call without them."""

    tensors: dict[str, tuple[_TensorPlace, torch.Tensor]] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)  # of ids their offsets
    arguments: tuple[Any, Any] = ((), {})

    @classmethod
    def of(cls, model: torch.nn.Module, given: Any, ragged: Mapping[str, str]) -> _Inputs:
        signature = inspect.signature(model.forward)
        try:
            if isinstance(given, Mapping):
                try:
                    bound = signature.bind(**given)
                except TypeError:
                    bound = signature.bind(given)
            else:
                bound = signature.bind(*(given if isinstance(given, tuple) else (given,)))
        except TypeError as exc:
            raise ConfigError(
                f"inputs: expected what {type(model).__name__}.forward takes: {exc}"
            ) from None
        found = cls(pairs=dict(ragged))
        for name, value in bound.arguments.items():
            bound.arguments[name] = found._take(name, value)
        found.arguments = bound.args, bound.kwargs
        for name in (*ragged, *ragged.values()):
            if name not in found.tensors:
                raise ConfigError(
                    f"ragged: expected inputs, which are {', '.join(found.tensors)}, got "
                    f"{name!r:.80}"
                )
        return found

    def _take(self, name: str, value: Any) -> Any:
        """Return a value with places in place of its tensors, which are kept by name."""
        if isinstance(value, torch.Tensor) and not value.is_nested:
            if name in self.tensors:
                raise ConfigError(f"inputs: expected each name once, got {name!r} twice")
            place = _TensorPlace()
            self.tensors[name] = place, value
            return place
        if isinstance(value, tuple) and _is_ragged(value):
            edges = f"{name}.offsets"
            self.pairs[name] = edges
            return self._take(name, value[0]), self._take(edges, value[1])
        if isinstance(value, Mapping):
            return {key: self._take(str(key), one) for key, one in value.items()}
        if type(value) in (list, tuple):
            numbered = enumerate(value)
            return type(value)(self._take(f"{name}_{place}", one) for place, one in numbered)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ConfigError(
            f"input {name!r}: expected a tensor, or a list, tuple or mapping of them, got "
            f"{type(value).__name__}; ragged ids are given as (ids [N], offsets [B + 1])"
        )

    def number(self) -> tuple[list[str], list[str], Tensors]:
        """Number the places; return names of plain and of ragged inputs, and flat tensors."""
        edges = set(self.pairs.values())
        plain = [one for one in self.tensors if one not in self.pairs and one not in edges]
        size = None
        flat: list[torch.Tensor] = []
        for name in plain:
            place, tensor = self.tensors[name]
            size = len(tensor) if size is None and tensor.ndim else size
            if tensor.ndim == 0 or len(tensor) != size:
                raise ConfigError(
                    f"input {name!r}: expected [{size or 'B'}, ...], one entry a sample, got "
                    f"{list(tensor.shape)}; of ids with offsets write ragged={{ids: offsets}}, "
                    "and wrap a model that takes features as [F, B] in one that takes [B, F]"
                )
            place.index = len(flat)
            # torch cannot send the others; ids are known by their bits.
            flat.append(tensor.long() if tensor.dtype in _UNSIGNED else tensor)
        for name, its_edges in self.pairs.items():
            (place, ids), (ends, offsets) = self.tensors[name], self.tensors[its_edges]
            for one, values in ((name, ids), (its_edges, offsets)):
                if not _is_integer(values.dtype):
                    raise ConfigError(
                        f"input {one!r}: expected integers, ids and offsets, got {values.dtype}"
                    )
            ids, offsets = ids.long(), offsets.long()  # as a request has them
            if size is None:  # only the samples' ends say how many there are
                has_end = len(offsets) > 0 and int(offsets[-1]) == len(ids)
                size = len(offsets) - has_end
            ends.has_no_end = len(offsets) == size
            if ends.has_no_end:
                offsets = torch.cat([offsets, offsets.new_full((1,), len(ids))])
            if len(offsets) != size + 1:
                raise ConfigError(
                    f"input {its_edges!r}: expected offsets [{size}] or [{size + 1}], got "
                    f"{list(offsets.shape)}"
                )
            place.index, ends.index = len(flat), len(flat) + 1
            flat += [ids, offsets]
        return plain, list(self.pairs), tuple(one.detach().cpu().clone() for one in flat)


def _is_ragged(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is ids [N] and the offsets [B + 1] of samples in them."""
    if len(value) != 2 or not all(isinstance(one, torch.Tensor) for one in value):
        return False
    ids, edges = value
    if ids.ndim != 1 or edges.ndim != 1 or edges.is_floating_point() or not len(edges):
        return False
    return int(edges[0]) == 0 and int(edges[-1]) == len(ids) and bool((edges.diff() >= 0).all())


def _cut(
    model: torch.nn.Module,
    given: Any,
    ragged: Mapping[str, str],
    options: ExportOptions,
    stores: Stores,
) -> DenseCut:
    """Copy a model without its rows, and take what it is called with."""
    found = _Inputs.of(model, given, ragged)
    plain, jagged, tensors = found.number()
    tables = [table for _, here in stores for table in here]
    options.check_names([table.name for table in tables])
    layout = ModuleLayout(
        len(plain),
        tuple(plain),
        tuple(jagged),
        ("jagged",) * len(jagged),
        found.arguments,
        _padding_rows(model),
    )
    return DenseCut(
        _copied(model),
        tensors,
        tuple(ServedFeature(name, "ids", 1) for name in jagged),
        tuple(served_tensor(*one) for one in zip(plain, tensors, strict=False)),
        layout,
        tuple(
            ServedFeature(table.name, "jagged", table.dim, *options.policies_of(table.name))
            for table in tables
        ),
    )


def _padding_rows(model: torch.nn.Module) -> PaddingRows:
    """Return, by table and padding id, the row that the model has for it in evaluation."""
    found: PaddingRows = {}
    for module in model.modules():
        padding = module.padding_idx if isinstance(module, Embedding) else None
        if isinstance(module, Embedding) and padding is not None:
            (table,) = module._tables
            ids = np.array([padding % (1 << 64)], np.uint64)
            (row,) = home_of(table).look_up([FeatureBatch.from_single(table.name, ids)])
            found[table.name, padding] = row[0].tolist()
    return found


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy on the CPU for evaluation, whose modules share no anchor with others."""
    modules = {}
    for one in model.modules():
        if isinstance(one, RowModule):
            module = type(one).__new__(type(one))
            module.__setstate__(one.__getstate__())
            for name, anchor in module._parameters.items():
                if anchor is not None:
                    module._parameters[name] = torch.nn.Parameter(
                        anchor.detach().clone(), requires_grad=False
                    )
            modules[id(one)] = module
    try:
        copied = copy.deepcopy(model, modules)
    except Exception as exc:
        raise ConfigError(
            f"model {type(model).__name__}: cannot be copied by copy.deepcopy: {exc}"
        ) from exc
    return copied.to("cpu").eval().requires_grad_(False)


# --- the program ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleLayout(Layout):
    """How flat tensors become what a model is called with that looks up by itself.

    They are plain tensors [B, ...], then ids [N] and offsets [B + 1] of each ragged input.
    """

    advice: ClassVar[str] = ""
    # Positional ones and by name, with a _TensorPlace each.
    arguments: tuple[Any, Any] = ((), {})
    padding_rows: PaddingRows = field(default_factory=dict)

    def call(self, model: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the model as it was called with the sample."""
        args, kwargs = _filled(self.arguments, tensors)
        try:
            return model(*args, **kwargs)
        except DataError as exc:
            if not self.dense_names:
                raise
            raise DataError(
                f"{exc}; offsets among {', '.join(self.dense_names)} are to be named by "
                "ragged={ids: offsets}"
            ) from exc

    @contextmanager
    def rows(self, model: torch.nn.Module) -> Iterator[None]:
        """Have the program look up where the modules do: in drawn rows if they have none."""
        # Those of the model itself: other models may have tables of the same names.
        modules = [one for one in model.modules() if isinstance(one, RowModule)]
        tables = {table.name: table for module in modules for table in module._tables}
        without = [table for table in tables.values() if not has_home(table)]
        for table in without:  # this is a process without rows
            table.home = DrawnRows(table.dim)
        for (name, padding), row in self.padding_rows.items():
            tables[name].padding_rows[padding] = np.array(row, np.float32)

        def rows_of(asked: Sequence[FeatureBatch]) -> list[Floats]:
            found: list[Floats] = []
            for one in asked:
                found += home_of(tables[one.name]).look_up([one])
            return found

        try:
            with use_rows(rows_of):
                yield
        finally:
            for table in without:
                table.home = None

    def finish(self, program: ExportedProgram) -> tuple[int, ...]:
        """Put the served operator in the place of each lookup."""
        sources = _serve(program.graph_module, self.padding_rows)
        names = program.graph_signature.user_inputs
        places = {node.name: node for node in sources}
        return tuple(
            number
            for number, name in enumerate(names)
            # Ids may be computed from others: columns of a float matrix, or a mask.
            if name in places and _is_integer(places[name].meta["val"].dtype)
        )


def _serve(module: torch.fx.GraphModule, padding_rows: PaddingRows) -> set[Node]:
    """Put the served operator in the place of each lookup; return the inputs of their ids.

    Parts of a model are graphs of their own, as below ``torch.no_grad()``.
    """
    ids: list[Node] = []
    for node in list(module.graph.nodes):
        if node.target is ops.lookup.default:
            node = _replace(module.graph, node, padding_rows)
        if node.target is served_lookup.default:
            ids.append(node.args[0])
        given = [one for one in tree_leaves(node.args) if isinstance(one, torch.fx.Node)]
        for one in given:
            part = getattr(module, str(one.target), None) if one.op == "get_attr" else None
            if isinstance(part, torch.fx.GraphModule):
                inputs = part.graph.find_nodes(op="placeholder")
                used = _serve(part, padding_rows)
                pairs = zip(inputs, given[len(given) - len(inputs) :], strict=True)
                ids += [value for inner, value in pairs if inner in used]
    module.graph.lint()
    module.recompile()
    return _inputs_of(ids)


def _is_integer(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be ids."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _replace(graph: torch.fx.Graph, node: Any, padding_rows: PaddingRows) -> Node:
    _, _, ids, offsets, weights, keys, modes, dims, padding, *_ = node.args
    tables = [find(key).name for key in keys]
    row = padding_rows.get((tables[0], padding)) if modes == [PER_ID] else None
    arguments = ids, offsets, weights, tables, modes, dims, padding, row
    with graph.inserting_before(node):
        served = graph.call_function(served_lookup.default, arguments)
    served.meta = {**node.meta, "val": node.meta["val"][0]}
    for part in list(node.users):  # of its two outputs, the second is for a backward
        if part.args[1] == 0:
            part.replace_all_uses_with(served)
        graph.erase_node(part)
    graph.erase_node(node)
    return served


def _inputs_of(nodes: Sequence[Node]) -> set[Node]:
    """Return the inputs of a graph that nodes are computed from."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return {node for node in found if node.op == "placeholder"}


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a value with tensors at their places."""
    if isinstance(value, _TensorPlace):
        tensor = tensors[value.index]
        return tensor[:-1] if value.has_no_end else tensor
    if isinstance(value, Mapping):
        return {key: _filled(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(one, tensors) for one in value)
    return value


class DrawnRows:
    """What modules look up in while they are traced: a row of each id, drawn by the id."""

    trains, num_loads = False, 0

    def __init__(self, dim: int) -> None:
        self._columns = np.arange(dim, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)

    def look_up(self, features: Sequence[FeatureBatch]) -> list[Floats]:
        """Return rows [D, dim] of the distinct ids of each feature, in [-0.5, 0.5)."""
        return [self._rows(one.distinct) for one in features]

    def _rows(self, ids: NDArray[np.uint64]) -> Floats:
        mixed = ids[:, None] * np.uint64(0x9E3779B97F4A7C15) + self._columns
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        drawn = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        rows: Floats = drawn - np.float32(0.5)
        return rows


# --- the rows ---------------------------------------------------------------------------------


def _schema(stores: Stores, options: ExportOptions) -> EmbeddingSchema:
    """Return the embedding config of a version: each table gives the rows of its ids."""
    given = options.missing
    is_initial = "initial" in (given.values() if isinstance(given, Mapping) else [given])
    if len(stores) > 1 and is_initial:
        raise ConfigError(
            "missing: expected 'zeros' or 'mean' where tables have several optimizers, "
            "each with initial values of its own, got 'initial'"
        )
    slots: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    settings: dict[str, dict[str, Any]] = {}
    bits, is_strict = set(), False
    for home, tables in stores:
        schema = _schema_of(home)
        bits.add(schema.prefix_bits)
        is_strict |= schema.strict_ids
        sharing: dict[str, list[str]] = {}
        for one in tables:
            slot = schema.slots[one.name]
            slots[one.name] = {"dim": slot.dim, "pooling": "jagged"}
            if slot.id_hash is not None:
                slots[one.name]["id_hash"] = slot.id_hash
            initial = schema.tables[slot.table].initialization
            if is_initial and initial is not None:
                slots[one.name]["initialization"] = {
                    "method": initial.method,
                    **initial.options,
                }
            sharing.setdefault(slot.group, []).append(one.name)
        for members in sharing.values():  # by a member's name, as stores may have equal ones
            groups[members[0]] = members
            settings[members[0]] = {
                "dtype": schema.tables[schema.slots[members[0]].table].dtype
            }
    limit = (1 << min(bits)) - 1
    if len(bits) > 1 or len(groups) > limit:
        raise ConfigError(
            f"model: expected tables whose ids have as many bits, and at most {limit} of them "
            f"in one version, got {len(groups)} of {sorted(64 - one for one in bits)} bits"
        )
    return EmbeddingSchema.load(
        {
            "feature_index_prefix_bit": min(bits),
            "strict_ids": is_strict,
            "slots_config": slots,
            "feature_groups": groups,
            "group_settings": settings,
        }
    )


def _schema_of(home: RowHome) -> EmbeddingSchema:
    known = getattr(home.worker, "schema", None)
    return known if isinstance(known, EmbeddingSchema) else load_configs(None, None)[0]


def _write_rows(
    folder: Path, stores: Stores, schema: EmbeddingSchema
) -> tuple[ServedRows, int]:
    """Write the rows of all tables into one checkpoint, and those of no others.

    They go from file to file: of a store there may be more than this process has memory for.
    """
    storage = open_storage(str(folder))
    own = catalog.new_id(storage)
    # No row is stepped where it is served, so none has a state.
    plain = [RowOptimizer("sgd", 0.0, lr=0.0)] * len(schema.tables)
    wanted = SavedSchema.of(schema, plain)
    with PartWriter(storage, f"{own}/server0") as writer:
        for home, tables in stores:
            part = folder.with_name("part")
            dumped = CheckpointWriter(home.worker)
            dumped.finish(dumped.begin(0, dict), str(part), 1, blocking=True)
            for read in catalog.chains(str(part)):
                last = read.manifests[-1]
                mapping = SchemaMapping.between(
                    last.schema, wanted, only=[one.name for one in tables]
                )
                needed = [
                    replace(one, parts=tuple(mapping.parts_for(one.parts, 0, 1)))
                    for one in read.manifests
                ]
                for source, block in rows_of(read.storage, needed):
                    for name, rows in mapping.apply(source.table, block):
                        writer.add(name, rows)
            shutil.rmtree(part)
        parts = writer.finish()
    saved = last.extras["servers"]
    kept = {name: saved[name] for name in ("hyper_parameters", "optimizer")}
    manifest = Manifest(
        id=own,
        kind="full",
        step=0,
        num_servers=1,
        schema=wanted,
        parts=parts,
        extras={"servers": kept},
    )
    catalog.publish(storage, manifest)
    return ServedRows(ROWS, own), 0
