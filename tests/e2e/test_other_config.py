"""A trainer whose embedding config is not that of the servers."""

from __future__ import annotations

import pytest
import torch

from persia.ctx import TrainCtx
from persia.embedding.optim import SGD
from persia.errors import ConfigError
from tests.e2e.support import short_directory
from tests.faults.batches import DIM, SLOTS
from tests.support.local_job import local_job


def test_it_is_told_which_slot_differs() -> None:
    slots = {**SLOTS["slots_config"], "user": {"dim": 2 * DIM}}
    model = torch.nn.Linear(1, 1)
    with short_directory() as place, local_job(place):
        ctx = TrainCtx(
            model=model,
            embedding_optimizer=SGD(lr=1.0),
            dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            embedding_config={"slots_config": slots},
        )
        said = f"slots_config.user.dim is {DIM} there and {2 * DIM} here; "
        with pytest.raises(ConfigError, match=said), ctx:
            pass
