"""The synchronous loop: Algorithm 1 of GRPO (https://arxiv.org/abs/2402.03300), step by step.

    for step = 1 … steps:
        take prompts; sample a group of responses to each          generate
        grade the responses; replace dead groups                   grade
        every kl.refresh steps:  π_ref ← π
        log π_ref and, if needed, log π_prox of the tokens         score
        advantages relative to the group                           learn
        for each of the gradient steps:  π ← step on the loss      learn
            with kl.ema:  π_ref ← average of π_ref and π
        load the new weights into the engine                       publish

The loop does not know the model: an ``Engine`` samples, and a ``Learner`` scores and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.console.progress import begin
from burnish.console.text import counted
from burnish.engine.protocol import Engine
from burnish.learner.protocol import Learner, Step
from burnish.randomness import Stream
from burnish.rl.sequences import sequence_lengths, sequence_sum
from burnish.rollout.dead_groups import fill, sample_actively
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import describe, grade, sample, ungraded
from burnish.rollout.settings import RolloutSettings
from burnish.rollout.step_values import Steps
from burnish.runs.metrics import Timers, combine
from burnish.tasks.stream import PromptStream
from burnish.tasks.task import Task
from burnish.types import FloatArray, Group, PackedBatch


class StepSettings(NamedTuple):
    """How a step divides its rollout into gradient steps."""

    batch: int
    """Responses per gradient step."""
    batches: int
    """Train batches per rollout."""
    epochs: int
    """Number of gradient steps on each train batch."""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps per rollout."""
        return self.batches * self.epochs


def train_sync(
    settings: RolloutSettings,
    training: StepSettings,
    total: int,
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
    """Run the synchronous loop after ``start`` finished steps until ``total`` steps are done, and
    yield each step.

    ``steps`` samples the additional responses that some advantages need (greedy responses, or
    continuations of responses); None if the recipe's advantage needs none. The learner runs in the
    context that ``rest`` returns; the engine does not sample then, and may release its memory.
    """
    params, size = settings.params, settings.group_size

    def ask(count: int) -> list[Group]:
        """Sample and grade responses to the next ``count`` prompts; return their groups. If dead
        groups are replaced immediately, the result also contains their replacements."""
        numbered, some = prompts.take(count), counted(count * size, "response")
        with timers("generate"):
            doing = f"sampling {some} to {counted(count, 'prompt')}"
            report = begin("generate", doing, total=count * size, unit="responses")
            if settings.selection.dead_groups == "active":
                return sample_actively(settings, engine, task, numbered, prompts.take, report)
            responses = sample(engine, numbered, size, params, Stream.TRAIN, report, steps)
        with timers("grade"):
            begin("grade", f"grading {some}")
            return grade(task, numbered, responses, settings.penalize)

    engine.load(learner.weights())
    for number in range(start, total):
        skipped = prompts.skipped
        filled = fill(settings, ask(settings.prompts), ask)
        with rest():
            step = train_step(training, learner, number + 1, filled.groups, timers)
        prompts.close(group.index for group in filled.sampled)
        with timers("publish"):
            begin("publish", "loading the new weights into the engine")
            engine.load(learner.weights())
        rollout = describe(filled.sampled, prompts.skipped - skipped) | filled.figures
        rollout |= prompts.note(filled.sampled)
        failed = ungraded(filled.sampled)
        yield step._replace(metrics=rollout | step.metrics, failed=failed)


def train_step(
    training: StepSettings, learner: Learner, number: int, groups: list[Group], timers: Timers
) -> Step:
    """Run step ``number``, counted from 1: score a rollout, estimate advantages and take the
    gradient steps. Return the step with its metrics.

    ``train/skipped`` counts planned gradient steps that were not taken. If ``groups`` is empty,
    because all groups were dropped, no gradient step is taken. The durations of scoring and
    learning are added to ``timers``.
    """
    learner.begin(number - 1)
    program, planned = learner.program, training.gradient_steps
    if not groups:
        return Step(number, {"train/skipped": float(planned), "train/version": learner.version})
    some = counted(sum(len(group.grades) for group in groups), "response")
    with timers("score"):
        begin("score", f"scoring {some}", unit="packs")
        batch = pack(groups, program.graded).to(learner.device)
        parts = train_batches(batch, training.batch, count=training.batches)
        scores = learner.score(batch, parts)
    with timers("learn"):
        begin("learn", f"learning from {some}", unit="packs")
        lag = learner.version - min(group.oldest_version for group in groups)
        advantages = program.advantages(batch, scores)
        batches = program.batches(batch, advantages, scores, parts) * training.epochs
        taken = [learner.step(part) for part in batches]
    drift, logprobs = learner.finish()
    metrics = drift | combine(taken)
    metrics["train/skipped"] += planned - len(taken)
    tokens = count_tokens(groups) * training.epochs
    metrics |= {"train/version": learner.version, "train/lag": lag, "train/tokens": tokens}
    own = None if logprobs is None else _by_response(batch, logprobs)
    return Step(number, metrics, groups, _per_response(batch, advantages), own)


def count_tokens(groups: list[Group]) -> int:
    """Return the number of response tokens that the policy sampled and learns from."""
    return sum(int(c.sampled.sum()) * c.in_loss for group in groups for c in group.completions)


def _per_response(batch: PackedBatch, advantages: Tensor) -> list[float]:
    """Return, for each response, the mean of the advantages [N] over its action tokens; 0 for a
    response without action tokens."""
    mask, ids = batch.is_action, batch.sample_ids
    totals = sequence_sum(advantages, mask, ids)
    means: list[float] = (totals / sequence_lengths(mask, ids).clamp(min=1)).tolist()
    return means


def _by_response(batch: PackedBatch, per_token: Tensor) -> list[FloatArray]:
    """Split a tensor with one value per token of a batch [N] into one array per sample [C], with a
    value for each token of its responses. Values of prompt tokens are left out."""
    is_response = ~batch.in_prompt
    ids, order = batch.sample_ids[is_response].sort(stable=True)
    counts = torch.bincount(ids, minlength=len(batch.rewards)).tolist()
    parts = torch.split(per_token[is_response][order].float().cpu(), counts)
    return [part.numpy() for part in parts]
