"""persia-ckpt, as people run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from persia._cli.ckpt import cli
from persia._files.catalog import chain, load, new_id, publish
from persia._files.manifest import Manifest
from persia._files.part_writer import PartWriter
from persia._files.rows import rows_of as rows_of_chain
from persia._files.storage import LocalStorage
from tests.files.support import SETTINGS, block, joined, rows_of, schema

SHIFT = 56
USERS, ITEMS, TAGS = ([(g + 1) << SHIFT | n for n in range(50)] for g in range(3))


def checkpoint(
    folder: Path, seed: int = 0, base: str | None = None, num_users: int = 50
) -> Manifest:
    storage = LocalStorage(folder)
    identity = new_id(storage)
    with PartWriter(storage, f"{identity}/server0") as writer:
        writer.add("table0", block(USERS[:num_users], seed=seed))
        if base is None:
            writer.add("table0", joined([block(ITEMS)]))
            writer.add("table1", block(TAGS, dim=3, words=3, dtype="bfloat16"))
        parts = writer.finish()
    manifest = Manifest(
        id=identity,
        kind="full" if base is None else "delta",
        base=base,
        step=3,
        num_servers=1,
        schema=schema(),
        parts=parts,
    )
    publish(storage, manifest)
    return manifest


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_inspect(tmp_path: Path) -> None:
    base = checkpoint(tmp_path)
    delta = checkpoint(tmp_path, seed=1, base=base.id, num_users=7)
    ran = run("inspect", tmp_path, "--biggest", 2)
    assert ran.exit_code == 0
    for line in (
        f"checkpoint {delta.id} in {tmp_path}",
        "step 3, by 1 server, ",
        f"full {base.id}: 150 rows, ",
        f"delta {delta.id}: 7 rows, 0 deleted, ",
        "group 1 item: features item; dim 4 float32, adagrad with 4 words of state",
        "user: 50 rows, ",
        "tag: 50 rows, ",
        f"also here: full {base.id} of step 3",
    ):
        assert line in ran.output
    held = joined(
        b for p, b in rows_of_chain(LocalStorage(tmp_path), chain(tmp_path)) if b.dim == 4
    )
    norms = np.linalg.norm(held.values.astype(np.float64), axis=1)
    biggest = norms[held.signs >> np.uint64(SHIFT) == 2].max()
    assert f"norm {biggest:.4g}" in ran.output
    quick = run("inspect", tmp_path, "--quick", "--id", base.id)
    assert quick.exit_code == 0
    assert "norm mean" not in quick.output


def test_verify(tmp_path: Path) -> None:
    nothing = run("verify", tmp_path, "--all")
    assert nothing.exit_code == 1
    assert "no checkpoint is here" in nothing.output
    manifest = checkpoint(tmp_path)
    checkpoint(tmp_path)
    ran = run("verify", tmp_path, "--all")
    assert ran.exit_code == 0
    assert f"{manifest.id}: {len(manifest.parts)} files are whole" in ran.output
    part = tmp_path / manifest.parts[0].file.path
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    ran = run("verify", tmp_path, "--id", manifest.id)
    assert ran.exit_code == 1
    assert f"Error: {part}: expected checksum" in ran.output
    assert run("verify", tmp_path).exit_code == 0
    ran = run("verify", tmp_path / "nothing")
    assert (ran.exit_code, "no checkpoint is here" in ran.output) == (1, True)


def test_diff(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "b")
    assert run("diff", tmp_path / "a", tmp_path / "b").exit_code == 0
    base = checkpoint(tmp_path / "c", num_users=49)
    checkpoint(tmp_path / "c", seed=1, base=base.id, num_users=10)
    ran = run("diff", tmp_path / "a", tmp_path / "c")
    assert ran.exit_code == 1
    assert "item: 50 equal, 0 changed" in ran.output
    assert "1 gone, 0 new" in ran.output


def test_a_diff_of_other_groups_says_which(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "a")
    checkpoint(tmp_path / "b")
    slots = {"user": {"dim": 4}, "tags": {"dim": 4}, "item": {"dim": 3}}
    tables = {"slots_config": slots, "group_settings": {"item": {"dtype": "bfloat16"}}}
    for settings, says in (
        ({**SETTINGS, "feature_index_prefix_bit": 9}, "feature_index_prefix_bit is 8 and 9"),
        (
            tables,
            "number of group item is 1 and 2; table of group item is table0 and table1; only "
            "the first has group tag; and 1 more differ",
        ),
    ):
        other = replace(manifest, schema=schema(settings))
        publish(LocalStorage(tmp_path / "a"), other)
        ran = run("diff", tmp_path / "b", tmp_path / "a")
        assert ran.exit_code == 1
        assert f"so their signs mean other ids: {says}" in ran.output


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path)
    for command in ("inspect", "verify"):
        ran = run(command, tmp_path / f"{manifest.id}.json")
        assert ran.exit_code == 1
        assert "this is a file, give the folder that dump_checkpoint was given" in ran.output


@pytest.mark.parametrize("form", ["parquet", "safetensors", "npz"])
def test_convert(tmp_path: Path, form: str) -> None:
    checkpoint(tmp_path / "a")
    out = tmp_path / "out"
    ran = run("convert", tmp_path / "a", out, "--to", form, "--group", "tag")
    assert ran.exit_code == 0, ran.output
    assert "50 rows in 1 file in " in ran.output
    (file,) = out.iterdir()
    if form == "parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(file)
        ids = table["id"].to_numpy()
        values = np.array(table["values"].to_pylist(), np.float32)
        assert set(table["group"].to_pylist()) == {"tag"}
    elif form == "npz":
        with np.load(file) as held:
            ids, values = held["id"], held["values"]
            assert set(held["group"].tolist()) == {2}
            assert held["groups"][held["group"][0]] == "tag"
    else:
        held = pytest.importorskip("safetensors.numpy").load_file(file)
        ids, values = held["id"], held["values"]
    want = block(TAGS, dim=3, words=3, dtype="bfloat16")
    widened = (want.values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], np.arange(50))
    np.testing.assert_array_equal(values[order], widened)
    assert run("convert", tmp_path / "a", out, "--to", form).exit_code == 1
    ran = run("convert", tmp_path / "a", tmp_path / "other", "--to", form, "--group", "x")
    assert "feature groups x: known are user, item, tag" in ran.output


def test_a_convert_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    last = max((tmp_path / "a").rglob("table1*"))
    last.write_bytes(last.read_bytes()[:-1])
    ran = run("convert", tmp_path / "a", tmp_path / "out", "--to", "npz")
    assert ran.exit_code == 1
    assert last.name in ran.output
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    assert run("convert", tmp_path / "a", tmp_path / "empty", "--to", "npz").exit_code == 1
    assert list((tmp_path / "empty").iterdir()) == []


def test_messages_name_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dense.pt").touch()
    for name, what in (
        ("missing", "there is no such folder"),
        ("empty", "the folder is empty"),
        ("other", "no manifest is among dense.pt"),
    ):
        assert f"no checkpoint is here: {what}" in run("inspect", tmp_path / name).output
    first = checkpoint(tmp_path / "a")
    assert run("inspect", tmp_path / "a", "--quick", "--id", "1").exit_code == 0
    for wrong in ("7", "00000001-00000000", "x"):
        ran = run("inspect", tmp_path / "a", "--id", wrong)
        assert ran.exit_code == 1
        assert f"got '{wrong}'; here are {first.id}" in ran.output
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for same in ("a", "link", "other/../a"):
        ran = run("reshard", tmp_path / "a", tmp_path / same)
        assert ran.exit_code == 1
        assert "expected another folder" in ran.output
    assert len(list((tmp_path / "a").glob("*.json"))) == 1


def test_reshard(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a")
    ran = run("reshard", tmp_path / "a", tmp_path / "b", "--servers", 5)
    assert ran.exit_code == 0
    manifest = load(tmp_path / "b")
    assert (manifest.num_servers, manifest.num_rows) == (5, 150)
    assert {part.server for part in manifest.parts} == set(range(5))
    one, two = (
        rows_of(rows for _, rows in rows_of_chain(LocalStorage(path), chain(path)))
        for path in (tmp_path / "a", tmp_path / "b")
    )
    assert one == two
