"""A server that is cut off from its embedding-worker for a while, and comes back as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.apart import can_be_laid
from tests.support.fixtures import Record
from tests.support.processes import ROOT

CUTS_S = (5, 30, 120)


@pytest.mark.slow
def test_w17_a_server_is_cut_off_and_every_batch_is_trained_once(
    record_property: Record,
) -> None:
    if not can_be_laid():
        pytest.skip("needs root, and network namespaces")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.apart", str(cut_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for cut_s in CUTS_S
    ]
    try:
        for job in jobs:
            text, _ = job.communicate(timeout=360)
            assert job.returncode == 0, text
            found = json.loads(text.splitlines()[-1])
            line = "cut off for {cut_s:g} s: on again {back_s:.1f} s later".format(**found)
            record_property("measured", line)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
