"""The original's client of TorchServe, against ``serve --torchserve-port`` and Adult."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from persia import env
from persia._serving.torchserve import SERVICE, make_messages
from persia.metrics import AUC
from tests.examples.loading import EXAMPLES, load
from tests.support.fixtures import Record
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S, until

# What the original's client asserts.
LEAST_AUC = 0.8927
BATCH_SIZE = 1024

MESSAGES = make_messages()


def call(channel: grpc.Channel, method: str, asked: Any, reply: str) -> Any:
    made = channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=lambda message: message and message.SerializeToString(),
        response_deserializer=MESSAGES[reply].FromString,
    )
    return made(asked, timeout=PATIENCE_S)


def predict(channel: grpc.Channel, batch: bytes) -> list[float]:
    """Ask as the original's ``serve_client.py`` does, and read the answer as it does."""
    asked = MESSAGES["PredictionsRequest"](model_name="adult_income", input={"batch": batch})
    text = call(channel, "Predictions", asked, "PredictionResponse").prediction.decode()
    return [float(line.strip().replace(",", "")) for line in text.splitlines()[1:-1]]


def is_healthy(channel: grpc.Channel) -> bool:
    reply = call(channel, "Ping", MESSAGES["PredictionsRequest"](), "TorchServeHealthResponse")
    return "Healthy" in reply.health


@pytest.mark.slow
@pytest.mark.skipif(env.data_dir() is None, reason="PERSIA_DATA_DIR names no data")
def test_scores_of_the_adult_model(
    tmp_path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = load("adult_income")
    # As for who runs the script: the model's module is beside it.
    monkeypatch.syspath_prepend(str(EXAMPLES / "adult_income"))
    data = train.load()
    options = train.Options(reproducible=True, staleness=1, quiet=True)
    with train.build_ctx(options) as ctx:
        report = train.run(ctx, data, options)
        sample = next(train.batches(data[1], requires_grad=False))
        ctx.export(tmp_path / "models/adult_income", sample)
    monkeypatch.setitem(train.batches.__globals__, "BATCH_SIZE", BATCH_SIZE)
    metric = AUC(bins=None, sync_on_compute=False)
    command = [sys.executable, "-m", "persia.launcher", "serve", str(tmp_path / "models")]
    command += ["--http-port=0", "--no-grpc", "--torchserve-port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            place = process.stdout.readline().split()[-1]
            with grpc.insecure_channel(place) as channel:
                until(lambda: is_healthy(channel))
                for batch in train.batches(data[1], requires_grad=False):
                    labels = batch.labels[0].data
                    scores = np.array(predict(channel, batch.to_bytes()), np.float32)
                    assert scores.size == labels.size
                    metric.update(scores, labels.ravel())
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
    found = float(metric.compute())
    record_property("auc", f"{found:.6f}")
    assert found > LEAST_AUC
    # Those of evaluation in training, in batches of another size.
    assert found == pytest.approx(report.auc, abs=1e-6)
