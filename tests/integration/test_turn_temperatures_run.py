"""Runs whose turns are sampled at different temperatures: the learner computes with the temperature
of each token."""

import pytest

from burnish import api
from burnish.errors import ConfigError
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from tests.integration.test_episode_run import (
    CRITIC,
    EPISODES,
    STALE,
    TEMPLATE,
    folder,
    forgetful,
    recorded,
)
from tests.loops.test_recorder import fingerprint, stopper

__all__ = ["folder", "forgetful"]
HEATS = ["task.turn_temperatures=[2.0,0.5,1.3]"]
LONG = pytest.mark.slow
IMPORTANCE = ["objective.importance=truncate", "objective.proximal=recompute"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([*IMPORTANCE, "objective.kl=k3", "objective.loss=clip"], id="importance"),
        pytest.param(
            [*IMPORTANCE, "objective.importance.level=sequence", "loop.lag=1", "buffer.capacity=4"],
            id="stale",
            marks=LONG,
        ),
        pytest.param([*CRITIC, "train.epochs=2", "task.pace=free"], id="free", marks=LONG),
        pytest.param(
            ["objective.advantage=remax", "train.micro_sequences=2"], id="remax", marks=LONG
        ),
    ],
)
def test_the_learner_uses_the_temperature_of_each_turn(folder, more):
    run = api.train("keywords", overrides=[*EPISODES, *HEATS, *more], out=folder / "run")
    fresh = [step for step in run.metrics[1:] if "mismatch/logprob_mean" in step]
    assert fresh
    for step in fresh:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
    if "objective.importance=truncate" in more and "loop.lag=1" not in more:
        assert [step["train/importance"] for step in fresh] == pytest.approx([1.0] * 3, abs=1e-4)
    assert {len(row["turns"]) for row in recorded(run)} == {3}


def test_turns_of_other_temperatures_are_drawn_differently(folder):
    """The first turn has the same temperature and therefore the same tokens."""

    def turns(name, *heats):
        own = [*EPISODES, f"task.turn_temperatures={list(heats)}", "train.steps=1"]
        rows = recorded(api.train("keywords", overrides=own, out=folder / name))
        return [[turn["text"] for turn in row["turns"]] for row in rows]

    plain, hot = turns("plain", 1.0), turns("hot", 1.0, 5.0)
    assert [own[0] for own in plain] == [own[0] for own in hot]
    assert [own[1] for own in plain] != [own[1] for own in hot]
    api.train("keywords", overrides=[*EPISODES, "train.steps=1"], out=folder / "default")
    names = ("metrics.jsonl", "rollouts.jsonl")
    files = [fingerprint(folder / name) for name in ("plain", "default")]
    assert [files[0][name] for name in names] == [files[1][name] for name in names]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            [*STALE, "loop.lag=1", "buffer.capacity=4", "buffer.max_uses=2"], id="held", marks=LONG
        ),
        pytest.param(
            [*STALE, "selection.dead_groups=active", "selection.on_bound=learn", "loop.lag=1"],
            id="active",
            marks=LONG,
        ),
    ],
)
def test_held_groups_keep_their_temperatures(folder, more):
    """Groups in a checkpoint's buffer, and groups in flight, are learned at their temperatures."""
    settings = [*EPISODES, *HEATS, *more]
    run = api.train("keywords", overrides=settings, out=folder / "a" / "run")
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")
    assert max(step.get("mismatch/logprob_mean", 0.0) for step in run.metrics) < 1e-5


@LONG
def test_several_sequences_have_the_temperatures_of_their_turns(folder, forgetful):
    settings = [*forgetful, *TEMPLATE, *HEATS, "objective.advantage=turn_mean"]
    run = api.train("keywords", overrides=settings, out=folder / "run")
    assert any(row.get("sequences") for row in recorded(run))
    assert max(step["mismatch/logprob_mean"] for step in run.metrics[1:]) < 1e-5


def test_temperatures_that_contradict_other_settings(folder):
    def load(*more):
        return load_recipe("keywords", [*EPISODES, *more])

    with pytest.raises(
        ConfigError, match=r"rollout\.temperature has no effect with task\.turn_temp"
    ):
        load(*HEATS, "rollout.temperature=0.7")
    with pytest.raises(ConfigError, match=r"3 turn_temperatures.*turns = 2; remove the last 1, or"):
        load(*HEATS, "task.turns=2")
    for wrong in ("[]", "[0.0]", "[1.0,-1.0]", "1.0"):
        with pytest.raises(ConfigError, match=r"task\.turn_temperatures"):
            load(f"task.turn_temperatures={wrong}")
    lines = dict(line for _, own in make_plan(load(*HEATS), folder) for line in own)
    assert lines["rollout"].endswith("4 samples, temperatures 2, 0.5, 1.3 by turn")
