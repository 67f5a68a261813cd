"""One builder for the engines of all processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from burnish.engine.build import LoadedModel, make_engine
from burnish.engine.native.engine import NativeEngine
from burnish.engine.settings import EngineSettings
from burnish.engine.sorter import SorterEngine
from burnish.machine import hardware
from burnish.model import checkpoint
from burnish.model.sorter import Sorter


def test_a_model_in_memory_and_its_directory_give_the_same_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "set_up_torch", lambda threads: None)
    checkpoint.save_model(tiny.model(), tmp_path)
    tiny.tokenizer().save(tmp_path)
    settings = EngineSettings(device=tiny.DEVICE, model=str(tmp_path), kv_bytes=1 << 20)
    from_disk = make_engine(settings)
    in_memory = make_engine(settings, LoadedModel(tiny.model(), tiny.tokenizer()))
    assert isinstance(from_disk, NativeEngine)
    request = tiny.request("r", 9, n=2)
    tiny.assert_same(tiny.finish(from_disk, [request]), tiny.finish(in_memory, [request]))


def test_the_sorting_model_is_an_engine_like_any() -> None:
    model = Sorter(5, 3, 8, seed=0)
    engine = make_engine(EngineSettings("sorter"), LoadedModel(model))
    assert isinstance(engine, SorterEngine)
    assert engine.probe() == model.probe()
