"""Warnings about runs that have not learned, on literal series. Their remedies are valid."""

import math
import re
import shlex
from pathlib import Path

import pytest

from burnish.recipe.load import effective_settings, list_recipes, load_recipe, recipe_to_toml
from burnish.runs.directory import RunDirectory, to_jsonl
from burnish.runs.verdicts import (
    accuracy_movement,
    find_warnings,
    is_possible,
    read_warnings,
    reward_movement,
    smaller_passes,
    step_movement,
)


def line(values, first=1):
    return [(first + step, value) for step, value in enumerate(values)]


def recipe(name="keywords", *changes):
    return effective_settings(load_recipe(name, changes))


def sampled(rewards, **more):
    """A run with these rewards per step, whose rollouts of 16 have a standard deviation of 0.4: the
    standard error of a step's mean is 0.1."""
    steps = len(rewards)
    series = {
        "rollout/reward": line(rewards),
        "rollout/reward_std": line([0.4] * steps),
        "rollout/responses": line([16.0] * steps),
        "rollout/dead_groups": line([0.2] * steps),
        "rollout/truncated": line([0.1] * steps),
    }
    return series | {name.replace("__", "/"): line(values) for name, values in more.items()}


def rising(steps):
    return [0.1 + 0.8 * step / max(1, steps - 1) for step in range(steps)]


@pytest.mark.parametrize("steps", [2, 3, 6, 12, 100])
def test_a_run_that_learns_has_no_warning(steps):
    assert find_warnings(sampled(rising(steps)), recipe()) == []
    kl = [0.3 * step / steps for step in range(steps)]
    assert find_warnings(sampled(rising(steps), kl__initial_k1=kl), recipe()) == []


@pytest.mark.parametrize("series", [{}, sampled([0.3]), {"rollout/responses": line([8.0])}])
def test_one_step_moves_nothing_and_is_no_reason_to_warn(series):
    assert find_warnings(series, recipe()) == []


def test_movement_and_its_standard_error_by_hand():
    # Two steps: windows of one step, whose variance is that of the rollout, 0.4² / 16 = 0.01.
    move = reward_movement(sampled([0.2, 0.45]))
    assert move == pytest.approx((0.2, 0.45, math.sqrt(0.02)))
    assert not move.is_clear  # 0.25 < 2 × 0.1414
    assert reward_movement(sampled([0.2, 0.5])).is_clear
    # Six steps: windows of two. Between the first two the variance is 0.02, larger than 0.01;
    # the last two are equal, so theirs is 0.01.
    move = reward_movement(sampled([0.2, 0.4, 0, 0, 0.7, 0.7]))
    assert move == pytest.approx((0.3, 0.7, math.sqrt((0.02 + 0.01) / 2)))
    # Without a deviation there is only the variance between steps.
    assert step_movement(line([0.2, 0.4, 0, 0, 0.7, 0.7])).error == pytest.approx(0.1)
    assert step_movement(line([0.2, 0.4, 0, 0, 0.7])) is None
    assert step_movement([]) is None


def test_a_reward_that_does_not_move():
    (told,) = find_warnings(sampled([0.4, 0.45] * 10), recipe())
    assert told == (
        "The reward did not move measurably: 0.425 at first, 0.425 at last, a difference of less "
        "than two standard errors (one is 0.058). Likely remedies in a new run: a higher "
        "learning rate (train.learning_rate=0.0001, now 4e-05), or more steps "
        "(train.steps=128, now 64)."
    )
    (far,) = find_warnings(sampled([0.4, 0.45] * 10, kl__initial_k1=[0.5] * 20), recipe())
    assert "more responses per step" in far  # the policy moved, so its rate is high enough
    assert "train.learning_rate=1e-05, now 4e-05" in far


def test_a_reward_is_judged_only_when_the_run_is_over():
    assert find_warnings(sampled([0.4] * 9), recipe(), is_over=False) == []
    dead = sampled([0.0] * 3) | {"rollout/dead_groups": line([1.0] * 3)}
    assert len(find_warnings(dead, recipe(), is_over=False)) == 1


