"""A predictor is what hosts call."""

from __future__ import annotations

from persia._serving.predictor import Predictor
from persia._serving.servable import Servable


def test_a_predictor_has_all_of_it() -> None:
    wanted = {name for name in vars(Servable) if not name.startswith("_")}
    assert wanted <= set(dir(Predictor))
