"""Bundles that would harm a server that trusts them, made of a good one.

Each function is given a copy of a good version and spoils it; ``outside`` is a folder beside
the repository, which no server may open.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from persia._serving.bundle import MANIFEST

Spoil = Callable[[Path, Path, random.Random], None]
DENSE = "dense.pt2"
BUNDLES: dict[str, Spoil] = {}


def spoils(function: Spoil) -> Spoil:
    """Add a function to the list, by its name."""
    BUNDLES[function.__name__] = function
    return function


@spoils
def nothing(folder: Path, outside: Path, rng: random.Random) -> None:
    """Be a good bundle, which is served: what the others lack is what was spoiled."""


WHOLE = nothing.__name__


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit what ``persia-model.json`` says."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    edit(content["model"])
    path.write_text(json.dumps(content))


def put(folder: Path, name: str, data: bytes) -> None:
    """Write a file, and its right size and checksum."""
    (folder / name).write_bytes(data)
    about = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    change(folder, lambda model: model["files"].update({name: about}))


def with_member(data: bytes, ending: str, content: bytes, **how: Any) -> bytes:
    """Return a program's archive with a member replaced or added."""
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    prefix = source.namelist()[0].split("/")[0]
    with zipfile.ZipFile(target, "w") as archive:
        for one in source.infolist():
            if not one.filename.endswith(ending):
                archive.writestr(one.filename, source.read(one))
        archive.writestr(f"{prefix}/{ending}", content, **how)
    return target.getvalue()


def graph_of(data: bytes) -> dict[str, Any]:
    archive = zipfile.ZipFile(io.BytesIO(data))
    (name,) = [one for one in archive.namelist() if one.endswith("models/model.json")]
    found: dict[str, Any] = json.loads(archive.read(name))
    return found


def call_instead(folder: Path, target: str, text: str) -> None:
    """Have the first node of the graph call something with a text."""
    data = (folder / DENSE).read_bytes()
    graph = graph_of(data)
    node = graph["graph_module"]["graph"]["nodes"][0]
    node["target"] = target
    node["inputs"] = [
        {"name": "filename", "arg": {"as_string": text}, "kind": 1},
        {"name": "shared", "arg": {"as_bool": True}, "kind": 2},
        {"name": "size", "arg": {"as_int": 8}, "kind": 2},
    ]
    put(folder, DENSE, with_member(data, "models/model.json", json.dumps(graph).encode()))


# --- links ------------------------------------------------------------------------------------