def test_a_reward_that_falls():
    (told,) = find_warnings(sampled(rising(20)[::-1]), recipe())
    assert told.startswith(
        "The reward fell: 0.7947 at first, 0.2053 at last. Likely remedies in a new run: a"
    )
    assert "a lower learning rate (train.learning_rate=1e-05, now 4e-05)" in told
    assert "objective.kl.coefficient=0.15, now 0.05" in told


def test_held_out_accuracy_that_rises_is_learning():
    series = sampled([0.4, 0.45] * 10)
    low_high = {"accuracy_low": [0.1, 0.7], "accuracy_high": [0.3, 0.9]}
    for name, values in ({"accuracy": [0.2, 0.8]} | low_high).items():
        series[f"validation/{name}"] = line(values)
    move = accuracy_movement(series)
    assert (move.first, move.last) == (0.2, 0.8)
    assert move.error == pytest.approx(math.hypot(0.1, 0.1) / 1.96)
    assert find_warnings(series, recipe()) == []
    series["validation/accuracy"] = line([0.2, 0.3])
    assert len(find_warnings(series, recipe())) == 1


@pytest.mark.parametrize(
    ("reward", "lowest", "highest", "told"),
    [
        (0.02, 0.0, 1.0, "an easier task (task.least=1, task.most=3, now 2 and 4), or more"),
        (0.0, 0.0, 0.0, "an easier task"),
        (
            0.97,
            0.0,
            1.0,
            "a harder task (task.least=4, task.most=6, now 2 and 4), or other",
        ),
        (1.0, 1.0, 1.0, "a harder task"),
    ],
)
def test_dead_groups(reward, lowest, highest, told):
    series = sampled([reward] * 5)
    for name, value in {"dead_groups": 0.96, "reward_min": lowest, "reward_max": highest}.items():
        series[f"rollout/{name}"] = line([value] * 5)
    (warning,) = find_warnings(series, recipe())  # that the reward stood still goes without saying
    assert warning.startswith("96% of the groups were dead (all responses to a prompt earned")
    assert f"Likely remedies in a new run: {told}" in warning
    series["rollout/dead_groups"] = line([0.96] * 4 + [0.9])
    assert not any("dead" in text for text in find_warnings(series, recipe()))


def test_the_same_reward_for_every_response_of_the_run():
    series = sampled([0.5] * 5)
    for name, value in {"dead_groups": 1.0, "reward_min": 0.5, "reward_max": 0.5}.items():
        series[f"rollout/{name}"] = line([value] * 5)
    (warning,) = find_warnings(series, recipe())
    assert warning.startswith(
        "Every response earned exactly 0.5, so nothing was learned from it. Likely remedies in a "
        "new run: a corrected reward, if it should tell responses apart, or "
    )
    for end in ("min", "max"):  # each step has one reward, but not the same
        series[f"rollout/reward_{end}"] = line([0.5, 0.5, 0.4, 0.5, 0.5])
    (warning,) = find_warnings(series, recipe())
    assert warning.startswith("All of the groups were dead")


def test_responses_without_a_grade(tmp_path):
    series = {"rollout/responses": line([8.0] * 4), "rollout/grades_error": line([1.0] * 4)}
    (warning,) = find_warnings(series, recipe("keywords", "rollout.max_errors=1"), error="a.\nb")
    assert warning == (
        "No response was graded, so nothing was learned. The most frequent error: a. Likely "
        "remedies in a new run: a corrected reward, or a limit that ends such a run "
        "(rollout.max_errors=0.1, now 1.0)."
    )
    (warning,) = find_warnings(series | {"rollout/aborted": line([1.0] * 4)}, recipe())
    assert "The engine aborted most of them. Likely remedies in a new run: a lower" in warning
    series["rollout/grades_error"] = line([1.0, 0.9, 0.9, 1.0])
    (warning,) = find_warnings(series, recipe(), error="a")
    assert warning.startswith("95% of the responses were not graded, so next to nothing was")
    series["rollout/grades_error"] = line([1.0, 0.9, 0.89, 1.0])
    assert find_warnings(series, recipe(), error="a") == []


