"""Runs whose turns have advantages of their own: what is learned follows from the recorded rewards,
and runs resume bit for bit."""

import numpy as np
import pytest
import torch

from burnish import api
from burnish.errors import ConfigError
from burnish.model.checkpoint import save_model
from burnish.model.reward import RewardModel
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import load_recipe
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
TURN_MEAN = ["objective.advantage=turn_mean", "objective.advantage.gamma=0.5"]
TURN_GAE = [*CRITIC, "objective.advantage.over=turns", "train.epochs=2"]


def slow(*settings):
    return pytest.param(list(settings), marks=pytest.mark.slow)


def returns_of(row, gamma, weight):
    """The returns of a recorded episode's turns; the last turn has the rest of the reward."""
    rewards = [weight * (turn["reward"] or 0.0) for turn in row["turns"]]
    rewards[-1] += row["reward"] - sum(rewards)
    found = []
    for reward in reversed(rewards):
        found.append(reward + gamma * (found[-1] if found else 0.0))
    return found[::-1]


def expected_advantages(rows, gamma, weight=1.0):
    """The mean advantage over the actions of each episode of a group, in plain Python."""
    returns = [returns_of(row, gamma, weight) for row in rows]
    found = []
    for row, own in zip(rows, returns, strict=True):
        total = 0.0
        for place, turn in enumerate(row["turns"]):
            others = [one[place] for one in returns if len(one) > place]
            total += (turn["end"] - turn["start"]) * (own[place] - np.mean(others))
        found.append(total / sum(turn["end"] - turn["start"] for turn in row["turns"]))
    return found


UNEQUAL = ("turns == 3", "turns == 3 or sum(map(ord, text)) % 3 == 0")
"""A change of the game after which episodes have different numbers of turns."""


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["rollout.overlong=mask", "rollout.max_tokens=34"],
        ["length.name=target", "length.tokens=7", "length.coefficient=0.1"],
        ["task.turns=2"],
    ],
    ids=["plain", "masked", "penalty", "turns"],
)
def test_advantages_follow_from_the_recorded_rewards_of_turns(folder, more):
    game = folder / "game.py"
    game.write_text(game.read_text().replace(*UNEQUAL))
    settings = [*EPISODES, *TURN_MEAN, "train.steps=2", *more]
    run = api.train("keywords", overrides=settings, out=folder / "run")
    groups = {}
    for row in recorded(run):
        groups.setdefault((row["step"], row["group"]), []).append(row)
    assert len(groups) == 4 or "rollout.overlong=mask" in more
    lengths = {len(row["turns"]) for rows in groups.values() for row in rows}
    assert len(lengths) > 1
    for rows in groups.values():
        found = [row["advantage"] for row in rows]
        for row, got, want in zip(rows, found, expected_advantages(rows, 0.5), strict=True):
            is_masked = "rollout.overlong=mask" in more and row["finish"] == "length"
            assert got == pytest.approx(0.0 if is_masked else want, abs=1e-5)
    assert any(row["advantage"] for rows in groups.values() for row in rows)


@pytest.mark.parametrize(
    "more",
    [
        TURN_MEAN,
        [*TURN_GAE, "objective.advantage.whiten=true", "train.micro_sequences=3"],
        slow(*TURN_MEAN, *STALE, "loop.lag=1", "buffer.capacity=4", "buffer.max_uses=2"),
        slow(*TURN_MEAN, "objective.kl.name=k1", "objective.kl.where=reward"),
        slow(*TURN_MEAN, "selection.dead_groups=active", "selection.on_bound=learn"),
    ],
    ids=["mean", "gae", "buffer", "kl in reward", "active"],
)
def test_turn_credit_resumes_bit_for_bit(folder, more):
    settings = [*EPISODES, *more]
    run = api.train("keywords", overrides=settings, out=folder / "a" / "run")
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")
    assert max(step.get("mismatch/logprob_mean", 0.0) for step in run.metrics) < 1e-5


@pytest.mark.parametrize("credit", [slow(*TURN_MEAN), [*TURN_GAE, "train.micro_tokens=400"]])
def test_turns_in_several_sequences(folder, forgetful, credit):
    settings = [*forgetful, *TEMPLATE, *credit]
    run = api.train("keywords", overrides=settings, out=folder / "a" / "run")
    assert any(len(row.get("sequences", [])) > 1 for row in recorded(run))
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")


REMAX = ["objective.advantage=remax"]


