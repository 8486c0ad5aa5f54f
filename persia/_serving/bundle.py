"""A version of a model as a folder: what is served, the dense net, and where the rows are.

    <repository>/<model>/<version>/persia-model.json     what the files are, and their checksums
                                   dense.pt2             the dense net; or dense.ts, of
                                                         TorchScript; or dense.aot.pt2,
                                                         machine code
                                   embedding_config.yml
                                   rows/                 a checkpoint, unless rows are elsewhere
    <repository>/<model>/current.json                    {"version": n}, which is served

A version is written aside and appears whole, by one rename. Nothing of a bundle is unpickled,
and nothing is read through a link.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash

from persia._files.json_models import Record, parse, read_json
from persia._files.manifest import NUM_BUCKETS, now
from persia._files.open import AllowedRoots
from persia._files.storage import write_atomic
from persia.config import EmbeddingSchema, Slot, schema_fingerprint
from persia.config.document import Expect, InvalidValue, Listed, Named, integer, show
from persia.errors import CheckpointError, ConfigError
from persia.utils import parse_yaml
from persia.version import __version__

MANIFEST, CURRENT, SCHEMA, ROWS = (
    "persia-model.json",
    "current.json",
    "embedding_config.yml",
    "rows",
)
# Name of the dense net's file by format.
DENSE = {"export": "dense.pt2", "torchscript": "dense.ts", "aot": "dense.aot.pt2"}
FORMAT, VERSION = "persia-model", 1
MAX_JSON_BYTES = 16 << 20
MAX_FILE_BYTES = 1 << 36
MAX_FILES = 100_000

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_Checksum = Annotated[str, Expect("32 hexadecimal digits", pattern="^[0-9a-f]{32}$")]
_Name = Annotated[
    str, Expect("letters, digits and ._-, 100 at most", pattern=f"^{NAME.pattern}$")
]
# Versions of a training have one graph and one embedding config, which take the interpreter
# milliseconds: what was found of how many is kept, and up to which size.
NUM_KEPT, MAX_KEPT_BYTES = 16, 1 << 20
_Dim = Annotated[int, integer(-1, 1 << 31)]
Missing = Literal["zeros", "initial", "mean"]
OnDelete = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True)
class ServedFeature(Record):
    """An id feature, in the order in which the model receives them."""

    name: str
    # How its vectors are given to the model; ``ids``: not at all, the program looks them up.
    kind: Literal["pooled", "raw", "jagged", "ids"]
    dim: Annotated[int, integer(1, 1 << 20)]
    missing: Missing = "zeros"  # what an id without a row is
    on_delete: OnDelete = "drop"  # whether the log's deletions are followed
    optional: bool = False  # a request need not have it: no sample has an id then
    # Whether training has ``IDTypeFeatureWithSingleID``, so that a table [B, L] is a mistake.
    single: bool = field(default=False, metadata={"optional": True})


@dataclass(frozen=True, slots=True)
class ServedTensor(Record):
    """A dense input or an output, of one sample: the batch comes before ``shape``."""

    name: str
    dtype: str  # as numpy calls it
    shape: Listed[tuple[_Dim, ...]]  # -1 is any size


@dataclass(frozen=True, slots=True)
class ServedRows(Record):
    """Where the rows of a version are."""

    url: str  # of a checkpoint; "rows" is the bundle's own folder
    checkpoint: str  # id of it
    # Folder of a change log to follow, None for none, and the packets that have this cut.
    log: str | None = None
    packets: Named[Annotated[int, integer()]] = field(default_factory=dict)

    def check(self) -> None:
        for server in self.packets:
            if not server.isdecimal() or int(server) >= NUM_BUCKETS:
                raise InvalidValue(f"expected numbers of servers, got {server!a}", "packets")


@dataclass(frozen=True, slots=True)
class ServedFile(Record):
    """A file of a bundle; ``path`` is its name in the folder."""

    num_bytes: Annotated[int, integer(0, MAX_FILE_BYTES)] = field(metadata={"key": "bytes"})
    xxh3_128: _Checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(Record):
    """What ``persia-model.json`` says."""

    name: _Name
    version: Annotated[int, integer(1, 10**18)]
    created: str = field(default_factory=now)
    writer: str = __version__  # of PERSIA
    torch: str  # version that exported it
    format: Literal["export", "torchscript", "aot"] = "export"
    processor: str = ""  # that the dense net was compiled for
    step: Annotated[int, integer()] = 0  # the cut comes after this step
    features: Listed[tuple[ServedFeature, ...]]
    dense: Listed[tuple[ServedTensor, ...]]
    has_dense_names: bool = False  # whether the model may ask dense tensors by name
    # Of a model with modules of persia.nn: the tables that its program looks up in, and which
    # of its dense inputs are ids there.
    tables: Listed[tuple[ServedFeature, ...]] = ()
    id_inputs: Listed[tuple[str, ...]] = ()
    outputs: Listed[tuple[ServedTensor, ...]]
    # Whether a sample's outputs depend on that sample alone, so that requests may be joined.
    is_batch_independent: bool = False
    # Fewest samples that the program takes: one that was traced may be wrong of a single one.
    min_samples: Annotated[int, integer(1, 2)] = 1
    # Largest |difference| of the program's outputs to the model's own, on samples.
    max_difference: float = 0.0
    rows: ServedRows
    files: Named[ServedFile]

    def check(self) -> None:
        names = [*(one.name for one in self.features), *(one.name for one in self.dense)]
        if len(set(names)) < len(names):
            raise InvalidValue("expected each input's name once")
        for name in (DENSE[self.format], SCHEMA):
            if name not in self.files:
                raise InvalidValue(f"expected {name} among them", "files")
        for name in self.files:
            if not _FILE.fullmatch(name) or name in (MANIFEST, ROWS):
                raise InvalidValue(f"expected names of files, got {name!a}", "files")

    @classmethod
    def prepare(cls, value: object) -> object:
        """Give files that were written before there were tables none of them."""
        if isinstance(value, Mapping):
            return {"tables": [], "id_inputs": [], **value}
        return value

    def encode(self) -> bytes:
        """Return the file's bytes, read back once so that no reader refuses them."""
        content = {"format": FORMAT, "format_version": VERSION, "model": self.to_json()}
        data = json.dumps(content, indent=1, allow_nan=False).encode()
        ServedModel.decode(data, MANIFEST)
        return data

    @staticmethod
    def decode(data: bytes, path: str) -> ServedModel:
        """Return what a file says, every value of it checked."""
        content = read_json(dict[str, Any], parse(data, path), path)
        named, version = content.get("format"), content.get("format_version")
        if named != FORMAT or type(version) is not int or version != VERSION:
            raise CheckpointError(
                f'{path}: expected format "{FORMAT}" of version {VERSION}, got {show(named)} '
                f"of {show(version)}"
            )
        return read_json(ServedModel, content.get("model"), f"{path}: model")