def test_the_most_frequent_error_of_a_run(tmp_path):
    metrics = [{"step": 1, "rollout/responses": 3, "rollout/grades_error": 1.0}]
    rows = [{"message": text} for text in ("rare", "often", "often", None)] + [{}]
    with RunDirectory(tmp_path, recipe_to_toml(load_recipe("keywords"))):
        (tmp_path / "metrics.jsonl").write_text(to_jsonl(metrics))
        (told,) = read_warnings(tmp_path)
        assert "error" not in told.partition("Likely")[0]
        (tmp_path / "rollouts.jsonl").write_text(to_jsonl(rows))
        (told,) = read_warnings(tmp_path)
    assert "The most frequent error: often." in told


def test_dead_groups_of_the_sorting_model():
    series = sampled([5.0] * 9) | {"rollout/dead_groups": line([1.0] * 9)}
    (easy,) = find_warnings(series, recipe("sort"))
    assert easy.startswith("All of the groups were dead")
    assert "a harder task (task.length=4, now 3), or other prompts in place of dead groups " in easy
    (hard,) = find_warnings(series | {"rollout/reward": line([0.0] * 9)}, recipe("sort"))
    assert "an easier task (task.length=2, now 3)" in hard
    assert "rollout.group_size=20, rollout.batch=60, train.batch=60, now 10 and 30 and 30" in hard
    shortest = recipe("sort", "task.length=2")  # one number is no task
    assert "easier" not in find_warnings(series | {"rollout/reward": line([0.0] * 9)}, shortest)[0]


@pytest.mark.parametrize(
    ("turns", "warning"),
    [
        (
            11.8,
            "All of the episodes were truncated at task.turns = 12. Likely remedies in a "
            "new run: more turns (task.turns=24, rollout.max_tokens=320, now 12 and 160), or an "
            "environment that ends its episodes sooner.",
        ),
        (
            5.0,
            "All of the episodes were truncated at rollout.max_tokens = 160. Likely remedies "
            "in a new run: more tokens (rollout.max_tokens=320, now 160), or shorter messages "
            "of the environment (task.observation_tokens).",
        ),
    ],
)
def test_truncated_episodes(turns, warning):
    more = {"rollout/truncated": line([1.0] * 12), "rollout/turns": line([turns] * 12)}
    assert find_warnings(sampled(rising(12)) | more, recipe("guess")) == [warning]


def test_truncated_responses():
    series = sampled(rising(12)) | {"rollout/truncated": line([1.0] * 12)}
    (told,) = find_warnings(series, recipe())
    assert told == (
        "All of the responses were truncated at rollout.max_tokens = 64. Likely remedies in a "
        "new run: a higher limit (rollout.max_tokens=128, now 64), or a text in "
        "rollout.stop that ends a response."
    )
    free = recipe("keywords", "task.must_end=false", "train.micro_tokens=150")
    (told,) = find_warnings(series, free)
    assert "rollout.max_tokens=128, train.micro_tokens=256, now 64 and 150" in told
    assert "or no reward for a response that does not end (task.must_end=true, now false)" in told


def test_further_limits_of_episodes_are_named():
    shares = {"rollout/truncated": 1.0, "rollout/truncated_context": 0.8}
    shares |= {"rollout/truncated_tokens": 0.2, "rollout/truncated_time": 0.0}
    series = sampled(rising(12)) | {name: line([x] * 12) for name, x in shares.items()}
    (told,) = find_warnings(series, recipe())
    assert "All of the episodes were truncated, most by the model's context." in told
    shares = {"rollout/truncated_context": 0.2, "rollout/truncated_tokens": 0.8}
    series |= {name: line([x] * 12) for name, x in shares.items()}
    (told,) = find_warnings(series, recipe())
    assert "truncated at rollout.max_tokens = 64" in told


