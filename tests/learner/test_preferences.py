"""A reward model's learner takes the mean loss over pairs, however a batch is split."""

import pytest
import torch

from burnish.learner.learner import LocalLearner
from burnish.learner.preferences import PreferenceProgram
from burnish.loops import supervised
from burnish.recipe.recipe import TrainConfig
from burnish.rl.preferences import bradley_terry
from burnish.tasks.pairs import Pairs
from tests.learner.preference_pairs import groups, make_model, one_by_one


def make_learner(model, **train):
    return LocalLearner(model, PreferenceProgram(), TrainConfig(**{"clip_norm": 1e9} | train))


@pytest.mark.parametrize(
    "split", [{}, {"micro_tokens": 60}, {"micro_sequences": 2}, {"micro_sequences": 3}]
)
def test_the_loss_is_the_mean_over_pairs_however_it_is_cut(split):
    model, rows = make_model(), groups()
    scores = one_by_one(model, rows)
    expected = bradley_terry(scores[0::2], scores[1::2]).mean()
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    learner = make_learner(model, **split)
    learner.optimizer.drop_gradients()
    learn = supervised.make_learn_batch(learner, rows)
    measured, *_, loss = learner._accumulate(learn)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-5, atol=1e-7)
    metrics = learner.program.metrics(measured, learn)
    wins = (scores[0::2] > scores[1::2]).double().mean().item()
    assert metrics["train/accuracy"] == pytest.approx(wins)
    held_out = supervised.validate_supervised(Pairs([], rows, 1.0, 0), learner)[1]
    assert held_out["validation/accuracy"] == pytest.approx(wins)
    assert held_out["validation/loss"] == pytest.approx(expected.item(), rel=1e-6)
