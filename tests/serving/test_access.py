"""Tokens, and addresses at which a server may listen without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia._serving import access
from persia._serving.access import AccessPolicy, Need, check_listening
from persia.errors import ConfigError, NotAllowed

FIRST, SECOND = "a" * 16, "b" * 16


def test_a_replaced_token_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_LOOK_S", -1.0)
    path = tmp_path / "token"
    path.write_text(FIRST)
    policy = AccessPolicy(path)
    policy.check(Need.TOKEN, f"Bearer {FIRST}")
    path.write_text(SECOND)
    policy.check(Need.TOKEN, f"bearer {SECOND}")
    with pytest.raises(NotAllowed):
        policy.check(Need.TOKEN, f"Bearer {FIRST}")
    path.write_text("")  # being written
    policy.check(Need.TOKEN, f"Bearer {SECOND}")


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer ", f"Basic {FIRST}", "Bearer \xff"])
def test_what_is_no_token(tmp_path: Path, shown: str) -> None:
    path = tmp_path / "token"
    path.write_text(FIRST)
    policy = AccessPolicy(path)
    policy.check(Need.NOTHING, shown)
    for need in (Need.TOKEN, Need.CONTROL):
        with pytest.raises(NotAllowed):
            policy.check(need, shown)


def test_files_that_hold_no_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        AccessPolicy(tmp_path / "none")
    path = tmp_path / "short"
    path.write_text("secret")
    with pytest.raises(ConfigError, match="16"):
        AccessPolicy(None, path)


def test_only_this_host_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_LISTEN_WITHOUT_KEYS", raising=False)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]"):
        check_listening(host, has_tls=False, has_token=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        check_listening(host, has_tls=True, has_token=False)
        check_listening(host, has_tls=False, has_token=True)
        with pytest.raises(ConfigError, match="token"):
            check_listening(host, has_tls=False, has_token=False)
    monkeypatch.setenv("PERSIA_LISTEN_WITHOUT_KEYS", "1")
    check_listening("0.0.0.0", has_tls=False, has_token=False)