def test_kl_that_is_too_large_or_not_finite():
    far = sampled(rising(12), kl__initial_k1=[0.1] * 11 + [0.9], kl__held_out_k1=[0.2, 1.3, 0.8])
    assert find_warnings(far, recipe()) == [
        "KL to the initial model reached 1.3 nats per token (step 2, kl/held_out_k1, a single "
        "step): the policy has probably lost other abilities. Likely remedies in a "
        "new run: a stronger KL penalty "
        "(objective.kl.coefficient=0.15, now 0.05), or a lower learning rate "
        "(train.learning_rate=1e-05, now 4e-05)."
    ]
    (told,) = find_warnings(far, recipe("keywords", "objective.kl=none"))
    assert 'a KL penalty (objective.kl.name="k3", objective.kl.coefficient=0.05' in told
    by_reference = sampled(rising(12), kl__reference_k1=[0.1] * 11 + [1.1])
    assert "KL to the reference reached 1.1" in find_warnings(by_reference, recipe())[0]
    infinite = sampled(rising(12), kl__initial_k1=[0.1] * 11 + [math.nan])
    (told,) = find_warnings(infinite, recipe("keywords", "train.precision=bf16"))
    assert told.startswith(
        "KL to the initial model was not finite at step 12. Likely remedies in a new run: a l"
    )
    assert 'more exact numbers (train.precision="fp32", engine.precision="fp32", now "bf16"' in told


def test_a_model_that_began_at_random_has_to_move_far():
    far = sampled(rising(12), kl__initial_k1=[1.6] * 12)
    assert find_warnings(far, recipe("sort", "train.log_kl=true")) == []
    assert find_warnings(far, recipe("keywords-scratch", "model.name=scratch")) == []
    assert (
        "not finite"
        in find_warnings(
            far | {"kl/initial_k1": line([math.inf])}, recipe("sort", "train.log_kl=true")
        )[0]
    )


def test_supervised_runs_are_judged_by_their_loss():
    falling = {"train/loss": line([2.0, 1.9, 1.2, 1.1, 0.5, 0.4])}
    still = {"train/loss": line([2.0, 1.9, 1.2, 1.1, 1.95, 1.9])}
    for name in ("sft", "reward"):
        assert find_warnings(falling, recipe(name)) == []
        (told,) = find_warnings(still, recipe(name))
        assert told.startswith("The loss did not move measurably: 1.95 at first, 1.925 at last")
        assert "more epochs (task.epochs=" in told
        assert find_warnings(still, recipe(name), is_over=False) == []
        few = {"train/loss": still["train/loss"][:5]}
        assert find_warnings(few, recipe(name)) == []
        held_out = still | {"validation/loss": line([2.0, 1.5])}
        assert find_warnings(held_out, recipe(name)) == []
    (told,) = find_warnings({"train/loss": line([0.5, 0.5, 1, 1, 2, 2.1])}, recipe("sft"))
    assert told.startswith(
        "The loss rose: 0.5 at first, 2.05 at last. Likely remedies in a new run: a lower lear"
    )


def test_distillation_without_a_reward_is_judged_by_the_teacher():
    changes = ["objective.advantage=teacher", "teacher.model=smollm2-135m", "task.name=files"]
    table = recipe("keywords", *changes, "task.reward=none", "task.train=a.jsonl")
    falling = sampled([0.0] * 12, kl__teacher_k1=[1.0 - 0.05 * step for step in range(12)])
    assert find_warnings(falling, table) == []
    still = sampled([0.0] * 12, kl__teacher_k1=[1.0, 0.9] * 6)
    (told,) = find_warnings(still, table)
    assert told.startswith("The KL to the teacher did not move measurably")


