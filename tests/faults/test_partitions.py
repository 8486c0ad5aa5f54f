"""A server that is cut off from its embedding-worker for a while, and comes back as it was."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.faults.apart import can_be_laid
from tests.support.fixtures import Record
from tests.support.processes import run

CUTS_S = (5, 30, 120)


@pytest.mark.slow
def test_w17_a_server_is_cut_off_and_every_batch_is_trained_once(
    record_property: Record,
) -> None:
    if not can_be_laid():
        pytest.skip("needs root, and network namespaces")
    ask = partial(run, "-m", "tests.faults.apart", timeout_s=360)
    with ThreadPoolExecutor(len(CUTS_S)) as pool:
        for ran in pool.map(ask, CUTS_S):
            assert ran.returncode == 0, ran.stdout + ran.stderr
            found = json.loads(ran.stdout.splitlines()[-1])
            line = "cut off for {cut_s:g} s: on again {back_s:.1f} s later".format(**found)
            record_property("measured", line)
