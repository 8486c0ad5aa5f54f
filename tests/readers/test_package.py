"""Reading needs pyarrow, and neither torch nor data sets of others."""

from __future__ import annotations

import subprocess
import sys

from tests.meta.sources import ROOT


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_data_loader_loads_no_torch() -> None:
    ran = run(
        "import sys, persia\n"
        "assert persia.readers.Columns(['user']).names == ['user']\n"
        "assert not {'torch', 'datasets'} & sys.modules.keys()\n"
    )
    assert ran.returncode == 0, ran.stderr


def test_without_pyarrow_it_says_what_to_install() -> None:
    ran = run("import sys; sys.modules['pyarrow'] = None; import persia.readers")
    last = ran.stderr.strip().splitlines()[-1]
    assert last == "ImportError: persia.readers needs pyarrow: pip install 'persia[parquet]'"