def _link(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


@spoils
def a_link_for_the_program(folder: Path, outside: Path, rng: random.Random) -> None:
    _link(folder / DENSE, outside / "good" / DENSE)


@spoils
def a_link_for_the_manifest(folder: Path, outside: Path, rng: random.Random) -> None:
    _link(folder / MANIFEST, outside / "good" / MANIFEST)


@spoils
def a_link_for_the_rows(folder: Path, outside: Path, rng: random.Random) -> None:
    _link(folder / "rows", outside / "good" / "rows")


@spoils
def a_link_for_a_file_of_the_rows(folder: Path, outside: Path, rng: random.Random) -> None:
    files = sorted(one for one in (folder / "rows").rglob("*") if one.is_file())
    _link(rng.choice(files), outside / "secret")


@spoils
def a_link_for_recorded_requests(folder: Path, outside: Path, rng: random.Random) -> None:
    _link(folder / "warmup.bin", outside / "secret")


@spoils
def a_link_for_the_version(folder: Path, outside: Path, rng: random.Random) -> None:
    _link(folder, outside / "good")


@spoils
def a_link_for_the_current_version(folder: Path, outside: Path, rng: random.Random) -> None:
    (folder / MANIFEST).unlink()
    _link(folder.parent / "current.json", outside / "secret")


# --- what the manifest says -------------------------------------------------------------------


@spoils
def a_name_that_leads_out(folder: Path, outside: Path, rng: random.Random) -> None:
    name = rng.choice([f"../../../{outside.name}/secret", str(outside / "secret"), "..", "a/b"])
    about = {"bytes": 10, "xxh3_128": "0" * 32}
    change(folder, lambda model: model["files"].update({name: about}))


@spoils
def rows_elsewhere(folder: Path, outside: Path, rng: random.Random) -> None:
    urls = [str(outside / "good" / "rows"), f"file://{outside}/good/rows", f"../{outside.name}"]
    change(folder, lambda model: model["rows"].update(url=rng.choice(urls)))


@spoils
def a_change_log_elsewhere(folder: Path, outside: Path, rng: random.Random) -> None:
    log = rng.choice([str(outside), f"file://{outside}"])
    change(folder, lambda model: model["rows"].update(log=log))


@spoils
def huge_sizes(folder: Path, outside: Path, rng: random.Random) -> None:
    size = rng.choice([1 << 36, 1 << 62, 10**30, -1, 1.5, "1"])
    change(folder, lambda model: model["files"][DENSE].update(bytes=size))


@spoils
def a_wrong_checksum(folder: Path, outside: Path, rng: random.Random) -> None:
    data = bytearray((folder / DENSE).read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (folder / DENSE).write_bytes(data)


@spoils
def huge_dimensions(folder: Path, outside: Path, rng: random.Random) -> None:
    change(folder, lambda model: model["features"][0].update(dim=1 << rng.choice([19, 40])))


@spoils
def a_manifest_of_anything(folder: Path, outside: Path, rng: random.Random) -> None:
    texts = [
        *("[" * 200_000, '{"a":' * 100_000, "{}", "null", "\0" * 100, '{"format": NaN}'),
        '{"format": "persia-model", "format_version": 1e308, "model": []}',
        " " * (17 << 20),
        '"\ud800"'.encode("utf-8", "surrogatepass").decode("latin-1"),
    ]
    (folder / MANIFEST).write_text(rng.choice(texts))


@spoils
def a_changed_manifest(folder: Path, outside: Path, rng: random.Random) -> None:
    data = bytearray((folder / MANIFEST).read_bytes())
    for _ in range(rng.randrange(1, 10)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    (folder / MANIFEST).write_bytes(data)


@spoils
def a_config_of_anything(folder: Path, outside: Path, rng: random.Random) -> None:
    names = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    texts = [
        f"!!python/object/apply:os.mkdir [{outside / 'made'}]",
        f"a0: &a0 [x]\n{names}slots_config: {{user: {{dim: 8}}}}",
        "slots_config: {user: {dim: 1000000000000}}",
        "- " * 50_000,
    ]
    put(folder, "embedding_config.yml", rng.choice(texts).encode())


# --- the program ------------------------------------------------------------------------------


@spoils
def pickles_in_the_program(folder: Path, outside: Path, rng: random.Random) -> None:
    evil = pickle.dumps(Evil(outside / "made"))
    member = rng.choice(
        ["data/sample_inputs/model.pt", "data/constants/custom_obj_0", "data/weights/weight_0"]
    )
    data = with_member((folder / DENSE).read_bytes(), member, evil)
    if member.endswith("weight_0"):
        config = {"config": {"x": {"path_name": "weight_0", "use_pickle": True}}}
        name = "data/weights/model_weights_config.json"
        data = with_member(data, name, json.dumps(config).encode())
    put(folder, DENSE, data)


@spoils
def a_pickle_for_the_program(folder: Path, outside: Path, rng: random.Random) -> None:
    file = io.BytesIO()
    torch.save(Evil(outside / "made"), file)
    put(folder, DENSE, rng.choice([file.getvalue(), pickle.dumps(Evil(outside / "made"))]))


@spoils
def an_expression_that_is_code(folder: Path, outside: Path, rng: random.Random) -> None:
    data = (folder / DENSE).read_bytes()
    text = json.dumps(graph_of(data))
    code = f"__import__('os').mkdir('{outside / 'made'}')"
    graph = json.loads(text)
    graph["graph_module"]["graph"]["sym_int_values"] = {
        "s0": {"as_expr": {"expr_str": code, "hint": {"as_int": 4}}}
    }
    put(folder, DENSE, with_member(data, "models/model.json", json.dumps(graph).encode()))


@spoils
def an_operator_that_reads_files(folder: Path, outside: Path, rng: random.Random) -> None:
    call_instead(folder, "torch.ops.aten.from_file.default", str(outside / "secret"))


@spoils
def a_function_of_the_system(folder: Path, outside: Path, rng: random.Random) -> None:
    target = rng.choice(["torch.os.mkdir", "torch.os.system", "_operator.call", "torch.load"])
    call_instead(folder, target, str(outside / "made"))


@spoils
def a_corrupt_archive(folder: Path, outside: Path, rng: random.Random) -> None:
    data = bytearray((folder / DENSE).read_bytes())
    kind = rng.randrange(3)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(20):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:  # the directory at its end, where sizes and places are
        for _ in range(8):
            data[-rng.randrange(1, min(len(data), 600))] = rng.randrange(256)
    put(folder, DENSE, bytes(data))


@spoils
def an_archive_that_grows(folder: Path, outside: Path, rng: random.Random) -> None:
    name = rng.choice(["data/weights/weight_0", "models/model.json"])
    data = with_member(
        *((folder / DENSE).read_bytes(), name, b" " * (256 << 20)),
        compress_type=zipfile.ZIP_DEFLATED,
        compresslevel=1,
    )
    put(folder, DENSE, data)


class Script(torch.nn.Module):
    """Reads a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, False, 8)


@spoils
def torchscript_that_reads_files(folder: Path, outside: Path, rng: random.Random) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Script(str(outside / "secret"))), file)
    put(folder, "dense.ts", file.getvalue())
    change(folder, lambda model: model.update(format="torchscript"))


@spoils
def machine_code(folder: Path, outside: Path, rng: random.Random) -> None:
    put(folder, "dense.aot.pt2", (folder / DENSE).read_bytes())
    change(folder, lambda model: model.update(format="aot"))


# --- the rows ---------------------------------------------------------------------------------


@spoils
def spoiled_rows(folder: Path, outside: Path, rng: random.Random) -> None:
    files = sorted(one for one in (folder / "rows").rglob("*") if one.is_file())
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data[: rng.choice([len(data), len(data) // 2])])


@spoils
def rows_whose_names_lead_out(folder: Path, outside: Path, rng: random.Random) -> None:
    for path in sorted((folder / "rows").rglob("*.json")):
        text = path.read_text()
        for name in sorted((one.name for one in path.parent.iterdir()), key=len, reverse=True):
            text = text.replace(f'"{name}', f'"../../../../{outside.name}/{name}')
        path.write_text(text)
