"""``persia-ckpt inspect --texts``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from persia._cli import texts
from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding.optim import SGD
from persia.readers import hash_text
from tests.cli.checkpoints import run

CITIES = ["Utrecht", "Lyon", "S\u00e3o Paulo", "of no file", "\x1b[2J", ""]
SAID = ["'Utrecht'", "'Lyon'", "'S\u00e3o Paulo'", r"'\x1b[2J'", "''"]


@pytest.mark.parametrize("prefix_bits", [4, 8, 12])  # with 12, four bits of each hash are cut
def test_inspect_shows_texts_that_readers_made_ids_of(
    tmp_path: Path, prefix_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    from persia.readers import Columns, TableReader

    table = pa.table({"city": CITIES, "click": [1.0] * len(CITIES)})
    model = torch.nn.Linear(2, 1)
    slots = {"slots_config": {"city": {"dim": 2}}, "feature_index_prefix_bit": prefix_bits}
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=slots,
    ) as ctx:
        reader = TableReader(table, Columns(ids=["city"], labels=["click"]), len(CITIES))
        for batch in DataLoader(reader):
            _, embeddings, _ = ctx.prepare_features(batch)
            ctx.backward(model(embeddings[0]).sum())
        ctx.dump_checkpoint(tmp_path / "rows")
    file = tmp_path / "cities.txt"
    lines = ["Lyon", "Porto\r", "S\u00e3o Paulo", "Utrecht\r", "\x1b[2J", "", "Lyon"]
    file.write_bytes("\n".join(lines).encode())
    monkeypatch.setattr(texts, "_BLOCK", 2)
    plain = run("inspect", tmp_path / "rows", "--biggest", 9)
    ran = run("inspect", tmp_path / "rows", "--biggest", 9, "--texts", file, "--texts", file)
    assert ran.exit_code == 0, ran.output
    said = [one.partition(", ")[2] for one in ran.output.splitlines() if "    id " in one]
    assert sorted(said) == sorted(["", *SAID])
    # Otherwise the same, but for the time since it was made.
    assert len(plain.output.splitlines()) == len(ran.output.splitlines()) - 1
    assert ran.output.endswith("\n  5 of the 6 ids shown have a text\n")
    assert "Lyon" not in plain.output


def test_texts_of_one_id_are_all_shown(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{number}\n" for number in range(64)))
    found = texts.texts_of({0, 1, 2, 3}, [file], id_bits=2)
    shown = [text for of_one in found.values() for text in of_one]
    assert sorted(shown) == sorted(map(str, range(64)))
    assert set(found) == {0, 1, 2, 3}


def test_bytes_that_are_no_text_are_shown_by_their_numbers(tmp_path: Path) -> None:
    """As of a file in another encoding than that of the data."""
    file = tmp_path / "texts.txt"
    file.write_bytes("Lyon\nS\u00e3o Paulo\n".encode("latin-1"))
    id_ = int(hash_text(b"S\xe3o Paulo"))
    assert texts.texts_of({id_}, [file], id_bits=56) == {id_: [r"S\xe3o Paulo"]}


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    ran = run("inspect", tmp_path, "--texts", tmp_path / "none.txt")
    assert ran.exit_code == 2
    assert "none.txt" in ran.output
