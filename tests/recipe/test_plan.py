"""The text of a plan."""

from pathlib import Path

import pytest

from burnish.learner.optimizer import rate
from burnish.recipe.costs import Size, estimate_seconds
from burnish.recipe.load import (
    load_recipe,
    with_precision,
)
from burnish.recipe.models import ScratchConfig
from burnish.recipe.plan import make_plan
from burnish.types import Rates

STALE = {"objective.proximal": "behavior"}


SIZE = Size(1_000_000, cached=2 * 3 * 4 * 5, context=200, longest_prompt=30, copied=2)


def planned(*overrides):
    return {
        key: told
        for _, lines in make_plan(load_recipe("sort", overrides), Path())
        for key, told in lines
    }


def test_the_plan_says_where_a_kl_in_the_reward_is_subtracted():
    kl = ["objective.kl=k1", "objective.kl.where=reward", "objective.kl.coefficient=0.5"]
    assert planned(*kl)["KL"].endswith("r_i ← r_i − 0.5 Σ_t k1_t")
    over_time = planned(*kl, "objective.advantage=reinforce_plus_plus")
    assert over_time["KL"].endswith("r_t ← r_t − 0.5 k1_t")


def test_the_plan_says_if_no_bound_on_the_ratio_acts():
    none = "the policy has not moved then: ρ = 1, no bound acts"
    assert planned("train.epochs=1")["gradient steps"].endswith(none)
    assert none not in planned("train.epochs=2")["gradient steps"]
    assert none not in planned("train.epochs=1", "objective.loss=reinforce")["gradient steps"]
    stale = ["loop.lag=1", "objective.proximal=behavior"]
    assert none not in planned("train.epochs=1", *stale)["gradient steps"]


def test_the_plan_says_how_an_importance_is_bounded():
    recompute = ["objective.proximal=recompute", "objective.importance.high=3"]
    cut = planned("objective.importance=truncate", *recompute)
    assert cut["importance"] == "v_t = clip(u_t, 0, 3),  u_t = π_prox / π_behavior"
    masked = planned("objective.importance=mask", "objective.importance.level=sequence", *recompute)
    assert masked["importance"] == (
        "v_t = u_t if 0 ≤ u_t ≤ 3, else 0,  u_t = product over the response of π_prox / π_behavior"
    )


def test_the_plan_says_how_several_importances_are_combined():
    lines = planned(
        'objective.importance=["truncate", {name="reject", level="geometric", low=0.5}]',
        "objective.proximal=recompute",
    )
    assert lines["loss"] == "Σ w_(i,t) (v_t L_t)"
    assert lines["importance"] == "v_t = v1_t v2_t"
    assert lines["importance 1"] == "v1_t = clip(u_t, 0, 2),  u_t = π_prox / π_behavior"
    assert lines["importance 2"] == (
        "v2_t = 1 if 0.5 ≤ u_t ≤ 2, else 0,  "
        "u_t = geometric mean over the response of π_prox / π_behavior"
    )


def test_the_plan_says_what_the_reference_is():
    assert planned("objective.kl=k3")["reference"] == "π_ref: the initial model"
    refreshed = planned("objective.kl=k3", "objective.kl.refresh=4")["reference"]
    assert refreshed == "π_ref: refreshed every 4 steps"
    assert planned("objective.kl=k3", "objective.kl.ema=0.99")["reference"] == (
        "π_ref: a moving average of the policy, "
        "θ_ref ← 0.99 θ_ref + 0.01 θ after each gradient step"
    )


def test_the_plan_says_how_the_entropy_coefficient_adapts():
    lines = planned("objective.entropy={target=0.3, delta=0.01, high=0.5}")
    assert lines["loss"] == "Σ w_(i,t) (L_t − η H_t)"
    assert lines["entropy"] == "η = c if H ≤ 0.3, else 0,  H = mean H_t of the gradient step before"
    assert lines["coefficient"] == (
        "c ← c + 0.01 if H ≤ 0.3, else c − 0.01,  from 0 to 0.5,  first c = 0"
    )
    assert planned("objective.entropy_coefficient=0.2")["loss"] == "Σ w_(i,t) (L_t − 0.2 H_t)"


