"""The same surroundings for every run: no job in the environment, one thread of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from persia import env
from tests.golden.commands import without_persia


@contextmanager
def quiet_surroundings(**more: str) -> Iterator[None]:
    """Have no variables of a job but these, and torch compute in one thread."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - without_persia().keys():
            patch.delenv(name)
        for name, text in more.items():
            patch.setenv(name, text)
        env.reload_env()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
    env.reload_env()
