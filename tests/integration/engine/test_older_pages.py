"""Random schedules: a request that begins after a load never reads a page of older weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tiny

from burnish.cli.engine import Reference
from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.model import checkpoint
from burnish.types import Completion, SamplingParams, Weights

SEEDS = range(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(), path)
    return path


def schedule(engine: NativeEngine, model: Path, seed: int) -> tuple[int, float]:
    """Submits, steps and loads at random -> the tokens that were compared, and their largest gap.

    Prompts share their beginnings, the cache is small enough for preemptions, and weights turn the
    signs of keys and values, so that an older page makes a gap of nats.
    """
    draw, reference = random.Random(seed), Reference(model, "fp32", tiny.DEVICE)
    whole = tiny.prompt(40, seed)
    prompts = [whole[:37], whole[:22], np.concatenate([whole[:18], whole[::-1][:15]])]
    keeps = engine.scheduler.settings.on_update == "keep"
    version, compared, largest = 0, 0, 0.0
    asked, begun = dict[str, Request](), dict[str, int]()
    """Requests, and the first version that they may read pages of."""
    fresh, left = set[str](), list[Completion]()
    for action in [*draw.choices(["submit", "step", "load"], [4, 9, 2], k=60), "end"]:
        if action == "submit":
            name, params = f"r{len(asked)}", SamplingParams(max_tokens=draw.randint(2, 14))
            how = draw.choice(prompts), draw.randint(1, 3), params, len(asked)
            asked[name], begun[name] = Request(name, *how), version
            engine.submit(asked[name])
            fresh.add(name)
        if action == "step":
            left += [c for _ in range(draw.randint(1, 4)) for c in engine.step()]
            fresh.clear()
        if action in ("load", "end"):
            while action == "end" and engine.unfinished:
                left += engine.step()
            for c in left:
                if keeps and set(c.versions) != {begun[c.request_id]}:
                    continue  # it may rest on its own older pages
                new = c.versions == version
                scores = reference.score(asked[c.request_id].prompt, c.token_ids, 1.0)
                gaps = np.abs(c.logprobs - scores)[new]
                compared, largest = compared + len(gaps), max(largest, gaps.max(initial=0))
            left, version = [], version + 1
            turned = version % 2 == 1
            engine.load(Weights(version, 0, reference.take(0.02 * turned, turned=turned)))
            begun |= dict.fromkeys(fresh, version)
    return compared, float(largest)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_no_page_of_older_weights_is_read(mode: str, model: Path) -> None:
    total = 0
    for seed in SEEDS:
        engine = tiny.engine(on_update=mode, tokens=240, max_running=4, step_tokens=32)
        compared, gap = schedule(engine, model, seed)
        assert gap < 20 * tiny.CLOSE, f"seed {seed}"
        total += compared
    assert total > 200


def test_the_schedules_see_older_pages(model: Path) -> None:
    def found(seed: int) -> float:
        engine = tiny.engine(on_update="keep", tokens=240, max_running=4, step_tokens=32)
        engine.scheduler.pages.forget_names = lambda: None  # type: ignore[method-assign]
        return schedule(engine, model, seed)[1]

    assert any(found(seed) > 0.1 for seed in SEEDS)
