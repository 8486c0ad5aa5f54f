"""Variables of the environment: names that somebody reads, and values that can be read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator

from persia import env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia.config import nearest
from persia.errors import ConfigError

# Those that env.py speaks of, and the one of Compose.
KNOWN = {*re.findall(r"PERSIA(?:_[A-Z]+)+", inspect.getsource(env)), "PERSIA_SOURCE"}
# From which on one name is taken for another, spelled wrong: they all begin alike.
_NEAR = 0.8

# What refuses a value. The lists of addresses are read where servers are looked for, as well.
_READERS = (
    env.rpc_timeout_s,
    env.skip_check_data,
    env.launcher_verbose,
    env.is_supervised,
    env.may_listen_without_keys,
    env.metrics_port,
    env.checkpoint_roots,
    env.parameter_server_addresses,
    env.embedding_worker_addresses,
    env.nn_worker_addresses,
)


def check_variables() -> Iterator[Finding]:
    """Yield what is found of the variables that are set."""
    names = env.own_names()
    bad = [*unread(), *unknown(names)]
    yield from bad
    if names and not bad:
        yield ok("variables", f"{', '.join(names)}: can be read")


def unread() -> Iterator[Finding]:
    """Yield an error for each value that cannot be read."""
    for read in _READERS:
        try:
            read()
        except ConfigError as exc:
            yield error("variables", str(exc), "correct it; docs/configuration.md has them all")


def unknown(names: Iterable[str]) -> Iterator[Finding]:
    """Yield a warning for each name of ours that nobody reads."""
    for name in names:
        if name.startswith("PERSIA_") and name not in KNOWN:
            hint = nearest(name, sorted(KNOWN), _NEAR)
            yield warning(
                "variables", f"{name}: nothing reads it{hint}", "correct the name, or unset it"
            )
