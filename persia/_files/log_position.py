"""Positions in a change log: which packets of it some rows have.

A number alone does not say it. A server that was killed, and finds no state file, is empty: it
goes on with the next number, or one that was promised and not written, and its packets lack the
rows that it had. So the life of a server's rows has a name, its *history*, which is in all of
its packets. It goes on in a process that recovers the rows, and ends where they are lost.

    a checkpoint   by server, the packet that will have all of its rows, and that one's history
    a packet       its history, and what its rows have *reached* of others: those of the
                   checkpoints that were loaded, and of what these had reached
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from persia._files.catalog import Chain
from persia._files.manifest import Manifest, number_of
from persia.errors import CheckpointError

Reached = Mapping[str, int]  # number of the last packet, by history

# What ``extras`` of manifests call it: of a checkpoint, and of a packet.
POSITION, HISTORY = "change_log", "log"
# Histories that are remembered; those reached last stay.
_MAX_REACHED = 256


@dataclass(frozen=True, slots=True)
class LogPosition:
    """What a checkpoint has of a log; empty if its servers wrote none."""

    packets: Mapping[int, int] = field(default_factory=dict)  # number by server
    histories: Mapping[int, str] = field(default_factory=dict)  # none from earlier versions
    reached: Reached = field(default_factory=dict)

    @staticmethod
    def of(manifest: Manifest) -> LogPosition:
        """Read that of a checkpoint; CheckpointError if it is none."""
        saved = manifest.extras.get(POSITION)
        if not isinstance(saved, dict) or "packets" not in saved:
            return LogPosition()
        try:
            packets = {int(server): int(number) for server, number in saved["packets"].items()}
            histories = saved.get("histories", {})
            if histories and {int(server) for server in histories} != packets.keys():
                raise ValueError("packets and histories of other servers")
            return LogPosition(
                packets,
                {int(server): str(name) for server, name in histories.items()},
                {str(name): int(number) for name, number in saved.get("reached", {}).items()},
            )
        except (TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(
                f"manifest of {manifest.id}: extras.{POSITION}: expected numbers and histories "
                f"by server, got {saved!r:.200}"
            ) from exc

    def to_json(self, url: str) -> dict[str, Any]:
        """Return what a checkpoint's ``extras`` hold; ``url`` is the log's."""
        packets = {str(server): number for server, number in self.packets.items()}
        histories = {str(server): name for server, name in self.histories.items()}
        found: dict[str, Any] = {"url": url, "packets": packets}
        if histories:
            found |= {"histories": histories, "reached": dict(self.reached)}
        return found

    def is_in(self, history: str, number: int, reached: Reached) -> bool:
        """Whether rows of one server have all of this, or their share of it.

        Args:
            history: Of these rows.
            number: That of their last packet.
            reached: What they have of other histories.
        """
        found = {**reached, history: number}
        if history in self.histories.values():  # the other servers answer for theirs
            wanted = {history}
        else:
            wanted = set(self.histories.values())
        return all(
            found.get(name, -1) >= self.packets[server]
            for server, name in self.histories.items()
            if name in wanted
        )


def history_of(manifest: Manifest) -> tuple[str, Reached]:
    """Return a packet's history, "" of earlier versions, and what its rows have of others."""
    saved = manifest.extras.get(HISTORY)
    if not isinstance(saved, dict):
        return "", {}
    try:
        reached = {str(name): int(number) for name, number in saved["reached"].items()}
        return str(saved["history"]), reached
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise CheckpointError(
            f"manifest of {manifest.id}: extras.{HISTORY}: expected a history and what it has "
            f"reached, got {saved!r:.200}"
        ) from exc


def reached_by(chains: Iterable[Chain]) -> Reached:
    """Return what rows have of logs once these chains were loaded."""
    found: dict[str, int] = {}
    for chain in chains:
        last = chain.manifests[-1]
        if HISTORY not in last.extras:
            position = LogPosition.of(last)
            found = joined(found, position.reached)
            own = {name: position.packets[n] for n, name in position.histories.items()}
        else:
            name, reached = history_of(last)
            found = joined(found, reached)
            own = {name: number_of(last.after or last.id)[0]} if name else {}
        found = joined(found, own)
    return found


def joined(before: Reached, more: Reached) -> dict[str, int]:
    """Return what rows have that have both."""
    found = dict(before)
    for name, number in more.items():
        found[name] = max(number, found.pop(name, number))  # the last one of the dict
    return dict(list(found.items())[-_MAX_REACHED:])