def test_a_model_from_scratch_is_made_from_a_recipe(tmp_path):
    size = ["model.name=scratch", "model.layers=2", "model.width=64", "model.heads=4"]
    recipe = load_recipe("keywords", size)
    assert recipe.model == ScratchConfig(layers=2, width=64, heads=4)
    told = ("task", "keywords, reward = 'use', must_end = True")
    assert told in dict(make_plan(recipe, tmp_path))["task"]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_passes_over_a_rollout_are_planned(k, tmp_path):
    sets = [f"train.epochs={k}", "train.steps=42", "train.schedule=linear"]
    recipe = load_recipe("keywords", ["rollout.batch=64", "train.batch=64", *sets])
    lines = dict(dict(make_plan(recipe, tmp_path))["batches"])
    assert lines["gradient steps"].startswith(f"{k} per rollout = 1 train batch of 64 responses ×")
    assert f"2,688 responses sampled, {42 * k} gradient step" in lines["in all"]
    assert f"linear to 0 after gradient step {42 * k})" in lines["in all"]


def test_the_optimizer_is_planned(tmp_path):
    sets = ["train.weight_decay=0.1", "train.eps=1e-15", "train.schedule=cosine"]
    sets += ["train.final_share=0.1", "train.learning_rate=1e-5", "train.decay_steps=9"]
    lines = dict(dict(make_plan(load_recipe("keywords", sets), tmp_path))["batches"])
    wanted = "(AdamW with weight decay 0.1 and ε 1e-15, learning rate 1e-05, cosine to 0.1 of it "
    assert f"{wanted}after gradient step 9)" in lines["in all"]
    warm = [*sets[2:3], "train.steps=5", "train.learning_rate=1e-5"]
    warm += ["rollout.batch=64", "train.batch=64", "train.epochs=1"]
    for steps, more, text in (
        (0, [], "cosine to 0 after gradient step 5)"),
        (1, [], "reached at gradient step 1, then cosine to 0 after gradient step 5)"),
        (2, [], "reached at gradient step 2, then cosine to 0 after gradient step 5)"),
        (0, ["train.decay_steps=3"], "cosine to 0 after gradient step 3; the last 2 gradient "
         "steps change nothing)"),
    ):  # fmt: skip
        asked = load_recipe("keywords", [*warm, f"train.warmup_steps={steps}", *more])
        line = dict(dict(make_plan(asked, tmp_path))["batches"])["in all"]
        assert line.endswith(f"(AdamW, learning rate 1e-05, {text}")
        train = asked.train.model_copy(update={"decay_steps": asked.decay_steps})
        lowest = asked.steps_to_lowest
        assert rate(train, lowest) == 0 < rate(train, lowest - 1)
        assert rate(train, max(0, steps - 1)) == 1e-5 or steps == 0
    gae = ["objective.advantage=gae", "critic.learning_rate=1e-4", "train.eps=1e-7"]
    critic = dict(dict(make_plan(load_recipe("keywords", gae), tmp_path))["critic"])
    assert critic["learning"] == "AdamW with ε 1e-07, learning rate 0.0001, the policy's schedule"
    own = load_recipe("sft", ["train.final_share=0.5", "task.train=rows.jsonl"])
    shown = dict(dict(make_plan(own, tmp_path))["batches"])["gradient steps"]
    assert shown.endswith("(AdamW, learning rate 0.0001, linear to 0.5 of it)")


def test_what_changes_the_draws_is_planned(tmp_path):
    assert "sampling" not in dict(dict(make_plan(load_recipe("keywords"), tmp_path))["batches"])
    sets = ["rollout.top_k=40", "rollout.min_p=0.05", "rollout.repetition_penalty=1.1"]
    recipe = load_recipe("keywords", [*sets, "rollout.truncated=true"])
    shown = dict(dict(make_plan(recipe, tmp_path))["batches"])["sampling"]
    assert shown.startswith("top_k = 40, min_p = 0.05, repetition_penalty = 1.1, in the draws only")


