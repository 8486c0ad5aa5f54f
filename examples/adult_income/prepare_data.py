"""Fetch UCI Adult (Census Income) and turn it into arrays.

    python examples/adult_income/prepare_data.py
    python examples/adult_income/prepare_data.py --into DIRECTORY

Downloads adult.data and adult.test once and checks them against the checksums that UCI's files
have. With PERSIA_DATA_DIR set, reads $PERSIA_DATA_DIR/adult/*.gz instead and fetches nothing;
--into fills such a directory.

Becker, B. & Kohavi, R. (1996), Adult, UCI Machine Learning Repository, CC BY 4.0.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from persia import env
from persia.utils import ArgumentParser

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOURCE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
CHECKSUMS = {  # sha256 of the unpacked files
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
TIMEOUT_S = 60  # without a byte from the server

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "gender", "capital_gain", "capital_loss", "hours_per_week",
    "native_country", "income_bracket",
)  # fmt: skip
CATEGORICAL = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "gender",
    "native_country",
)  # fmt: skip
CONTINUOUS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")

DATA_DIR = Path(__file__).parent / "data"


class DataUnavailable(RuntimeError):
    """The data cannot be had, or is not what it should be; says where it was looked for."""


@dataclass(frozen=True, slots=True)
class Income:
    """One of the two files, as arrays.

    Attributes:
        continuous: f32 [n, 5], raw as in the file, in the order of CONTINUOUS.
        categorical: u64 [n, 8], one id a column, in the order of CATEGORICAL.
        target: f32 [n, 1], 1 where the income is above 50K.
    """

    continuous: NDArray[np.float32]
    categorical: NDArray[np.uint64]
    target: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.target)


def load() -> tuple[Income, Income]:
    """Return the training and the test file, fetched at the first call.

    Raises:
        DataUnavailable: If they cannot be read or fetched, or differ from UCI's.
    """
    source = env.data_dir()
    if source is not None:
        texts = {name: _unpack(source / "adult" / f"{name}.gz") for name in CHECKSUMS}
    else:
        texts = {name: _fetch(name) for name in CHECKSUMS}
    return encode(_parse(texts["adult.data"]), _parse(texts["adult.test"]))


def fill(directory: Path) -> None:
    """Put the files where PERSIA_DATA_DIR finds them; what is there is only checked."""
    for name in CHECKSUMS:
        path = directory / "adult" / f"{name}.gz"
        if path.exists():
            _unpack(path)
        else:
            _write(path, gzip.compress(_download(name), mtime=0))


def encode(train: list[list[str]], test: list[list[str]]) -> tuple[Income, Income]:
    """Number the categories of each column: those of the training file in sorted order.

    A category that only the test file has gets an id of its own behind them, for which no row
    is ever trained. ("?" is a category like any other.)
    """
    codes: list[dict[str, int]] = []
    for name in CATEGORICAL:
        column = COLUMNS.index(name)
        known = sorted({row[column] for row in train})
        unseen = sorted({row[column] for row in test} - set(known))
        codes.append({category: code for code, category in enumerate([*known, *unseen])})
    return _arrays(train, codes), _arrays(test, codes)


def _arrays(rows: list[list[str]], codes: list[dict[str, int]]) -> Income:
    categorical = [COLUMNS.index(name) for name in CATEGORICAL]
    continuous = [COLUMNS.index(name) for name in CONTINUOUS]
    return Income(
        np.array([[float(row[i]) for i in continuous] for row in rows], np.float32),
        np.array(
            [
                [code[row[i]] for i, code in zip(categorical, codes, strict=True)]
                for row in rows
            ],
            np.uint64,
        ),
        np.array([[row[-1].startswith(">50K")] for row in rows], np.float32),
    )


def _parse(text: bytes) -> list[list[str]]:
    """Return the rows; UCI's comment line and the blank last line are none."""
    rows = csv.reader(io.StringIO(text.decode("ascii")), skipinitialspace=True)
    return [row for row in rows if len(row) == len(COLUMNS)]


def _unpack(path: Path) -> bytes:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as exc:
        raise DataUnavailable(f"PERSIA_DATA_DIR: cannot read {path}: {exc}") from exc
    return _checked(content, path.name.removesuffix(".gz"), str(path))


def _fetch(name: str) -> bytes:
    path = DATA_DIR / name
    if path.exists():
        return _checked(path.read_bytes(), name, str(path))
    content = _download(name)
    _write(path, content)
    return content


def _download(name: str) -> bytes:
    url = f"{SOURCE}/{name}"
    print(f"fetching {url}, once", file=sys.stderr, flush=True)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            content = reply.read()
    except (urllib.error.URLError, OSError) as exc:
        raise DataUnavailable(
            f"cannot fetch {url}: {exc}. Without a network, put {name}.gz into a directory "
            "`adult` and name its parent in PERSIA_DATA_DIR"
        ) from exc
    return _checked(content, name, url)


def _checked(content: bytes, name: str, where: str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if digest != CHECKSUMS[name]:
        raise DataUnavailable(
            f"{where}: expected sha256 {CHECKSUMS[name]}, got {digest} "
            f"({len(content)} bytes); delete the file if it is a broken download"
        )
    return content


def _write(path: Path, content: bytes) -> None:
    """Write aside and rename, so that a broken write leaves no file of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "python prepare_data.py --into data")
    parser.add_argument("--into", type=Path, help="a directory for PERSIA_DATA_DIR to name")
    into = parser.parse_args(argv).into
    if into is not None:
        fill(into)
        print(f"{', '.join(CHECKSUMS)}: in {into / 'adult'}")
        return
    for name, income in zip(("train", "test"), load(), strict=True):
        print(f"{name}: {len(income):,} rows, {income.target.mean():.2%} above 50K")


if __name__ == "__main__":
    main()
