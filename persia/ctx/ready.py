"""Waiting until servers have what a TrainCtx gives them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from persia.errors import (
    ServiceTimeout,
)

if TYPE_CHECKING:
    from persia._rpc.messages import EmbeddingWorker


# How long to wait for servers before saying that they are not ready.
READY_S = 300.0
# Between two questions whether they are; a server answers in far less.
ASK_AGAIN_S = 0.1


def wait_until_ready(worker: EmbeddingWorker) -> None:
    deadline = time.monotonic() + READY_S
    pause = threading.Event()  # never set: a wait that Ctrl-C ends
    while not worker.ready_for_serving():
        if time.monotonic() > deadline:
            raise ServiceTimeout(
                f"the embedding-worker and its parameter servers were not ready in "
                f"{READY_S:g} s; they are once a TrainCtx was entered",
                role="embedding-worker",
                method="ready_for_serving",
            )
        pause.wait(ASK_AGAIN_S)
