"""The synchronous loop: Algorithm 1 of GRPO (https://arxiv.org/abs/2402.03300), step by step.

    for step = 1 … steps:
        every kl.refresh steps:  π_ref ← π
        take prompts; sample a group of responses to each          generate
        score the responses; ask others if groups are dead         grade
        log π_ref and, if needed, log π_prox of the tokens         score
        advantages relative to the group                           advantages
        for each of the gradient steps:  π ← step on the loss      learn
        hand the new weights to the engine                         publish

The sorting model and a language model run through it alike: an ``Engine`` samples, a ``Learner``
scores and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.learner.learner import Learner
from burnish.progress import begin
from burnish.rl.sequences import sequence_lengths, sequence_sum
from burnish.rollout.branches import Steps
from burnish.rollout.filling import fill, sample_actively
from burnish.rollout.length import shaping
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import describe, grade, sample, sampling
from burnish.runs.metrics import Metrics, Timers, combine
from burnish.schema.recipe import Recipe
from burnish.tasks.stream import PromptStream
from burnish.tasks.task import Task
from burnish.types import FloatArray, Group, PackedBatch
from burnish.wording import counted


class Step(NamedTuple):
    """One round of the loop, to be written down."""

    number: int
    """How many steps are done, this one included."""
    metrics: Metrics
    groups: Sequence[Group] = ()
    """The groups that were learned from."""
    advantages: Sequence[float] = ()
    """One per response, in the groups' order: the mean over its tokens."""
    learner_logprobs: list[FloatArray] | None = None
    """The learner's log-probabilities before its first step, [C] per response; None if it did not
    score all responses."""


def train(
    recipe: Recipe,
    *,
    prompts: PromptStream,
    task: Task,
    engine: Engine,
    learner: Learner,
    timers: Timers,
    start: int = 0,
    steps: Steps = None,
    rest: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Step]:
    """Runs the loop from step ``start`` on, yielding after each step.

    The learner learns in the context of ``rest``, in which nobody samples.
    """
    params, size = sampling(recipe), recipe.rollout.group_size

    def ask(count: int) -> list[Group]:
        """The groups of the next prompts, so many or, if dead ones are replaced at once, more."""
        asked, some = prompts.take(count), counted(count * size, "response")
        with timers("generate"):
            doing = f"sampling {some} to {counted(count, 'prompt')}"
            report = begin("generate", doing, total=count * size, unit="responses")
            if recipe.selection.dead_groups == "active":
                return sample_actively(recipe, engine, task, asked, prompts.take, report)
            responses = sample(engine, asked, size, params, Stream.TRAIN, report, steps)
        with timers("grade"):
            begin("grade", f"grading {some}")
            return grade(task, asked, responses, shaping(recipe))

    engine.load(learner.weights())
    for number in range(start, recipe.train.steps):
        learner.begin(number)
        skipped = prompts.skipped
        filled = fill(recipe, ask(recipe.prompts_per_rollout), ask)
        with rest():
            step = learn(recipe, learner, number + 1, filled.groups, timers)
        prompts.close(group.index for group in filled.sampled)
        with timers("publish"):
            begin("publish", "handing the new weights to the sampler")
            engine.load(learner.weights())
        rollout = describe(filled.sampled, prompts.skipped - skipped) | filled.figures
        rollout |= prompts.note(filled.sampled)
        yield step._replace(metrics=rollout | step.metrics)


def learn(
    recipe: Recipe, learner: Learner, number: int, groups: list[Group], timers: Timers
) -> Step:
    """Takes a rollout's gradient steps; ``train/skipped`` counts planned steps that were not taken.

    Without groups (each of them was dropped) no gradient step is taken.
    """
    program, planned = learner.program, recipe.gradient_steps_per_rollout
    if not groups:
        return Step(number, {"train/skipped": float(planned), "train/version": learner.version})
    some = counted(sum(len(group.grades) for group in groups), "response")
    with timers("score"):
        begin("score", f"scoring {some}", unit="packs")
        batch = pack(groups, program.graded).to(learner.device)
        parts = train_batches(batch, recipe.train.batch, count=recipe.train_batches)
        scores = learner.score(batch, parts)
    with timers("learn"):
        begin("learn", f"learning from {some}", unit="packs")
        lag = learner.version - min(group.oldest_version for group in groups)
        advantages = program.advantages(batch, scores)
        batches = program.batches(batch, advantages, scores, parts) * recipe.train.epochs
        taken = [learner.step(part) for part in batches]
    drift, logprobs = learner.finish()
    metrics = drift | combine(taken)
    metrics["train/skipped"] += planned - len(taken)
    tokens = count_tokens(groups) * recipe.train.epochs
    metrics |= {"train/version": learner.version, "train/lag": lag, "train/tokens": tokens}
    own = None if logprobs is None else _by_response(batch, logprobs)
    return Step(number, metrics, groups, _per_response(batch, advantages), own)


def count_tokens(groups: list[Group]) -> int:
    """Tokens of the responses that the policy sampled and learns from."""
    return sum(int(c.sampled.sum()) * c.in_loss for group in groups for c in group.completions)


def _per_response(batch: PackedBatch, advantages: Tensor) -> list[float]:
    mask, ids = batch.is_action, batch.sequence_ids
    totals = sequence_sum(advantages, mask, ids)
    means: list[float] = (totals / sequence_lengths(mask, ids).clamp(min=1)).tolist()
    return means


def _by_response(batch: PackedBatch, per_token: Tensor) -> list[FloatArray]:
    """The values of each response's slots."""
    parts = torch.split(per_token.float().cpu(), batch.segment_offsets.diff().tolist())
    is_prompt = batch.segment_is_prompt.tolist()
    return [part.numpy() for part, skip in zip(parts, is_prompt, strict=True) if not skip]
