"""The server program of an engine's process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import tiny

from burnish.engine.remote import server
from burnish.engine.remote.client import RemoteEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.machine import hardware
from burnish.model import checkpoint


def test_an_engine_that_can_not_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "set_up_torch", lambda threads: None)
    ours, theirs = socket.socketpair()
    with pytest.raises(SystemExit):
        server.run_server(theirs.detach(), EngineSettings("native", str(tmp_path / "nowhere")))
    with pytest.raises(EngineError, match=r"(?s)tiny failed at 'start': ModelError: .*nowhere"):
        RemoteEngine(ours, "tiny", 1)


def test_a_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        checkpoint.save_model(tiny.model(seed), tmp_path / name)
    one, same, other = (server.fingerprint(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
