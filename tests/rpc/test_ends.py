"""The ends of a ZeroMQ connection: what their threads do when they are closed."""

from __future__ import annotations

import threading
from pathlib import Path

from persia._rpc.zmq_transport import ZmqTransport

WAIT_S = 20.0


def test_an_end_that_is_closed_while_its_connection_breaks_has_no_endless_thread(
    tmp_path: Path,
) -> None:
    """Its thread looks for what came before the break, and there is nothing to find."""
    transport = ZmqTransport()
    listener = transport.listen(f"ipc://{tmp_path}/a")
    listener.start(lambda peer, parts: None, lambda reason: None)
    channel = transport.connect(f"ipc://{tmp_path}/a")
    came_here, may_go_on = threading.Event(), threading.Event()
    step = channel._step

    def step_of_a_cut_end() -> bool:
        came_here.set()
        may_go_on.wait(WAIT_S)
        return step()

    channel.start(lambda parts: None, lambda: None)
    # As if libzmq had told of the break; the thread is about to look for what came before it.
    channel._was_cut = True
    channel._step = step_of_a_cut_end  # type: ignore[method-assign]
    looking = threading.Thread(target=channel._on_event, daemon=True)
    listener.close(0.0)
    looking.start()
    assert came_here.wait(WAIT_S)
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    while not channel._is_closing:
        closing.join(0.001)
    may_go_on.set()
    for thread in (looking, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    transport.close()
