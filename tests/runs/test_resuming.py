"""What may change when a run is resumed, and messages whose remedies can be followed."""

import json
import re
import shlex

import pytest

import burnish
from burnish.errors import ConfigError, RunError
from burnish.launch.preflight import find_problems
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs import resuming

FEW = ["train.steps=2", "train.epochs=1", "train.schedule=cosine", "validation.every=1"]


def ended(folder, *sets):
    """A run that `resumed_recipe` can read: only its recipe."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe_to_toml(load_recipe("sort", [*FEW, *sets])))
    return folder


@pytest.mark.parametrize("sets", [[], ["train.decay_steps=1"], ["train.warmup_steps=1"]])
def test_steps_whose_learning_rate_is_0_are_refused_with_a_new_run_that_learns(sets, tmp_path):
    run = ended(tmp_path / "run", *sets)
    with pytest.raises(ConfigError, match=r"steps can't grow to 4: .*'cosine' is 0 after") as found:
        resuming.resumed_recipe(run, ["train.steps=4"])
    command = shlex.split(str(found.value).rpartition("learning rate falls later: ")[2])
    assert command[:3] == ["burnish", "train", str(run / "recipe.toml")]
    again = load_recipe(command[2], [word for word in command[3:] if word != "--set"])
    assert (again.train.steps, again.idle_steps) == (4, 0)


def test_steps_may_be_added_before_the_end_of_the_decay_or_above_a_final_rate(tmp_path):
    later = ended(tmp_path / "later", "train.decay_steps=3")
    assert resuming.resumed_recipe(later, ["train.steps=3"]).idle_steps == 0
    assert resuming.resumed_recipe(later, ["train.steps=5"]).idle_steps == 2  # it is said
    above = ended(tmp_path / "above", "train.final_share=0.1")
    assert resuming.resumed_recipe(above, ["train.steps=9"]).idle_steps == 0
    constant = ended(tmp_path / "constant", "train.schedule=constant")
    assert resuming.resumed_recipe(constant, ["train.steps=9"]).idle_steps == 0


def test_added_steps_that_end_at_rate_0_are_announced(tmp_path):
    sets = [*FEW, "train.decay_steps=3"]
    run = burnish.train("sort", overrides=sets, out=tmp_path / "run", show=False)
    seen = []
    burnish.resume(run, overrides=["train.steps=4"], show=seen.append)
    said = "the learning rate is 0 after gradient step 3, so the last 1 gradient step will change"
    assert any(progress.doing.startswith(said) for progress in seen)
    assert run.metrics[-1]["train/learning_rate"] == 0


def test_the_error_lists_all_settings_that_may_change(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.learning_rate can't change") as found:
        resuming.resumed_recipe(ended(tmp_path / "run"), ["train.learning_rate=1"])
    assert all(name in str(found.value) for name in resuming.FREE)
    assert "validation.patience" in resuming.FREE


def test_the_metric_may_change_until_there_is_a_checkpoint(tmp_path):
    run = ended(tmp_path / "run", "validation.metric=validation/part_nope")
    known = ["validation.metric=validation/length", "validation.goal=min"]
    assert resuming.resumed_recipe(run, known).is_lower_better
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000001").touch()
    with pytest.raises(ConfigError, match=r"validation\.metric can't change"):
        resuming.resumed_recipe(run, known)


def test_a_metric_that_the_run_turns_out_not_to_have_is_replaced_by_resuming(tmp_path):
    sets = [*FEW, "validation.metric=validation/part_nope"]
    with pytest.raises(RunError, match=r"part_nope' is not a metric .*NAME of `burnish resume`"):
        burnish.train("sort", overrides=sets, out=tmp_path / "run", show=False)
    known = ["validation.metric=validation/length"]
    run = burnish.resume(tmp_path / "run", overrides=known, show=False)
    assert run.summary["validation"]["metric"] == "validation/length"
    assert run.best.score == max(row["validation/length"] for row in run.metrics[1:])


def mine(logprobs, ratio, advantages):
    return -ratio * advantages


def other(logprobs, ratio, advantages):
    return -2 * ratio * advantages


def test_a_run_with_an_own_loss_resumes_bit_for_bit(tmp_path):
    given = {"objective": {"loss": mine}, "show": False}
    whole = burnish.train("sort", overrides=["train.steps=3"], out=tmp_path / "whole", **given)
    asked = iter([True])
    stop = {"stop": lambda: next(asked, False)}
    path = tmp_path / "run"
    run = burnish.train("sort", overrides=["train.steps=3"], out=path, **stop, **given)
    assert run.metrics[-1]["step"] == 1
    call = f'burnish.resume({str(path)!r}, objective={{"loss": mine}})'
    assert resuming.command_to_resume(path) == call
    with pytest.raises(RunError, match=re.escape(f"continue the run from Python with {call}")):
        burnish.resume(run, show=False)
    other.__name__ = "mine"
    with pytest.raises(RunError, match=r"inputs\.objective\.loss\.function: mine \("):
        burnish.resume(run, objective={"loss": other}, show=False)
    with pytest.raises(ConfigError, match=r"objective\.loss\.name can't change"):
        burnish.resume(run, objective={"loss": "reinforce"}, show=False)
    burnish.resume(run, **given)
    for name in ("metrics.jsonl", "rollouts.jsonl", "recipe.toml"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_the_name_of_a_function_is_no_function_and_nothing_is_resumed(tmp_path):
    named = load_recipe("sort", ["objective.loss=own", "objective.loss.function=masked_clip"])
    (problem,) = find_problems(named, tmp_path / "run")
    assert 'burnish.train(…, objective={"loss": masked_clip})' in str(problem)
    assert "resume" not in str(problem)
    with pytest.raises(ConfigError) as found:
        burnish.train(named, out=tmp_path / "run", show=False)
    assert not getattr(found.value, "__notes__", [])
    assert not (tmp_path / "run").exists()
    assert find_problems(named) == []  # an evaluation does not read the objective


def test_the_command_passes_all_functions_again(tmp_path):
    read = {"reward.short": "short (1)", "reward.long": "long (2)", "model": "3"}
    read["objective.advantage.values"] = "height (4)"
    (tmp_path / "environment.json").write_text(json.dumps({"inputs": read}))
    values = 'objective={"advantage": {"name": "gae", "values": height}}'
    call = f"burnish.resume({str(tmp_path)!r}, reward=[short, long], {values})"
    assert resuming.command_to_resume(tmp_path) == call


@pytest.mark.parametrize(
    ("steps", "every", "patience"), [(5, 10, 2), (5, 2, 3), (20, 10, 2), (1, 1, 1)]
)
def test_an_early_stop_that_cannot_happen_is_an_error_whose_remedies_work(steps, every, patience):
    sets = [f"train.steps={steps}", f"validation.every={every}"]
    with pytest.raises(ConfigError, match=r"validation\.patience = \d has no effect") as found:
        load_recipe("sort", [*sets, f"validation.patience={patience}"])
    remedies = re.findall(r"([a-z]+\.[a-z]+) = (\d+)", str(found.value).partition("; use ")[2])
    assert remedies
    for name, value in remedies:
        load_recipe("sort", [*sets, f"validation.patience={patience}", f"{name}={value}"])
    last, value = remedies[-1]
    tight = [*sets, f"validation.patience={patience}", f"{last}={int(value) - 1}"]
    with pytest.raises(ConfigError, match="has no effect"):  # the bound is exact
        load_recipe("sort", tight)


def test_a_metric_that_no_run_has_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match=r"'validation/nope' is not a metric .*validation/reward"):
        load_recipe("sort", ["validation.metric=validation/nope"])
    with pytest.raises(ConfigError, match=r"did you mean 'validation/pass_at_4'"):
        load_recipe("sort", ["validation.metric=validation/pass_at_5", "validation.samples=4"])
    for name in ("length", "pass_at_4", "majority_at_2", "part_x", "reward/a", "judge/calls"):
        load_recipe("sort", [f"validation.metric=validation/{name}", "validation.samples=4"])


def test_every_metric_of_a_validation_is_known_before_the_run(tmp_path):
    sets = [*FEW, "validation.samples=3"]
    run = burnish.train("sort", overrides=sets, out=tmp_path / "run", show=False)
    names = [name for name in run.metrics[0] if name.startswith("validation/")]
    assert "validation/majority_at_3" in names
    for name in names:
        load_recipe("sort", [*sets, f"validation.metric={name}"])
