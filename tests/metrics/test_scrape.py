"""Readings of Prometheus' text, and rates between two of them."""

from __future__ import annotations

import pytest

from persia._metrics.definitions import SERVER
from persia._metrics.scrape import Delta, Reading, read
from persia.errors import DataError


def test_a_process_that_was_restarted_begins_at_zero() -> None:
    def at(seconds: float, value: float) -> Reading:
        return Reading(SERVER, 0, seconds, {"persia_lookups_total": [({}, value)]})

    assert Delta(at(0, 100), at(2, 10)).rate("persia_lookups_total") == 5
    assert Delta(None, at(2, 10)).rate("persia_lookups_total") is None


@pytest.mark.parametrize(
    "text",
    ["", "<html>hello</html>", "up 1\n", 'a{role="x"} 1\n', 'a{role="x",replica="y"} 1\n'],
)
def test_what_is_no_text_of_ours_is_a_data_error(text: str) -> None:
    with pytest.raises(DataError, match="metrics of a process of PERSIA"):
        read(text)
