"""persia-ckpt, as people run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from persia._files.catalog import chain, load, publish
from persia._files.rows import rows_of as rows_of_chain
from persia._files.storage import LocalStorage
from tests.cli.checkpoints import SHIFT, checkpoint, run
from tests.files.support import SETTINGS, joined, rows_of, schema


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
    storage = LocalStorage(tmp_path)
    held = joined(b for p, b in rows_of_chain(storage, chain(storage)) if b.dim == 4)
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
    part = tmp_path / manifest.parts[0].path
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
        (
            {**SETTINGS, "feature_index_prefix_bit": 9},
            "feature_index_prefix_bit is 8 in the first and 9 in the second",
        ),
        (
            tables,
            "the number of feature group item is 1 in the first and 2 in the second; the table "
            "of feature group item is table0 in the first and table1 in the second; the "
            "number of feature group tag is 2 in the first and absent in the second; and",
        ),
    ):
        other = replace(manifest, schema=schema(settings))
        publish(LocalStorage(tmp_path / "a"), other)
        ran = run("diff", tmp_path / "b", tmp_path / "a")
        assert ran.exit_code == 1
        assert f"so their signs mean other ids: {says}" in ran.output


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
    for command in ("inspect", "verify"):
        ran = run(command, tmp_path / "a" / f"{first.id}.json")
        assert ran.exit_code == 1
        assert "this is a file, give the folder that dump_checkpoint was given" in ran.output
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
    manifest = load(LocalStorage(tmp_path / "b"))
    assert (manifest.num_servers, manifest.num_rows) == (5, 150)
    assert {part.server for part in manifest.parts} == set(range(5))
    one, two = (
        rows_of(rows for _, rows in rows_of_chain(storage, chain(storage)))
        for storage in (LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b"))
    )
    assert one == two
