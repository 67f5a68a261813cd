"""Generator, scorer and learner of a run on Ray, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from burnish.actors.workers import LearnerWorker
from burnish.errors import EngineError, GraderError
from burnish.launch.local import build_task
from burnish.launch.ray import make_generator, make_learner, make_scorer
from burnish.launch.resolve import resolve
from burnish.launch.settings import rollout_settings
from burnish.randomness import Stream
from burnish.recipe.load import load_recipe
from burnish.rollout.rollout import requests_of
from burnish.types import Weights


def test_groups_that_an_evaluation_finished_are_handed_over(tmp_path: Path) -> None:
    """An evaluation steps the engine, and with it the groups in flight of a free-running loop."""
    recipe = load_recipe("sort", [])
    generator, params = make_generator(recipe), rollout_settings(recipe).params
    handle = make_learner(recipe, "shared", str(tmp_path)).weights(0, [])
    asked = [(0, build_task(resolve(recipe))[0].prompt(0))]
    group = requests_of(asked, 2, params, Stream.TRAIN)
    assert generator.advance(handle, None, group, seconds=-1.0) == {}
    held_out = requests_of(asked, 1, params, Stream.EVALUATION)
    assert generator.evaluate(handle, None, held_out).keys() == {"held-out-0"}
    assert generator.advance(None, None, [], seconds=1.0).keys() == {"group-0"}
    with pytest.raises(EngineError, match="waits for samples of a generator that has none"):
        generator.advance(None, None, [], seconds=1.0)


def test_a_scorer_whose_node_lacks_a_key_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 3)
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "key": "NO_SUCH_KEY"}
    task = {
        "name": "judged",
        "train": tmp_path / "rows.jsonl",
        "rubric": [["Short.", 1]],
        "chat": False,
    }
    model = {"name": "scratch", "tokenizer": "bytes"}
    recipe = load_recipe({"task": task | {"judge": judge}, "model": model, "runtime": "ray"})
    with pytest.raises(GraderError, match="'NO_SUCH_KEY' is not set in the environment"):
        make_scorer(recipe)


def test_a_new_learner_removes_the_weights_of_a_dead_one(tmp_path: Path) -> None:
    learner = FakeLearner()
    dead = LearnerWorker(learner, print, "shared", str(tmp_path))
    old, older = dead.weights(0, []), None
    older, old = old, dead.weights(0, [old.buffer])
    new = LearnerWorker(learner, print, "shared", str(tmp_path))
    handle = new.weights(1, [old.buffer])
    assert {str(path) for path in tmp_path.iterdir()} == {old.buffer, handle.buffer}
    assert older.buffer != old.buffer
    again = new.weights(1, [old.buffer, handle.buffer])
    assert {str(path) for path in tmp_path.iterdir()} == {old.buffer, handle.buffer, again.buffer}


class FakeLearner:
    """A learner of one tensor."""

    version = 0

    def probe(self) -> tuple[float, ...]:
        return ()

    def weights(self) -> Weights:
        return Weights(0, 0, {"a": torch.zeros(3)})
