"""The report of a run over services: what an embedded run of the same batches writes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from persia.ctx import TrainCtx
from persia.data import DataLoader
from persia.embedding import Constant, EmbeddingConfig
from persia.embedding.optim import SGD
from tests.e2e.support import short_directory
from tests.faults.batches import SLOTS, make_batch
from tests.faults.job import Sum
from tests.support.local_job import local_job

COUNT = 40


def train(report: Path) -> str:
    """Train the same batches; returns what the report says below its charts."""
    model = Sum()
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(
            emb_initialization=Constant(0.5), weight_bound=0.0, schema=SLOTS
        ),
        report=report,
    ) as ctx:
        batches = [make_batch(number) for number in range(COUNT)]
        for batch in DataLoader(batches, reproducible=True, embedding_staleness=1):
            output, _ = ctx.forward(batch)
            ctx.backward(output)
            ctx.report(auc=0.5)
    return report.read_text("utf-8")


def test_services_and_an_embedded_run_write_the_same_report(tmp_path: Path) -> None:
    embedded = train(tmp_path / "embedded.html")
    with short_directory() as place, local_job(Path(place)):
        services = train(tmp_path / "services.html")
    assert "embedded mode" in embedded
    assert "services mode" in services
    for pattern in (
        r"<h1>.*?</h1>",
        r"<figcaption>.*?</figcaption>",
        r'<section class="features">.*</section>',  # with norms, and distinct ids
        r"<b>[^<]*</b><span>(?:steps|samples|rows held|auc, last)</span>",
    ):
        found = [re.findall(pattern, page, re.DOTALL) for page in (embedded, services)]
        assert found[0] == found[1] != [], pattern
