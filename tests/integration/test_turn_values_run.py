"""Runs whose turns are valued by continuations of their episodes (VinePPO)."""

import re

import numpy as np
import pytest

from burnish import api
from burnish.errors import ConfigError, DataError, GraderError
from burnish.recipe.load import load_recipe
from tests.integration.test_episode_run import (
    EPISODES,
    GAME,
    STALE,
    TEMPLATE,
    folder,
    forgetful,
    recorded,
)
from tests.loops.test_recorder import fingerprint, stopper

__all__ = ["folder", "forgetful"]
VINE = [
    *("objective.advantage=vine", "objective.advantage.steps=turns"),
    "objective.advantage.continuations=2",
]
SLOW = pytest.mark.slow


def check_rows(rows):
    """Turns have values, the first one that of the group's other episodes; the advantage follows
    from them."""
    for row in rows:
        starts = [turn["start"] for turn in row["turns"]]
        assert [place for place, _ in row["steps"]] == starts
        same = [r for r in rows if (r["step"], r["group"]) == (row["step"], row["group"])]
        others = [r["reward"] for r in same if r["sample"] != row["sample"]]
        assert row["steps"][0][1] == pytest.approx(np.mean(others), abs=1e-5)
        values = [value for _, value in row["steps"]] + [row["reward"]]
        lengths = [turn["end"] - turn["start"] for turn in row["turns"]]
        mean = sum(n * g for n, g in zip(lengths, np.diff(values), strict=True)) / sum(lengths)
        assert row["advantage"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        ["train.steps=2"],
        pytest.param(["task.pace=free", "task.live=5"], marks=SLOW),
        pytest.param(["task.turn_temperatures=[1.5,0.5]", "rollout.max_tokens=34"], marks=SLOW),
    ],
)
def test_turns_are_valued_by_episodes_that_play_on(folder, more):
    run = api.train("keywords", overrides=[*EPISODES, *VINE, *more], out=folder / "run")
    rows = recorded(run)
    check_rows(rows)
    for step in run.metrics[1:]:
        own = [row for row in rows if row["step"] == step["step"]]
        assert step["rollout/steps_per_response"] == np.mean([len(r["turns"]) for r in own])
        # Two continuations of 10 and of 5 tokens for each of 8 episodes.
        assert 0 < step["rollout/continuation_tokens"] <= 8 * 2 * (10 + 5)
        assert step["rollout/responses"] == 8
        assert step["mismatch/logprob_mean"] < 1e-5


CONSTANT = GAME.replace(
    '"reward": (sum(map(ord, text)) % 11) / 10,',
    '"reward": float(len(self.heard) == 2) * self.row["n"],',
)


def test_continuations_have_the_rewards_of_the_turns_before_them(folder):
    """The second turn of every episode earns the row's number, and the others nothing: from the
    beginning of every turn, all continuations earn it in all."""
    (folder / "game.py").write_text(CONSTANT)
    run = api.train("keywords", overrides=[*EPISODES, *VINE, "train.steps=1"], out=folder / "run")
    rows = recorded(run)
    assert len({row["reward"] for row in rows}) > 1
    for row in rows:
        assert [value for _, value in row["steps"]] == [row["reward"]] * 3
        assert row["advantage"] == 0


@pytest.mark.parametrize(
    "more",
    [
        ["train.steps=2"],
        pytest.param([*STALE, "loop.lag=1", "buffer.capacity=4", "buffer.max_uses=2"], marks=SLOW),
    ],
)
def test_valued_turns_resume_bit_for_bit(folder, more):
    settings = [*EPISODES, *VINE, *more]
    api.train("keywords", overrides=settings, out=folder / "a" / "run")
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")


def test_episodes_of_several_sequences_play_on(folder, forgetful):
    settings = [*forgetful, *TEMPLATE, *VINE, "train.steps=2"]
    run = api.train("keywords", overrides=settings, out=folder / "run")
    rows = recorded(run)
    assert any(len(row.get("sequences", [])) > 1 for row in rows)
    check_rows(rows)


def test_only_deterministic_environments_can_be_replayed(folder):
    game = folder / "game.py"
    game.write_text(GAME.replace("deterministic = True", "deterministic = False"))
    with pytest.raises(DataError, match=r"needs deterministic = True in game\.py:Game"):
        api.train("keywords", overrides=[*EPISODES, *VINE], out=folder / "run")
    assert not (folder / "run").exists()
    # An environment that is not what it says.
    game.write_text(GAME.replace('"messages": f"{turns}', '"messages": f"{os.getpid()}'))
    with pytest.raises(GraderError) as caught:
        api.train("keywords", overrides=[*EPISODES, *VINE], out=folder / "run")
    assert re.search(
        r"no continuation from token \d+ has a grade: the environment was replayed from its seed "
        r"and the recorded actions, but the observation of step 1 differs; use the seed",
        str(caught.value),
    )


def test_steps_and_tasks_that_do_not_go_together(folder):
    with pytest.raises(ConfigError, match=r"steps = 'lines' divides .*; use .*steps = 'turns'$"):
        load_recipe("keywords", [*EPISODES, "objective.advantage=vine"])
    with pytest.raises(
        ConfigError, match=r"needs the turns of an environment.*; use .*steps = 'lines'$"
    ):
        load_recipe("keywords", VINE)
    for wrong in (
        "rollout.overlong=drop",
        "length.name=among_correct",
        "selection.dead_groups=active",
    ):
        with pytest.raises(ConfigError, match=r"objective\.advantage = 'vine'"):
            load_recipe("keywords", [*EPISODES, *VINE, wrong])


def test_continuations_whose_environment_fails_are_counted_and_limited(folder):
    """They are no 0: the recorded values are means of the others' rewards, which are 1."""
    game = GAME.replace(
        '"reward": (sum(map(ord, text)) % 11) / 10,', '"reward": float(len(self.heard) == 1),'
    ).replace("        return {", "        if turns == 3 and sum(map(ord, text)) % 5 == 0:\n"
              "            raise RuntimeError('no third turn')\n        return {", 1)  # fmt: skip
    (folder / "game.py").write_text(game)
    settings = [*EPISODES, *VINE, "train.steps=1"]
    allowed = "rollout.max_errors=1"
    run = api.train("keywords", overrides=[*settings, allowed], out=folder / "run")
    (step,) = run.metrics[1:]
    assert step["rollout/continuation_errors"] > 0
    for row in recorded(run):
        if row["status"] != "error":
            assert {value for _, value in row["steps"]} == {1.0}
    with pytest.raises(GraderError, match=r"no third turn"):
        api.train("keywords", overrides=[*settings, "rollout.max_errors=0"], out=folder / "other")