@pytest.mark.parametrize(
    "more", [[], slow("rollout.temperature=0.7", "task.live=3", *STALE, "loop.lag=1")]
)
def test_the_greedy_episode_is_the_baseline_of_its_group(folder, more):
    """It has the same row and seed, is not learned, and a resumed run plays it again."""
    game = folder / "game.py"
    game.write_text(game.read_text().replace("/ 10,", "/ 10 + self.row['n'],"))
    settings = [*EPISODES, *REMAX, *more]
    run = api.train("keywords", overrides=settings, out=folder / "a" / "run")
    rows = recorded(run)
    for row in rows:
        greedy = row["parts"]["greedy"]
        assert row["advantage"] == pytest.approx(row["reward"] - greedy, abs=1e-5)
    of_group = {(row["step"], row["group"]): row["parts"]["greedy"] for row in rows}
    assert len({round(greedy) for greedy in of_group.values()}) > 1  # by the row
    assert all(row["parts"]["greedy"] == of_group[row["step"], row["group"]] for row in rows)
    for step in run.metrics[1:]:
        assert step["rollout/responses"] == 8
        assert 0 < step["rollout/continuation_tokens"] <= 2 * 15
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")


@pytest.fixture
def learned(folder):
    """Settings of a reward model."""
    tokenizer = Tokenizer.of_bytes()
    shape = ModelConfig(tokenizer.vocab_size, n_layers=1, d_model=16, n_heads=2, d_ff=24)
    body = Transformer(shape).init_weights(1)
    save_model(body, folder / "base")
    tokenizer.save(folder / "base")
    scorer = RewardModel(body, None)
    scorer.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    scorer.save(folder / "learned", source=folder / "base")
    return ["reward_model.name=learned", "reward_model.task=0.5", "train.steps=1"]


def test_a_reward_model_scores_episodes(folder, learned):
    """Its reward counts in the last turn, and the rewards of turns have the task's weight."""
    run = api.train("keywords", overrides=[*EPISODES, *TURN_MEAN, *learned], out=folder / "run")
    rows = recorded(run)
    groups = {row["group"]: [r for r in rows if r["group"] == row["group"]] for row in rows}
    for row in rows:
        own = sum(turn["reward"] for turn in row["turns"])
        assert row["reward"] == pytest.approx(row["parts"]["learned"] + 0.5 * own, abs=1e-5)
    for same in groups.values():
        wanted = expected_advantages(same, 0.5, weight=0.5)
        assert [row["advantage"] for row in same] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_model_does_not_score_episodes_that_failed(folder, learned):
    """Some fail in a turn, and all of a row before the first turn."""
    game = folder / "game.py"
    started = game.read_text().replace(
        "        self.heard,", "        self.begin(row)\n        self.heard,"
    )
    broken = started.replace("        text =", "        self.go_on()\n        text =")
    game.write_text(broken + """
    def begin(self, row):
        if row["n"] > 4:
            raise RuntimeError("no game")

    def go_on(self):
        if len(self.heard) == 2 and sum(map(ord, self.heard[-1])) % 3 == 0:
            raise RuntimeError("no second turn")
""")  # fmt: skip
    (folder / "held.jsonl").write_text('{"n": -1}\n')
    more = ["task.validation=held.jsonl", "task.validation_rows=1", "rollout.max_errors=1"]
    settings = [*EPISODES, *TURN_MEAN, *learned, *more, "train.steps=3"]
    rows = recorded(api.train("keywords", overrides=settings, out=folder / "run"))
    failed = [row for row in rows if row["status"] == "error"]
    causes = "no game", "no second turn"
    assert {c for row in failed for c in causes if c in row["message"]} == set(causes)
    for row in rows:
        is_failed = row["status"] == "error"
        assert (row["reward"] is None, "learned" not in row["parts"]) == (is_failed, is_failed)
    assert len(failed) < len(rows)


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        (["objective.advantage=turn_mean"], "objective.advantage = 'group_mean'"),
        (
            ["objective.advantage=gae", "critic.clip=0.3", "objective.advantage.over=turns"],
            "objective.advantage.over = 'tokens'",
        ),
    ],
)
def test_turns_need_episodes(settings, other):
    with pytest.raises(
        ConfigError, match=f"needs the turns of an environment.*'keywords'.*{other}$"
    ):
        load_recipe("keywords", settings)


def test_each_setting_of_turn_credit_has_an_effect(folder):
    """As in test_properties, for the settings that only episodes have."""

    def numbers(name, *more):
        own = [*EPISODES, "train.steps=1", *more]
        return [
            row["advantage"] for row in recorded(api.train("keywords", overrides=own, out=name))
        ]

    assert numbers("a", *TURN_MEAN) != numbers("b", "objective.advantage=turn_mean")
    gae = [*CRITIC, "objective.advantage.lam=0.5"]
    assert numbers("c", *gae) != numbers("d", *gae, "objective.advantage.over=turns")
