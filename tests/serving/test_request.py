"""A request says by itself in which form its outputs are sent."""

from __future__ import annotations

from persia._serving.request import DecodedRequest


def test_without_named_outputs_all_are_sent_as_json() -> None:
    request = DecodedRequest({})
    assert not request.outputs
    assert not request.is_binary
    assert request.read_raw is None
