"""Where actors run, and how the engine treats its cache on a weight update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.launch.resolve import resolve
from burnish.recipe.load import load_recipe

STALE = {"objective.proximal": "behavior"}


@pytest.mark.parametrize(("on_update", "kept"), [("keep", "keep"), ("recompute", "recompute")])
def test_the_engine_is_told_what_becomes_of_caches(
    on_update: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish.launch import engines

    seen: list[Any] = []
    monkeypatch.setattr(engines, "make_engine", lambda settings, loaded: seen.append(settings))
    monkeypatch.setattr(engines, "open_model", lambda source, dtype: torch.nn.Identity())
    loop = {"loop": {"name": "free", "on_update": on_update}, "runtime": "ray", **STALE}
    engines.build_engine(resolve(load_recipe("keywords", [loop])))
    assert seen[0].on_update == kept
