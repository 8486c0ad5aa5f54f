"""A server that begins empty in a running job, and what it has written there before.

Its packets (``incremental``) begin with one of all rows. Read to the last one they are its rows
as they were then: what came after it is lost, which is that of ``incremental_flush_sec`` and of
the packet being written. Packets name their run, so that a server of another run, which
is empty too, does not begin with rows of the last.
"""

from __future__ import annotations

from persia import env
from persia._files import catalog
from persia._files.catalog import below, folder_of
from persia._files.open import open_storage
from persia._rpc.messages import LoadRequest
from persia._server.restore import LoadManager, settings_of
from persia._server.row_settings import ServerSettings
from persia._server.state_file import StateRecovery
from persia.config import ParameterServerConfig
from persia.errors import ConfigError
from persia.logger import get_logger

_logger = get_logger("persia.incremental")

# What ``extras`` of a packet's manifest call the run.
RUN = "run"


def recover_rows(
    config: ParameterServerConfig,
    loads: LoadManager,
    settings: ServerSettings,
    recovery: StateRecovery,
) -> bool:
    """Load a server's own packets of this run, if there are any and it has no rows.

    Rows that are missing because a client's load was cut short are missing on other servers,
    too: only another load brings them.

    Returns:
        Whether it has rows of packets now.

    Raises:
        ConfigError: If the run has no name.
        CheckpointError: If the packets cannot be read.
    """
    replica, num_replicas = recovery.facts["replica_index"], recovery.facts["replica_size"]
    url = below(config.incremental_dir, folder_of(replica))
    was_cut_short = loads.missing_from == url  # this, in a process before
    if not was_cut_short and (recovery.num_rows or loads.missing_from is not None):
        return False
    newest = _newest_of_run(url, num_replicas)
    if newest is None:
        return False
    _logger.warning(
        "parameter server %d of %d is empty, and begins with its rows as of %s: what was "
        "changed after %s is lost",
        replica,
        num_replicas,
        *newest,
    )
    request = LoadRequest(0, "verify", url, "", None)
    hyper, optimizer, _ = settings_of(request)  # training goes on: its library is needed
    settings.complete(hyper, optimizer)
    for note in loads.load_now(request):
        _logger.warning("%s: %s", url, note.text)
    state = settings.state
    recovery.num_rows = 0 if state is None else len(state.store)
    return True


def _newest_of_run(url: str, num_replicas: int) -> tuple[str, str] | None:
    """Return place and time of the newest packet; None if there is none of this run."""
    run = env.run_id()
    if run is None:
        raise ConfigError(
            f"embedding_parameter_server_config.recovery: expected {env.run_id.name} to name "
            "the run, by which its packets are known from those of the run before"
        )
    storage = open_storage(url)
    identity = catalog.latest(storage)
    if identity is None:
        return None
    manifest = catalog.load(storage, identity)
    if (manifest.extras.get(RUN), manifest.num_servers) != (run, num_replicas):
        _logger.info("%s is of another run, and is not loaded", storage.at(identity))
        return None
    return storage.at(identity), manifest.created
