"""The environment of an engine: its packages, token and key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from burnish.engine.remote import environment
from burnish.errors import EngineError


def test_an_environment_must_have_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.check_packages("native", None).keys() == {"torch", "numpy", "safetensors"}
    with pytest.raises(EngineError, match=r"engine\.python = '/no/python' is not a working Python"):
        environment.check_packages("native", "/no/python")
    monkeypatch.setitem(environment.NEEDED, "native", ("torch", "99.1"))
    with pytest.raises(EngineError, match=r"needs torch 99\.1 or newer, and has 2\."):
        environment.check_packages("native", sys.executable)
    monkeypatch.setitem(environment.NEEDED, "native", ("torch", "1.9"))
    monkeypatch.setitem(environment.NEWEST, "torch", "2.0")
    with pytest.raises(EngineError, match=r"needs torch 1\.9 to 2\.0, and has 2\."):
        environment.check_packages("native", sys.executable)
    monkeypatch.setitem(environment.NEWEST, "torch", "2")
    environment.check_packages("native", sys.executable)
    monkeypatch.setitem(environment.NEEDED, "native", ("no_such_package", "1"))
    with pytest.raises(EngineError, match=r"no_such_package 1 or newer, and has none; install it"):
        environment.check_packages("native", sys.executable)


def test_a_token_and_a_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.TOKEN, raising=False)
    with pytest.raises(EngineError, match="'tcp://host:1' needs a token: set BURNISH_ENGINE_TOKEN"):
        environment.check_token("tcp://host:1")
    monkeypatch.setenv(environment.TOKEN, "t")
    environment.check_token("tcp://host:1")
    assert environment.read_key(None, "http://host:1") is None
    monkeypatch.setenv("MY_KEY", "two words")
    with pytest.raises(EngineError, match=r"engine\.key = 'MY_KEY' .* at http://host:1"):
        environment.read_key("MY_KEY", "http://host:1")
    monkeypatch.setenv("MY_KEY", "sk-1\n")
    assert environment.read_key("MY_KEY", "http://host:1") == "sk-1"


def test_versions_are_compared_by_number() -> None:
    assert environment.version_parts("0.10.1+cu12") == (0, 10, 1)
    assert environment.version_parts("0.10") > environment.version_parts("0.9.9")
