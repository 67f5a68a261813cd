import json

import pytest

from burnish import api
from burnish.errors import ConfigError, RunError
from burnish.recipe.load import load_recipe
from burnish.runs.early_stopping import Stall, Target
from burnish.runs.report import run_state


def rows(*values):
    """A validation every second step; None stands for one without the metric."""
    for number, value in enumerate(values):
        found = {} if value is None else {"validation/reward": value}
        yield {"step": 2 * number, "validation/length": 3.0} | found
        yield {"step": 2 * number + 1, "rollout/reward": 9.0}


@pytest.mark.parametrize(
    ("values", "patience", "delta", "best"),
    [
        ([0.5, 0.5], 1, 0.0, 0),  # an equal value is no improvement
        ([0.5, 0.6, 0.6], 2, 0.0, None),
        ([0.5, 0.6, 0.6, 0.1], 2, 0.0, 2),
        ([0.5, 0.6, 0.1, 0.7, 0.1], 2, 0.0, None),  # each improvement counts anew
        ([0.5, 0.55, 0.6], 2, 0.1, 0),  # 0.1 is not more than 0.1: two small improvements
        ([0.5, 0.55, 0.65], 2, 0.1, None),
        ([0.5, None, float("nan")], 2, 0.0, 0),
        ([None, None], 2, 0.0, 0),
        ([0.5], 1, 0.0, None),
        ([0.5, 0.4, 0.3], None, 0.0, None),
    ],
)
def test_a_run_ends_after_validations_without_improvement(values, patience, delta, best):
    stall = Target("validation/reward", False, patience, delta).stall(rows(*values))
    assert stall == (None if best is None else Stall("validation/reward", best, patience))


def test_lower_is_better():
    target = Target("validation/loss", True, 1)
    falling = [{"step": k, "validation/loss": 3.0 - k} for k in range(3)]
    assert target.stall(falling) is None
    assert target.stall(falling[::-1]) == Stall("validation/loss", 2, 2)
    assert target.score({"validation/loss": 2.0}) == -2.0


def test_the_metric_must_exist():
    chosen = Target("validation/rewrad", False, 3, is_required=True)
    with pytest.raises(RunError, match=r"'validation/rewrad' is not.*one of validation/length"):
        chosen.check({"validation/length": 1.0, "kl/held_out_k1": 0.0})
    with pytest.raises(ConfigError, match="no held-out prompts"):
        chosen.check({})
    Target("validation/reward", False).check({})


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("sort", ["validation.min_delta=0.1"], "validation.min_delta.*validation.patience"),
        ("sort", ["validation.goal=max"], "validation.goal.*validation.metric"),
        ("sort", ["validation.metric=rollout/reward"], "validation.metric"),
        ("sft", ["validation.metric=validation/reward"], "not a metric of a supervised run"),
    ],
)
def test_a_setting_without_effect_or_metric_is_an_error(recipe, given, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, given)


def test_the_target_of_a_recipe():
    def target(*given):
        recipe = load_recipe(*given)
        return recipe.target_metric, recipe.is_lower_better

    assert target("sort") == ("validation/reward", False)
    assert target("sft") == ("validation/loss", True)
    assert target("sort", ["validation.metric=validation/accuracy"]) == (
        "validation/accuracy", False,
    )  # fmt: skip
    shorter = ["validation.metric=validation/length", "validation.goal=min"]
    assert target("sort", shorter) == ("validation/length", True)


SORT = ["train.steps=40", "validation.every=2", "checkpoint.every=3", "validation.patience=2"]


def test_an_early_end_is_a_finished_run_that_says_why(tmp_path):
    asked = [*SORT, "validation.metric=validation/length", "validation.goal=min"]
    run = api.train("sort", overrides=asked, out=tmp_path / "run", show=False)
    # All answers have three numbers, so the length never improves on step 0.
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4]
    why = "validation/length has not improved in 2 validations since step 0"
    assert json.loads((run / "summary.json").read_text())["ended_early"] == why
    assert run.summary["ended_early"] == why
    assert run.summary["validation"]["metric"] == "validation/length"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["note"]) == ("finished", f"ended early: {why}")
    state = run_state(run.path, 4, 40, now=0.0)
    assert state["text"] == f"finished, 4 of 40 steps; ended early: {why}"
    assert [(saved.step, saved.score) for saved in run.checkpoints] == [(3, None), (4, -3.0)]
    page = (run / "report.html").read_text()
    assert why in page
    files = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")}
    api.resume(run, show=False)  # it is still over
    assert {name: (run / name).read_bytes() for name in files} == files
    assert run.summary["ended_early"] == why


def test_more_patience_continues_the_run(tmp_path):
    asked = [*SORT, "validation.metric=validation/length"]
    run = api.train("sort", overrides=asked, out=tmp_path / "run", show=False)
    api.resume(run, validation={"patience": 4}, show=False)
    more = [*asked, "validation.patience=4"]
    whole = api.train("sort", overrides=more, out=tmp_path / "whole", show=False)
    assert whole.metrics[-1]["step"] == 8
    assert run.metrics == whole.metrics
    kept = {saved[:3] for saved in run.checkpoints}
    best = {run.best[:3]}  # where the run ended first
    assert kept - best == {saved[:3] for saved in whole.checkpoints} - best
    assert run.best.step == 4


def test_a_missing_metric_is_found_before_the_first_step(tmp_path):
    asked = [*SORT, "validation.metric=validation/pass_at_8"]
    with pytest.raises(ConfigError, match=r"use one of .*validation/reward"):
        api.train("sort", overrides=asked, out=tmp_path / "run", show=False)
