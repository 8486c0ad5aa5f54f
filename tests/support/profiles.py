"""How many examples Hypothesis tries.

    fast   a quarter         make test
    full   all of them       make test-slow, which runs the tests of the fast tier again for it,
                             make test-all, make debug, make asan
    deep   a hundred times   by hand: --hypothesis-profile=deep

Derandomized throughout: a test that fails today fails tomorrow.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FULL = 200
_LEAST = 5

PROFILES = {"fast": FULL // 4, "full": FULL, "deep": 100 * FULL}


def register() -> None:
    """Make the profiles known; the fast one holds unless pytest is given another."""
    for name, number in PROFILES.items():
        settings.register_profile(name, max_examples=number, derandomize=True, deadline=None)
    settings.load_profile("fast")


def tries(full: int, **options: Any) -> settings:
    """Decorate a test whose examples take long: this number in full, else in proportion."""
    number = full * settings().max_examples // FULL
    return settings(max_examples=max(number, min(full, _LEAST)), **options)