def test_memory_and_disk_are_planned_part_by_part(tmp_path):
    sets = ["engine.kv_mb=1", "train.steps=42", "checkpoint.every=21"]
    recipe = with_precision(load_recipe("keywords", sets), "bf16")
    lines = dict(dict(make_plan(recipe, tmp_path, SIZE))["resources"])
    assert lines["memory"] == (
        "26 MB: fp32 masters 4 MB, gradients 4 MB, Adam's moments 8 MB, bf16 weights 2 MB, "
        "frozen copies (2) 4 MB, the engine's weights 4 MB"
    )
    assert lines["cache"] == "1 MB: 4,369 tokens (engine.kv_mb = 1) 1 MB"
    without = dict(dict(make_plan(recipe, tmp_path, SIZE._replace(copied=0)))["resources"])
    assert without["memory"].endswith("the engine's weights 2 MB")
    assert "2 checkpoints of 14 MB" in lines["disk"]


def test_what_does_not_learn_takes_no_memory(tmp_path):
    """10 of 20 layers of 40,000 weights learn: 400,000 have gradients and moments."""
    sets = ["train.learn=layers", "train.learn.last=10", "engine.kv_mb=1"]
    recipe = with_precision(load_recipe("keywords", sets), "fp32")
    size = SIZE._replace(layers=20, learned=400_000)
    sections = dict(make_plan(recipe, tmp_path, size))
    assert dict(sections["resources"])["memory"] == (
        "18 MB: fp32 masters 2 MB, gradients 2 MB, Adam's moments 3 MB, fp32 weights 2 MB, "
        "frozen copies (2) 3 MB, the engine's weights 6 MB"
    )
    assert dict(sections["batches"])["learning"] == "last 10 layers"


def test_plan_says_who_sits_where() -> None:
    recipe = load_recipe("sort", [{"loop.lag": 2, "runtime": "ray", **STALE}])
    from pathlib import Path

    sections = dict(make_plan(recipe, Path("runs/x")))
    lines = dict(sections["strategy"])
    assert lines["lag"].startswith("2 × 10 versions")
    assert lines["generators"] == "1 × (1 CPUs, 0 GPUs)"
    assert "strategy" not in dict(make_plan(load_recipe("sort"), Path("runs/x")))


def test_the_plan_says_when_a_run_ends_early():
    patient = ["validation.patience=3", "validation.every=5", "validation.min_delta=0.1"]
    lines = dict(
        line for _, found in make_plan(load_recipe("sort", patient), Path()) for line in found
    )
    assert lines["ends early"] == (
        "when validation/reward has not improved by more than 0.1 in 3 validations, "
        "one every 5 steps"
    )


def test_a_run_without_validation_says_so_and_costs_less(tmp_path):
    rows = ["task.name=files", "task.train=rows.jsonl", "task.reward=reward.py:f"]
    validated = load_recipe("keywords", rows)
    recipe = load_recipe("keywords", [*rows, "task.validation_rows=0"])
    said = "nothing, so `burnish export` takes the last checkpoint"
    assert dict(make_plan(recipe, tmp_path))["validation"] == [("held out", said)]
    assert "validation" not in dict(make_plan(validated, tmp_path))
    rates = Rates("cpu", "fp32", 10.0, 100.0)
    assert estimate_seconds(recipe, SIZE, rates) < estimate_seconds(validated, SIZE, rates)


def test_episodes_are_planned():
    given = ["task.turns=12", "task.turn_tokens=4", "rollout.max_tokens=160"]
    (_, lines), *_ = make_plan(load_recipe("guess", given), Path("run"))
    told = dict(lines)
    assert told["episode"] == (
        "at most 12 turns, each of at most 4 tokens; 160 tokens in all, with the environment's "
        "messages; each of its messages is cut at 1,024 tokens"
    )
    assert told["environments"].startswith("128 processes at a time; a call may take 20 s, 2 s of")
    assert "have no loss" in told["learned"]
    assert told["reward"].endswith(
        "without any, a truncated episode earns 0, and another one is an error"
    )
    graded = load_recipe(
        "guess", [{"task": {"reward": "mine.py:score", "observation_tokens": None}}]
    )
    (_, lines), *_ = make_plan(graded, Path("run"))
    assert dict(lines)["reward"].endswith("without any, mine.py:score grades the last turn")
    assert "cut at" not in dict(lines)["episode"]
