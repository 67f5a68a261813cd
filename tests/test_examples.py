"""Scripts in examples/: one step by hand, and scripts that write rows for recipes."""

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import burnish
from burnish.recipe.load import load_recipe
from burnish.rl.ratios import token_ratio
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import pack
from burnish.tasks.pairs import check_preference
from burnish.tasks.rows import read_rows
from tests.learner.conftest import make_groups, make_learn_batch, make_learner, make_policy

EXAMPLES = Path(burnish.__file__).parents[1] / "examples"


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


SCRATCH = {"name": "scratch", "layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}


@pytest.mark.parametrize("name", ["sort", "keywords"])
def test_a_step_by_hand_is_the_first_step_of_a_run(name, tmp_path, smollm2):
    changes = [{"train": {"steps": 1, "epochs": 1}}]
    if name == "keywords":
        sizes = {"model": SCRATCH | {"tokenizer": smollm2}, "task.validation_prompts": 1}
        sizes |= {"rollout": {"batch": 8, "max_tokens": 4}, "train.batch": 8, "device": "cpu"}
        changes.append(sizes)
    recipe = load_recipe(name, changes)
    groups, (taken,) = script("pieces").step(recipe)
    run = burnish.train(recipe, out=tmp_path / "run", show=False)
    assert taken.items() <= run.metrics[-1].items()
    rewards = [reward for group in groups for reward in group.rewards]
    assert sum(rewards) / len(rewards) == pytest.approx(run.metrics[-1]["rollout/reward"])


LENGTHS = (3, 1, 4, 2, 4, 3)
ADVANTAGES = (-1.0, -0.5, 1.5, -2.0, 0.0, -0.25)
MOVED = [[-0.2, -0.3, 0.1], [0.1], [-0.3, 0.3, -0.3, -0.3], [-0.3, 0.25], [0.2] * 4, [-0.04] * 3]
"""log π − log π_behavior, by row. Only row 0 has a negative advantage and a mean below −0.05; PPO's
clip acts on the second token of row 2 and on the first of row 3."""


def log_probabilities(count=6, width=4):
    """Log-probabilities of two policies in rows of ``LENGTHS``; NaN after their end."""
    random = np.random.default_rng(0)
    behavior = np.log(random.uniform(0.2, 0.9, (count, width)))
    mask = np.arange(width) < np.array(LENGTHS)[:, None]
    behavior[~mask] = math.nan
    moved = np.full((count, width), math.nan)
    moved[mask] = [x for row in MOVED for x in row]
    return behavior, behavior + moved, mask


def by_rows(behavior, new, delta=0.05):
    """TRL's mask and PPO's clip, token by token in float64: losses, gradients, kept rows."""
    losses, slopes, kept = np.zeros_like(new), np.zeros_like(new), []
    for i, (length, a) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        moved = sum(behavior[i, t] - new[i, t] for t in range(length)) / length
        kept.append(a >= 0 or moved <= delta)
        for t in range(length if kept[-1] else 0):
            ratio = math.exp(new[i, t] - behavior[i, t])
            losses[i, t] = -min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
            bound = ratio > 1.2 if a > 0 else ratio < 0.8
            slopes[i, t] = 0 if bound else -ratio * a
    return losses, slopes, kept


def test_an_off_policy_mask_removes_responses_that_the_policy_has_left():
    """As in TRL: padded, and packed in any order."""
    masked_clip = script("off_policy_mask").masked_clip
    behavior, new, mask = log_probabilities()
    losses, slopes, kept = by_rows(behavior, new)
    assert kept == [False, True, True, True, True, True]
    advantages = np.broadcast_to(np.array(ADVANTAGES)[:, None], mask.shape)
    order = np.random.default_rng(1).permutation(mask.sum())
    rows = np.broadcast_to(np.arange(6)[:, None], mask.shape)
    for pick in (lambda x: x, lambda x: x[mask][order]):
        given = [torch.tensor(pick(x)) for x in (behavior, new, advantages, mask, rows)]
        old, logprobs, own, acted, ids = given
        ids = None if logprobs.dim() == 2 else ids
        logprobs.requires_grad_()
        ratio = token_ratio(logprobs, old)
        loss = masked_clip(logprobs, ratio, own, mask=acted, sequence_ids=ids, behavior=old)
        weighted_sum(loss, acted.double()).backward()
        torch.testing.assert_close(loss[acted], torch.tensor(pick(losses))[acted])
        torch.testing.assert_close(logprobs.grad[acted], torch.tensor(pick(slopes))[acted])


@pytest.mark.parametrize("split", [{"micro_tokens": 17}, {"micro_sequences": 1}], ids=str)
def test_an_off_policy_mask_does_not_depend_on_the_micro_batches(split):
    masked_clip, calls = script("off_policy_mask").masked_clip, []

    def recorded(logprobs, ratio, advantages, *, mask, sequence_ids, behavior):
        given = {"mask": mask, "sequence_ids": sequence_ids, "behavior": behavior}
        loss = masked_clip(logprobs, ratio, advantages, **given)
        calls.append((loss == 0)[mask & (advantages < 0)])
        return loss

    batch, gradients = pack(make_groups()), []
    for settings in ({}, split):
        learner = make_learner(make_policy(), {"loss": recorded}, **settings)
        learn = make_learn_batch(learner, batch)
        # The sampler's policy: the learner's, moved by up to 0.2 per response.
        moved = 0.2 * torch.linspace(-1, 1, len(batch.rewards), dtype=torch.float64)
        own = dataclasses.replace(
            batch, behavior_logprobs=learn.proximal_logprobs + moved[batch.sample_ids]
        )
        calls.clear()
        learner._accumulate(dataclasses.replace(learn, batch=own))
        gradients.append([p.grad for p in learner.policy.parameters()])
        masked = torch.cat(calls)
        assert 0 < masked.sum() < len(masked)
    assert len(calls) > 1
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12 * whole.abs().max().item())


