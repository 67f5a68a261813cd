"""Settings from which an engine is built."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from burnish.engine.settings import EngineSettings


def test_settings_travel_as_json() -> None:
    settings = EngineSettings("vllm", "model", kv_bytes=1 << 40, on_update="keep", sleep=True)
    assert EngineSettings(**json.loads(json.dumps(asdict(settings)))) == settings


def test_defaults_depend_on_the_device() -> None:
    assert EngineSettings().step_limit == 1024
    assert EngineSettings(device="cuda:3").step_limit == 16384
    assert EngineSettings(device="cuda", step_tokens=7).step_limit == 7
    assert EngineSettings(precision="bf16").dtype == "bfloat16"


def test_an_engine_that_loads_its_model_needs_a_directory() -> None:
    assert EngineSettings(model="m").directory == Path("m")
    with pytest.raises(AssertionError, match="hf needs a model directory"):
        EngineSettings("hf").directory  # noqa: B018
