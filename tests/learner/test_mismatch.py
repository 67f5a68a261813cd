"""A run stops if sampler and learner differ by more than its recipe allows."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from burnish import api
from burnish.engine.sorter import SorterEngine
from burnish.errors import ConfigError, MismatchError
from burnish.learner.mismatch import check_mismatch
from burnish.learner.program import mismatch
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import pack
from burnish.runs import checkpoints
from tests.loops.test_recorder import fingerprint


def check(batch, logprobs, version=1, **bounds):
    check_mismatch(
        logprobs, batch, version, mismatch(logprobs, batch, version), TrainConfig(**bounds)
    )


def test_the_error_shows_both_distributions_and_the_worst_tokens(two_groups):
    # Version 1 sampled the second group: prompt 1 2 3; responses 4 5 6, 7 and 8 9, with
    # log-probabilities of −0.1, −0.2, … The learner gives 6 less by 0.5, and 9 more by 0.1.
    batch = pack(two_groups)
    logprobs = batch.behavior_logprobs.clone()
    logprobs[batch.tokens == 6] -= 0.5  # the prompt's 6, too, which nobody sampled
    logprobs[(batch.tokens == 9) & (batch.versions == 1)] += 0.1
    logprobs[batch.versions == 0] += 7.0
    check(batch, logprobs, mismatch_mean=0.11, mismatch_max=0.51)  # the mean is 0.6 / 6
    check(batch, logprobs, version=2, mismatch_max=1e-9)  # no token was sampled by version 2
    with pytest.raises(MismatchError) as caught:
        check(batch, logprobs, mismatch_mean=0.09, mismatch_max=0.6)
    told = str(caught.value)
    assert "logprob_mean = 0.1 > train.mismatch_mean = 0.09. Nothing was learned" in told
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines()}
    # Sampler, sorted: −0.3 −0.2 −0.2 −0.1 −0.1 −0.1. Learner: −0.8 −0.2 −0.1 −0.1 −0.1 −0.1.
    assert rows["quantiles"][::5] == ["0%", "100%"]
    assert rows["sampler"][::5] == ["-0.3000", "-0.1000"]
    assert rows["learner"][::5] == ["-0.8000", "-0.1000"]
    assert rows["sampler"][2] == "-0.1500"
    assert rows["gap"][2:4] == ["0.0000", "0.3000"]  # 0 0 0 0 0.1 0.5
    again = pickle.loads(pickle.dumps(caught.value))  # it may come from an actor
    assert str(again) == told
    first, second = again.worst[:2]
    assert (first.context, first.token) == ([1, 2, 3, 4, 5], 6)
    assert (second.context, second.token) == ([1, 2, 3, 8], 9)
    assert (first.sampler, first.learner) == pytest.approx((-0.3, -0.8))
    again.decode = lambda ids: [f"<{i}>" for i in ids]
    assert "-0.3000   -0.8000  …'<1><2><3><4><5>' '<6>'" in str(again)


SORT = ["train.steps=5", "train.epochs=2", "checkpoint.every=100", "train.mismatch_max=0.3"]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_stops_with_a_checkpoint_and_goes_on(lag, tmp_path, monkeypatch):
    overrides = [*SORT, f"loop.lag={lag}", "objective.proximal=behavior"]
    whole = api.train("sort", overrides=overrides, out=tmp_path / "whole")
    real = SorterEngine.step

    def wrong(self):
        """Version 6, after three steps of two epochs, is half as sure as it should be."""
        shift = np.float32(0.5 * (self.version == 6))
        return [dataclasses.replace(c, logprobs=c.logprobs - shift) for c in real(self)]

    monkeypatch.setattr(SorterEngine, "step", wrong)
    if lag:  # the learner is at version 8 once it meets these tokens: that is no mismatch
        api.train("sort", overrides=overrides, out=tmp_path / "run")
        return
    with pytest.raises(MismatchError, match=r"logprob_max = 0\.5 > train\.mismatch_max = 0\.3"):
        api.train("sort", overrides=overrides, out=tmp_path / "run")
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "run")) == 3
    assert "worst tokens" in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(MismatchError):
        api.resume(tmp_path / "run")
    monkeypatch.undo()
    api.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_a_resumed_run_may_have_another_bound(tmp_path):
    path = api.train("sort", overrides=SORT, out=tmp_path / "run", stop=lambda: True)
    api.resume(path, overrides=["train.mismatch_max=9"])


def test_the_plan_tells_the_bounds(tmp_path):
    recipe = load_recipe("sort", ["train.mismatch_mean=0.01", "train.mismatch_max=2"])
    lines = dict(dict(make_plan(recipe, tmp_path))["batches"])
    told = "stops the run if sampler and learner differ by more than 0.01 on average, 2 on a token"
    assert lines["alarm"] == told
    assert "alarm" not in dict(dict(make_plan(load_recipe("sort"), tmp_path))["batches"])
    with pytest.raises(ConfigError, match=r"train\.mismatch_max must be greater than 0, got 0"):
        load_recipe("sort", ["train.mismatch_max=0"])
    with pytest.raises(ConfigError, match=r"train\.mismatch_mean has no effect with task"):
        load_recipe("keywords-scratch-sft", ["train.mismatch_mean=0.1"])


def test_a_gap_that_is_not_finite_is_the_business_of_skipped_steps(two_groups):
    batch = pack(two_groups)
    check(batch, torch.full_like(batch.behavior_logprobs, torch.nan), mismatch_max=1e-9)