def test_a_run_learns_with_an_off_policy_mask(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(script("off_policy_mask"), monkeypatch, "train.steps=2", "validation.every=2")
    done = burnish.Run("runs/sort-1")
    assert done.metrics[-1]["step"] == 2
    first, last = (done.summary[f"reward_{name}"] for name in ("first", "last"))
    assert capsys.readouterr().out == f"reward {first:.2f} → {last:.2f}\n"


def test_the_first_wrong_line_is_found(tmp_path, monkeypatch, capsys):
    """5 + 3 - 2 is 8, then 6. The gains of the lines are 0.1 − 0.6 and 0 − 0.1."""
    text = "5 + 3 = 9\n9 - 2 = 7"
    row = {"asked": "5 + 3 - 2 =\n", "response": text, "tokens": [*text, "<end>"], "reward": 0.0}
    row["steps"] = [[0, 0.6], [10, 0.1]]
    right = row | {"response": "5 + 3 = 8\n8 - 2 = 6", "reward": 1.0}
    tied = row | {"steps": [[0, 0.0], [10, 0.0]]}
    lines = [json.dumps(one) + "\n" for one in (row, right, tied)]
    (tmp_path / "rollouts.jsonl").write_text("".join(lines))
    monkeypatch.syspath_prepend(EXAMPLES)
    run(script("first_wrong"), monkeypatch, tmp_path)
    told = capsys.readouterr().out
    assert "-0.50  5 + 3 = 9   <- first wrong line\n-0.10  9 - 2 = 7\n" in told
    assert "2 wrong responses of several lines, 1 with one lowest advantage" in told
    assert "first wrong line: 1 of 1" in told
    assert "a guess among the lines: 0.5 of 1" in told


def test_digits_are_written_with_pairs(tmp_path, monkeypatch):
    """200 questions, 40 of them held out; six pairs of each, a sixth of them held out."""
    run(script("write_digits"), monkeypatch, tmp_path / "digits")
    rows, pairs = tmp_path / "digits", tmp_path / "digits" / "pairs"
    assert len(read_rows(rows / "train.jsonl")) == 200
    assert len(read_rows(rows / "validation.jsonl")) == 40
    held_out = read_rows(pairs / "validation.jsonl", check_preference)
    learned = read_rows(pairs / "train.jsonl", check_preference)
    assert (len(learned), len(held_out)) == (1000, 200)
    for row in held_out:
        a, sign, b = row["prompt"].split()[:3]
        assert int(row["chosen"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_sums_are_checked_never_once_or_twice(tmp_path, monkeypatch):
    run(script("write_checked"), monkeypatch, tmp_path / "sums")
    names = ("validation", "train", "questions")
    rows = [row for name in names for row in read_rows(tmp_path / "sums" / f"{name}.jsonl")]
    assert len({row["prompt"] for row in rows}) == 9**4
    for checks, row in zip([0, 1, 2], rows, strict=False):
        a, b, c, d = map(int, row["prompt"].rstrip("=").split("+"))
        worked = f"{a + b:02d} {a + b + c:02d} {a + b + c + d:02d}"
        assert row["answer"] == f"{','.join([worked] * (checks + 1))}={a + b + c + d:02d}"
        assert row["expected_answer"] == str(a + b + c + d)


@pytest.mark.slow
def test_a_critic_learns_beside_a_policy(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["train.steps=2", "critic.warmup_rollouts=1", "rollout.batch=8", "train.batch=8"]
    run(script("critic"), monkeypatch, *small, "rollout.max_tokens=4", "device=cpu")
    assert capsys.readouterr().out.startswith("steps 1 to 2: reward ")
