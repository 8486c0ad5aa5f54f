"""Reading needs pyarrow; that it loads neither torch nor others is in tests/test_init.py."""

from __future__ import annotations

import re

import persia.readers
from tests.support.processes import ROOT, run


def test_the_reference_has_all_of_it() -> None:
    text = (ROOT / "docs/api.md").read_text()
    found = re.search(r"::: persia\.readers\n.*\n +members: \[(.*)\]", text)
    assert found is not None
    assert sorted(found[1].split(", ")) == sorted(persia.readers.__all__)


def test_without_pyarrow_it_says_what_to_install() -> None:
    ran = run("-c", "import sys; sys.modules['pyarrow'] = None; import persia.readers")
    last = ran.stderr.strip().splitlines()[-1]
    assert last == "ImportError: persia.readers needs pyarrow: pip install pyarrow"
