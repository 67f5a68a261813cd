"""The synchronous loop: Algorithm 1 of GRPO (https://arxiv.org/abs/2402.03300), step by step.

    for step = 1 … steps:
        every kl.refresh steps:  π_ref ← π
        choose prompts; sample a group of responses to each        generate
        score the responses                                        grade
        log π_ref, and log π_prox if need be, of the tokens        score
        advantages relative to the group                           advantages
        for each of the gradient steps:  π ← step on the loss      learn
        hand the new weights to the engine                         publish

The sorting model and a language model run through it alike: an ``Engine`` samples, a ``Learner``
scores and steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.config import Recipe
from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.learner.learner import Learner
from burnish.progress import Report, Show, begin, silent
from burnish.rl.sequences import sequence_lengths, sequence_sum
from burnish.rollout import filters
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import describe, grade, sample, sampling
from burnish.runs.metrics import Metrics, combine
from burnish.runs.timers import Timers
from burnish.tasks.task import Task
from burnish.types import FloatArray, Group, PackedBatch
from burnish.wording import counted


class Step(NamedTuple):
    """What one round of the loop leaves to be written down."""

    number: int
    """How many steps are done, this one included."""
    groups: list[Group]
    advantages: list[float]
    """One per response, in the groups' order: the mean over its tokens."""
    learner_logprobs: list[FloatArray] | None
    """[C] per response: of the learner before its first step; None where it did not score all."""
    metrics: Metrics


def train(
    recipe: Recipe,
    *,
    task: Task,
    engine: Engine,
    learner: Learner,
    timers: Timers,
    start: int = 0,
    show: Show = silent,
) -> Iterator[Step]:
    """Runs the loop from step ``start`` on, yielding after each step."""
    params = sampling(recipe)
    prompts_per_step = recipe.prompts_per_rollout
    responses_per_step = recipe.rollout.batch
    some = counted(responses_per_step, "response")
    engine.load(learner.weights())
    for number in range(start, recipe.train.steps):
        learner.begin(number)
        first = number * prompts_per_step
        skipped_before = task.too_long.skipped
        prompts = [task.prompt(first + k) for k in range(prompts_per_step)]
        skipped = task.too_long.skipped - skipped_before
        with timers("generate"):
            doing = f"sampling {some} to {prompts_per_step} prompts"
            report = begin(show, "generate", doing, total=responses_per_step, unit="responses")
            responses = sample(
                engine,
                prompts,
                first_group=first,
                samples=recipe.rollout.group_size,
                params=params,
                stream=Stream.TRAIN,
                report=report,
            )
        with timers("grade"):
            begin(show, "grade", f"grading {some}")
            sampled = grade(task, prompts, responses, first)
            filters.check_errors(sampled, limit=recipe.rollout.max_errors)
            groups, dropped = filters.drop_errors(sampled)
        step = learn(recipe, learner, number + 1, groups, timers, show)
        with timers("publish"):
            begin(show, "publish", "handing the new weights to the sampler")
            engine.load(learner.weights())
        yield step._replace(metrics=describe(sampled, skipped) | dropped | step.metrics)


def learn(
    recipe: Recipe,
    learner: Learner,
    number: int,
    groups: list[Group],
    timers: Timers,
    show: Show = silent,
) -> Step:
    """Takes a rollout's gradient steps; ``train/skipped`` counts planned steps that were not taken.

    Without groups (each of them lost its samples to errors) no gradient step is taken.
    """
    program, planned = learner.program, recipe.gradient_steps_per_rollout
    if not groups:
        skipped = {"train/skipped": float(planned), "train/version": learner.version}
        return Step(number, [], [], None, skipped)
    some = counted(sum(len(group.grades) for group in groups), "response")
    with timers("score"):
        report = begin(show, "score", f"scoring {some}", unit="packs")
        batch = pack(groups).to(learner.device)
        parts = train_batches(batch, recipe.train.batch, count=recipe.train_batches)
        scores = learner.score(batch, parts, report)
    with timers("learn"):
        report = begin(show, "learn", f"learning from {some}", unit="packs")
        lag = learner.version - min(group.oldest_version for group in groups)
        advantages = program.advantages(batch, scores)
        batches = program.batches(batch, advantages, scores, parts) * recipe.train.epochs
        taken = [
            learner.step(part, _share(report, k, len(batches))) for k, part in enumerate(batches)
        ]
    finished = learner.finish()
    metrics = finished.metrics | combine(taken)
    metrics["train/skipped"] += planned - len(taken)
    metrics |= {"train/version": learner.version, "train/lag": lag}
    own = None if finished.logprobs is None else _by_response(batch, finished.logprobs)
    return Step(number, groups, _per_response(batch, advantages), own, metrics)


def _share(report: Report, index: int, count: int) -> Report:
    """Reports the packs of gradient step ``index`` as a part of those of ``count`` steps."""

    def further(done: int, total: int | None = None, *, tokens: int = 0) -> None:
        assert total is not None
        report(index * total + done, count * total)

    return further


def _per_response(batch: PackedBatch, advantages: Tensor) -> list[float]:
    mask, ids = batch.is_action, batch.sequence_ids
    totals = sequence_sum(advantages, mask, ids)
    means: list[float] = (totals / sequence_lengths(mask, ids).clamp(min=1)).tolist()
    return means


def _by_response(batch: PackedBatch, per_token: Tensor) -> list[FloatArray]:
    """The values of each response's slots."""
    lengths = batch.segment_offsets.diff()
    parts = torch.split(per_token.float().cpu(), lengths.tolist())
    return [
        part.numpy()
        for part, is_prompt in zip(parts, batch.segment_is_prompt.tolist(), strict=True)
        if not is_prompt
    ]
