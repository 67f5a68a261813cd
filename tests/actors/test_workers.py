"""The parts of a run on Ray, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish import config
from burnish.actors.learner import RemoteLearner
from burnish.actors.transport import Parcel
from burnish.build import build_task
from burnish.distribute import make_generator, make_learner, make_scorer
from burnish.draws import Stream
from burnish.errors import ActorError, ConfigError, EngineError
from burnish.rollout.rollout import requests_of, sampling
from burnish.sizes import settled


def test_groups_that_an_evaluation_finished_are_handed_over(tmp_path: Path) -> None:
    """An evaluation steps the engine, and with it the groups in flight of a free-running loop."""
    recipe = settled(config.load("sort", []))
    generator, params = make_generator(recipe), sampling(recipe)
    parcel = make_learner(recipe, "shared", str(tmp_path)).weights(0, [])
    asked = [(0, build_task(recipe)[0].prompt(0))]
    group = requests_of(asked, 2, params, Stream.TRAIN)
    assert generator.advance(parcel, None, group, seconds=-1.0) == {}
    held_out = requests_of(asked, 1, params, Stream.EVALUATION)
    assert generator.evaluate(parcel, None, held_out).keys() == {"held-out-0"}
    assert generator.advance(None, None, [], seconds=1.0).keys() == {"group-0"}
    with pytest.raises(EngineError, match="waits for samples of a generator that has none"):
        generator.advance(None, None, [], seconds=1.0)


def test_a_state_of_another_step_is_no_checkpoint(tmp_path: Path) -> None:
    """A run that gave up waiting for a step must not save what the learner is after it."""
    answer = Parcel(0, 0, (), str(tmp_path / "none")), None, {"version": 3}
    fleet: Any = SimpleNamespace(ask=lambda *call: answer)
    learner = RemoteLearner(fleet, "", "store")
    learner.version = 2
    with pytest.raises(ActorError, match="at version 3, and the run at 2"):
        learner.state()


def test_a_scorer_whose_node_lacks_a_key_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 3)
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "key": "NO_SUCH_KEY"}
    task = {"name": "judged", "train": tmp_path / "rows.jsonl", "rubric": [["Short.", 1]]}
    model = {"name": "scratch", "tokenizer": "bytes"}
    recipe = config.load({"task": task | {"judge": judge}, "model": model, "runtime": "ray"})
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY' is not set in the environment"):
        make_scorer(recipe)
