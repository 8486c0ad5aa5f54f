"""The examples in every mode: the same script, the same bits.

Reproducible, at staleness 1: over ipc or tcp, with one or more of each role, the AUC and the
final rows are those of embedded mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from persia import env
from persia.data import DataLoader, StreamingDataset
from tests.distributed import net
from tests.distributed.batches import SLOTS
from tests.distributed.batches import make_batch as net_batch
from tests.examples.loading import load, run_quickstart
from tests.golden.test_examples import rows_of
from tests.support.processes import ROOT, Cluster
from tests.training.conftest import LOCKSTEP, train

SCRIPTS = Path(__file__).parent / "scripts"
SMALL_LOADER = ROOT / "tests" / "distributed" / "scripts" / "phases_loader.py"


# Of the processes of a job: transport, servers, embedding-workers and data-loaders.
Layout = tuple[str, int, int, int]


@contextmanager
def services(
    layout: Layout,
    config: Path | Mapping[str, Any],
    loader: Path,
    *arguments: str,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Start a job of which this process is the nn-worker."""
    transport, servers, workers, loaders = layout
    with (
        Cluster(
            config, settings, transport=transport, num_servers=servers, num_workers=workers
        ) as cluster,
        env.changed(**cluster.variables),
    ):
        cluster.start_servers()
        cluster.start_loaders(loader, loaders, *arguments)
        assert env.get_mode() == "services"
        yield


SMALL = 40  # batches


def test_a_small_job_is_bit_equal_in_services_mode() -> None:
    """What the fast tier has of this module."""
    with net.make_ctx() as ctx:
        losses = train(ctx, [net_batch(number) for number in range(SMALL)], **LOCKSTEP)
        rows = rows_of(ctx)
    loader = (SMALL_LOADER, str(SMALL // 2))
    with services(("tcp", 3, 2, 2), SLOTS, *loader), net.make_ctx() as ctx:
        assert train(ctx, StreamingDataset(4), **LOCKSTEP) == losses
        assert rows_of(ctx) == rows


LATE: dict[str, Any] = {"reproducible": True, "embedding_staleness": 3}


@pytest.mark.slow
def test_a_small_job_repeats_at_a_bound_above_1_over_servers_and_as_embedded() -> None:
    """Batch t sees exactly the updates up to t - 3, wherever the roles are."""
    data = [net_batch(number) for number in range(SMALL)]
    with net.make_ctx() as ctx:
        embedded = train(ctx, data, **LATE), rows_of(ctx)
    with net.make_ctx() as ctx:
        assert train(ctx, data, **LOCKSTEP) != embedded[0]  # lateness shows in the losses
    loader = (SMALL_LOADER, str(SMALL))
    for _ in range(2):
        with services(("tcp", 2, 2, 1), SLOTS, *loader), net.make_ctx() as ctx:
            assert (train(ctx, StreamingDataset(4), **LATE), rows_of(ctx)) == embedded


@pytest.mark.slow
def test_a_small_job_in_bfloat16_has_the_same_bits_in_every_layout() -> None:
    """Floats are rounded to nearest, whichever servers they come from."""
    wire = {"row_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
    settings = {"common_config": {"wire_config": wire}}
    with net.make_ctx() as ctx:
        exact = train(ctx, [net_batch(number) for number in range(SMALL)], **LOCKSTEP)
    found = []
    for layout in (("ipc", 1, 1, 1), ("tcp", 3, 2, 1)):
        loader = (SMALL_LOADER, str(SMALL))
        with (
            services(layout, SLOTS, *loader, settings=settings),
            net.make_ctx() as ctx,
        ):
            found.append((train(ctx, StreamingDataset(4), **LOCKSTEP), rows_of(ctx)))
    assert found[0] == found[1]
    assert found[0][0] != exact
    assert np.allclose(found[0][0], exact, atol=2e-3)


OWN = {"samples": 12_000, "batch_size": 256, "seed": 1}


@pytest.fixture(scope="module")
def embedded_quickstart() -> tuple[float, Any]:
    options = {"staleness": 1, "reproducible": True} | OWN
    report, rows = run_quickstart(load("quickstart"), rows_of, **options)
    return report.auc, rows


# The four pairs of transport and servers, and of workers and loaders.
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("tcp", 3, 2, 2), ("ipc", 1, 1, 1), ("ipc", 3, 1, 2), ("tcp", 1, 2, 1)], ids=str
)
def test_quickstart_is_bit_equal_in_services_mode(
    embedded_quickstart: tuple[float, Any], layout: Layout
) -> None:
    quickstart = load("quickstart")
    config = Path(quickstart.EMBEDDING_CONFIG)
    with services(layout, config, SCRIPTS / "click_loader.py", *map(str, OWN.values())):
        log = quickstart.generate(OWN["samples"], OWN["seed"])
        with quickstart.build_ctx(quickstart.Options(**OWN)) as ctx:
            loss_fn = torch.nn.BCEWithLogitsLoss()
            loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
            for batch in loader:
                logits, labels = ctx.forward(batch)
                ctx.backward(loss_fn(logits, labels[0]))
            assert (quickstart.test(ctx, log), rows_of(ctx)) == embedded_quickstart
            assert ctx.stats()["batches"] == -(-log.num_train // OWN["batch_size"])
