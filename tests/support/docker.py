"""What there is of Docker on this machine."""

from __future__ import annotations

import shutil

from tests.support.processes import run


def why_no_compose() -> str:
    """Say what is missing: docker, or its plugin; empty where both are installed.

    A docker without the plugin refuses ``compose`` in words that differ by version, and by what
    follows it, so only the plain question after its version is asked.
    """
    if shutil.which("docker") is None:
        return "docker is not installed"
    asked = run("docker", "compose", "version")
    return "docker has no Compose plugin" if asked.returncode else ""