def check_name(name: str) -> str:
    """Return the name of a model, if it can be a folder's."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name of a model: expected letters, digits and ._-, 100 at most, got {name!r:.120}"
        )
    return name


class Bundle:
    """One version in its folder; ``model`` is what ``persia-model.json`` says of it."""

    def __init__(self, folder: Path, model: ServedModel) -> None:
        self.folder = folder
        self.model = model

    @classmethod
    def open(cls, folder: Path | str) -> Bundle:
        """Read what a folder's bundle is; no other file of it is read yet.

        Raises:
            CheckpointError: If there is none, it is damaged, or not of this folder.
        """
        path = Path(folder)
        data = read_plain(path / MANIFEST, MAX_JSON_BYTES)
        model = ServedModel.decode(data, str(path / MANIFEST))
        if path.name != str(model.version):
            raise CheckpointError(
                f"{path}: expected a folder named {model.version}, as its version is"
            )
        return cls(path, model)

    def verify(self) -> None:
        """Check sizes and checksums of all files, and that none is a link.

        Rows have checksums of their own, which are checked when they are loaded.

        Raises:
            CheckpointError: Names the file.
        """
        _check_tree(self.folder)
        for name in self.model.files:
            self.read(name)

    def read(self, name: str) -> bytes:
        """Return a file, verified."""
        file = self.model.files[name]
        path = self.folder / name
        data = read_plain(path, file.num_bytes)
        if len(data) != file.num_bytes or _checksum(data) != file.xxh3_128:
            raise CheckpointError(
                f"{path}: expected {file.num_bytes} bytes with checksum {file.xxh3_128}, got "
                f"{len(data)} with {_checksum(data)}: the file is damaged"
            )
        return data

    def schema(self) -> EmbeddingSchema:
        """Return the embedding config, verified."""
        data = self.read(SCHEMA)
        try:
            return (_schema_of if len(data) > MAX_KEPT_BYTES else _kept_schema_of)(data)
        except ConfigError as exc:
            raise CheckpointError(f"{self.folder / SCHEMA}: {exc}") from exc

    def check_places(self, allowed: Sequence[str]) -> None:
        """Refuse rows and a change log that are neither in this folder nor below those."""
        roots = AllowedRoots(allowed, f"the places for rows of {self.folder}")
        rows = self.model.rows
        for place in ("" if rows.url == ROWS else rows.url, rows.log or ""):
            if place:
                roots.check(place)

    @property
    def rows_url(self) -> str:
        """Where the checkpoint of the rows is."""
        url = self.model.rows.url
        return str(self.folder / ROWS) if url == ROWS else url


def _schema_of(data: bytes) -> EmbeddingSchema:
    content = parse_yaml(data, SCHEMA)
    if not isinstance(content, Mapping):  # a text would be taken for another file's name
        raise ConfigError(f"embedding config: expected a mapping, got {show(content)}")
    return EmbeddingSchema.load(content)


_kept_schema_of = functools.lru_cache(NUM_KEPT)(_schema_of)


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds, which is no link and of no more bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path}: expected a plain file")
            if found.st_size > max_bytes:
                raise CheckpointError(
                    f"{path}: expected at most {max_bytes} bytes, got {found.st_size}"
                )
            # Not max_bytes, which a manifest may say: so much memory would be taken first.
            return file.read(found.st_size + 1)
    except OSError as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _check_tree(folder: Path) -> None:
    """Refuse links, and what is neither file nor folder, anywhere in a bundle."""
    num_files, todo = 0, [folder]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError as exc:
            raise CheckpointError(f"{folder}: cannot be read: {exc.strerror}") from exc
        for entry in entries:
            num_files += 1
            if num_files > MAX_FILES:
                raise CheckpointError(f"{folder}: expected at most {MAX_FILES} files, got more")
            if entry.is_dir(follow_symlinks=False):
                todo.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{entry.path}: expected a file, got a link or a device")


# --- versions of a model ------------------------------------------------------------------


def versions(model_folder: Path) -> list[int]:
    """Return the numbers of the versions that are there, ascending."""
    try:
        names = [path.name for path in model_folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"{model_folder}: cannot be read: {exc.strerror}") from exc
    found = [int(name) for name in names if NUMBER.fullmatch(name)]
    return sorted(one for one in found if (model_folder / str(one) / MANIFEST).is_file())


def current_version(model_folder: Path) -> int | None:
    """Return the version that ``current.json`` names; None without the file."""
    path = model_folder / CURRENT
    if not os.path.lexists(path):
        return None
    content = read_json(dict[str, Any], parse(read_plain(path, 4096), str(path)), str(path))
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f'{path}: expected {{"version": n}}, got {show(content)}')
    return version


def set_current(model_folder: Path, version: int) -> None:
    """Make a version the one that is served, an older one too; it has to be there."""
    if version not in versions(model_folder):
        raise CheckpointError(
            f"{model_folder}: expected one of the versions {versions(model_folder)}, got "
            f"{version}"
        )
    data = json.dumps({"version": version}).encode()
    write_atomic(model_folder / CURRENT, lambda aside: aside.write_bytes(data))


@contextlib.contextmanager
def new_version(model_folder: Path) -> Iterator[Path]:
    """Yield a folder aside for a version; what is not published leaves no folder."""
    check_name(model_folder.name)
    is_new = not model_folder.exists()
    aside = model_folder / f".new-{secrets.token_hex(8)}"
    try:
        aside.mkdir(parents=True)
    except OSError as exc:
        raise CheckpointError(f"{aside}: cannot be made: {exc.strerror}") from exc
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it has a version
                model_folder.rmdir()


def publish_version(
    model_folder: Path, aside: Path, files: Mapping[str, bytes], model: ServedModel
) -> ServedModel:
    """Write the files of a version and give it its name; return what was written.

    ``model.version`` is the least number that it may have: another writer may be quicker.
    """
    try:
        for name, data in files.items():
            _write(aside / name, data)
        while True:
            version = max([model.version - 1, *_taken(model_folder)]) + 1
            model = replace_version(model, version, files)
            _write(aside / MANIFEST, model.encode())
            _sync(aside)
            try:
                # rename(2) replaces an empty folder only: one that is there stays.
                aside.rename(model_folder / str(version))
                break
            except OSError:
                if not (model_folder / str(version)).exists():
                    raise
        _sync(model_folder)
    except OSError as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{aside}: cannot be written: {exc.strerror or exc}") from exc
    return model


def replace_version(
    model: ServedModel, version: int, files: Mapping[str, bytes]
) -> ServedModel:
    """Return a model with this number and the checksums of these files."""
    found = {name: ServedFile(len(data), _checksum(data)) for name, data in files.items()}
    return dataclasses.replace(model, version=version, files=found)


def keep_versions(model_folder: Path, keep_last: int) -> list[int]:
    """Remove all but the newest versions and the one that is served; return the removed."""
    there = versions(model_folder)
    current = current_version(model_folder)
    old = [one for one in there[:-keep_last] if one != current]
    for version in old:
        # Out of sight first, so that no half of it is ever seen.
        aside = model_folder / f".old-{version}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            (model_folder / str(version)).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    return old


def _taken(model_folder: Path) -> list[int]:
    names = [path.name for path in model_folder.iterdir()]
    return [int(name) for name in names if NUMBER.fullmatch(name)]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the embedding config -------------------------------------------------------------------


def schema_document(schema: EmbeddingSchema) -> str:
    """Return the YAML file that reads as an embedding config."""
    document: dict[str, Any] = {
        "feature_index_prefix_bit": schema.prefix_bits,
        "slots_config": {name: _slot(schema, slot) for name, slot in schema.slots.items()},
    }
    if schema.strict_ids:
        document["strict_ids"] = True
    members: dict[str, list[str]] = {group: [] for group in schema.groups}
    for slot in schema.slots.values():
        members[slot.group].append(slot.name)
    # All of them, in their order: the number of a group is in its signs.
    document["feature_groups"] = members
    settings = {slot.group: _settings(schema, slot) for slot in schema.slots.values()}
    document["group_settings"] = {group: one for group, one in settings.items() if one}
    found = EmbeddingSchema.load(document)
    if schema_fingerprint(found) != schema_fingerprint(schema):
        raise ConfigError("embedding config: expected one that can be written as YAML")
    return dump_yaml_text(document)


def dump_yaml_text(document: Mapping[str, Any]) -> str:
    """Return a document as YAML."""
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False)
    return text


def _slot(schema: EmbeddingSchema, slot: Slot) -> dict[str, Any]:
    table = schema.tables[slot.table]
    found: dict[str, Any] = {"dim": slot.dim, "pooling": slot.pooling}
    if slot.pooling == "raw":
        found |= {"sample_fixed_size": slot.sample_fixed_size, "padding": slot.padding}
    if slot.id_hash is not None:
        found["id_hash"] = slot.id_hash
    if slot.hash_stack_rounds:
        found["hash_stack_config"] = {
            "hash_stack_rounds": slot.hash_stack_rounds,
            "embedding_size": slot.hash_stack_size,
        }
    if table.initialization is not None:
        found["initialization"] = {
            "method": table.initialization.method,
            **table.initialization.options,
        }
    return found


def _settings(schema: EmbeddingSchema, slot: Slot) -> dict[str, Any]:
    """Return the settings of a group, which tell tables apart also where no row is stepped."""
    settings = schema.tables[slot.table].settings
    found: dict[str, Any] = {} if settings.dtype is None else {"dtype": settings.dtype}
    if settings.optimizer is not None:
        name, options = settings.optimizer.name, settings.optimizer.options
        found["optimizer"] = {**({} if name is None else {"name": name}), **options}
    for key in ("eviction", "admission"):
        given = getattr(settings, key)
        if given is not None:
            plain = dataclasses.asdict(given)
            found[key] = {one: value for one, value in plain.items() if value is not None}
    return found
