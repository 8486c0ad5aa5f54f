"""Addresses of services, as the original's inference scripts ask for them."""

from __future__ import annotations

from persia import env


def get_embedding_worker_services() -> list[str]:
    """Return ``host:port`` of the embedding-workers that inference may ask.

    One address, from ``EMBEDDING_WORKER_SERVICE``; ``embedding_worker:8887`` if not set.
    """
    return [env.embedding_worker_service()]