def test_a_run_without_rewards_or_measures():
    changes = ["task.name=files", "task.train=a.jsonl", "task.reward=none", "reward_model.name=r"]
    assert find_warnings(sampled(rising(12)), recipe("keywords", *changes)) == []
    assert len(find_warnings(sampled([0.1] * 12), recipe("keywords", *changes))) == 1
    assert find_warnings({"rollout/responses": line([8.0] * 12)}, recipe()) == []  # all errors


SERIES = {
    "dead and hard": sampled([0.0] * 9) | {"rollout/dead_groups": line([1.0] * 9)},
    "dead and easy": sampled([1.0] * 9) | {"rollout/dead_groups": line([1.0] * 9)},
    "truncated": sampled(rising(9)) | {"rollout/truncated": line([1.0] * 9)},
    "still": sampled([0.5] * 9),
    "still and far": sampled([0.5] * 9, kl__initial_k1=[0.7] * 9),
    "falling": sampled(rising(9)[::-1]),
    "far": sampled(rising(9), kl__initial_k1=[2.0] * 9),
    "not finite": sampled(rising(9), kl__initial_k1=[math.inf] * 9),
    "loss": {"train/loss": line([1.0] * 9)},
    "rising loss": {"train/loss": line([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0])},
}


NEVER = "truncated", "sort"
"""The sorting model outputs as many numbers as it got."""


@pytest.mark.parametrize("name", list_recipes())
def test_every_remedy_is_valid_for_its_recipe(name):
    """The settings that a warning names are accepted by the recipe, as overrides of a command."""
    table = recipe(name)
    is_supervised = load_recipe(name).is_supervised
    for case, series in SERIES.items():
        if ("loss" in case) != is_supervised or (case, table["task"]["name"]) == NEVER:
            continue
        found = find_warnings(series, table)
        assert found or table["model"]["name"] in ("sorter", "scratch"), case
        for told in found:
            remedies = told.partition("Likely remedies in a new run: ")[2]
            assert ", or " in remedies, told
            for given in re.findall(r"\((\w+\.[^()]*=.*?)\)", remedies):
                changes = given.partition(", now ")[0].split(", ")
                load_recipe(table, changes)


def test_a_recipe_with_pieces_from_python_has_warnings_too():
    table = recipe()
    table["objective"]["loss"] = {"name": "my own"}
    assert is_possible(table, {"train.steps": 3})
    (told,) = find_warnings(sampled([0.4, 0.45] * 10), table)
    assert "train.learning_rate=0.0001, now 4e-05" in told
    for series in SERIES.values():  # a recipe of another version may lack settings
        for task in ("sort", "keywords", "files"):
            find_warnings(series, {"task": {"name": task}, "unknown": 1})


def test_warnings_are_read_from_a_run(tmp_path):
    rows = [{"step": 1, "rollout/responses": 8, "kl/initial_k1": math.nan}, {"step": 2}]
    with RunDirectory(tmp_path, recipe_to_toml(load_recipe("keywords"))):
        (tmp_path / "metrics.jsonl").write_text(to_jsonl(rows))
    (told,) = read_warnings(tmp_path)
    assert told.startswith("KL to the initial model was not finite at step 1.")


def test_less_memory_per_pass(tmp_path):
    def saver(*changes):
        text = recipe_to_toml(load_recipe("keywords", changes))
        (tmp_path / "recipe.toml").write_text(text)
        words = shlex.split(smaller_passes(tmp_path / "recipe.toml") or "")
        assert not words or load_recipe(Path(words[2]), words[4::2])
        return words[4::2]

    assert saver() == ["train.micro_sequences=16"]
    assert saver("train.micro_sequences=2") == ["train.micro_sequences=1"]
    assert saver("train.micro_sequences=1") == ["train.recompute=true"]
    assert saver("train.micro_tokens=4096") == ["train.micro_tokens=2048"]
    assert saver("train.micro_tokens=128") == ["train.recompute=true"]
    assert saver("train.micro_tokens=128", "train.recompute=true") == []
    assert smaller_passes(tmp_path / "none" / "recipe.toml") is None
