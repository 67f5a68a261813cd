"""Strategies that can't work are refused when the recipe is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish import config
from burnish.errors import ConfigError
from burnish.plan import plan
from burnish.strategy import RuntimeConfig

STALE = {"objective.proximal": "behavior"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loop.lag": -1}, "loop.lag must be greater than or equal to 0, got -1"),
        ({"loop.lag": 1}, "objective.proximal = 'behavior'"),
        (
            {"buffer.capacity": 4, "buffer.order": "recent", "buffer.max_uses": 2} | STALE,
            "buffer.max_uses = 2 has no effect with buffer.order = 'recent'",
        ),
        ({"buffer.capacity": 2} | STALE, "buffer.capacity = 2 is smaller than the 3 groups"),
        ({"loop": "free"} | STALE, "set runtime.name = 'ray'"),
        ({"loop": "free", "loop.window": 2, "runtime": "ray"} | STALE, "window = 2 is smaller"),
        ({"loop": "fre"}, "did you mean 'free'"),
        ({"runtime.generators": 2}, "runtime.generators has no effect with runtime.name = "),
        ({"loop": "free", "loop.lag": 2}, "loop.lag has no effect with loop = 'free'"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("sort", [settings])
    assert message in str(caught.value)


def test_actors_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    cluster = pytest.importorskip("burnish.actors.cluster", exc_type=ImportError)
    told = cluster.lacking(RuntimeConfig(generators=4), {"CPU": 2.0})
    assert "need 5 CPU (4 generators × 1 + the learner's 1), and Ray has 2" in told
    assert cluster.lacking(RuntimeConfig(), {"CPU": 2.0}) is None


def test_plan_says_who_sits_where() -> None:
    recipe = config.load("sort", [{"loop.lag": 2, "runtime": "ray", **STALE}])
    from pathlib import Path

    sections = dict(plan(recipe, Path("runs/x")))
    lines = dict(sections["strategy"])
    assert lines["lag"].startswith("2 × 10 versions")
    assert lines["generators"] == "1 × (1 CPUs, 0 GPUs)"
    assert "strategy" not in dict(plan(config.load("sort"), Path("runs/x")))


@pytest.mark.parametrize(("on_update", "kept"), [("keep", "keep"), ("recompute", "recompute")])
def test_the_engine_is_told_what_becomes_of_caches(
    on_update: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish import build, sizes
    from burnish.engine import engine

    seen: list[Any] = []
    monkeypatch.setattr(engine, "NativeEngine", lambda model, tokenizer, how: seen.append(how))
    monkeypatch.setattr(
        build, "open_model", lambda recipe, dtype: (torch.nn.Identity(), None, None)
    )
    loop = {"loop": {"name": "free", "on_update": on_update}, "runtime": "ray", **STALE}
    build.build_engine(sizes.settled(config.load("keywords", [loop])))
    assert seen[0].on_update == kept
