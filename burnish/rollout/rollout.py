"""One rollout: prompts of the task, completions of an engine, grades: groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from burnish.config import Recipe
from burnish.draws import Stream
from burnish.engine.protocol import Engine, Request
from burnish.errors import DataError, EngineError
from burnish.progress import Report, unheard
from burnish.tasks.task import Task
from burnish.types import ENDINGS, Completion, Finish, Grade, Group, Prompt, SamplingParams, Status

ABORTED = Grade(
    math.nan,
    status=Status.ERROR,
    message="the engine aborted the sample: the model's log-probabilities were not finite; lower "
    "train.learning_rate, or set engine.precision to fp32",
)
"""The grade of a sample that the engine aborted."""


PATIENCE = 600.0
"""Seconds that an engine may take to its next token."""


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    first_group: int,
    samples: int,
    params: SamplingParams,
    stream: Stream = Stream.TRAIN,
    report: Report = unheard,
) -> list[tuple[Completion, ...]]:
    """``samples`` completions of each prompt; prompt k is the run's group first_group + k."""
    requests = [
        Request(f"group-{group}", prompt.token_ids, samples, params, group, stream, streamed=False)
        for group, prompt in enumerate(prompts, first_group)
    ]
    return complete(engine, requests, report=report)


def complete(
    engine: Engine,
    requests: Sequence[Request],
    *,
    report: Report = unheard,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Completion, ...]]:
    """The completions of each request.

    All requests are submitted before the first step, so that the engine's batches, and with them
    the last bits of its logits, are the same whenever the same requests come. ``report`` is told
    the completions that are done and the tokens that were sampled.
    """
    for request in requests:
        engine.submit(request)
    missing = {(request.request_id, i): None for request in requests for i in range(request.n)}
    done: dict[tuple[str, int], Completion] = {}
    total, before = len(missing), engine.sampled
    last, moved = (0, before), clock()
    while missing:
        if not engine.unfinished or clock() - moved > patience:
            late = f"was silent for {patience:.0f} s" if engine.unfinished else "forgot samples"
            names = ", ".join(f"sample {i} of {name}" for name, i in list(missing)[:4])
            raise EngineError(f"the engine {late}; {len(missing)} of {total} are missing: {names}")
        for event in engine.step():
            if isinstance(event, Completion):
                done[event.request_id, event.sample_index] = event
                missing.pop((event.request_id, event.sample_index), None)
        report(len(done), total, tokens=engine.sampled - before)
        if (len(done), engine.sampled) != last:
            last, moved = (len(done), engine.sampled), clock()
    return [tuple(done[r.request_id, i] for i in range(r.n)) for r in requests]


def sampling(recipe: Recipe) -> SamplingParams:
    """How training samples; the sorting model reads the temperature and the seed alone."""
    rollout = recipe.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        stop=recipe.stop,
        seed=recipe.seed,
    )


def grade(
    task: Task, prompts: Sequence[Prompt], responses: Sequence[tuple[Completion, ...]], first: int
) -> list[Group]:
    """The groups with indices first, first + 1, …; the task does not see aborted samples."""
    groups = list(zip(prompts, responses, strict=True))
    whole = [(p, c) for p, completions in groups for c in completions if not is_aborted(c)]
    grades = task.grade_all(whole)
    if len(grades) != len(whole):
        raise DataError(f"the task gave {len(grades)} grades for {len(whole)} responses")
    given = iter(grades)
    return [
        Group(
            first + k,
            prompt,
            completions,
            tuple(ABORTED if is_aborted(c) else next(given) for c in completions),
        )
        for k, (prompt, completions) in enumerate(groups)
    ]


def is_aborted(completion: Completion) -> bool:
    """Whether the engine gave the sample up: what it has of it is no response."""
    return completion.finish is Finish.ABORT


def describe(groups: Sequence[Group], skipped_prompts: int = 0) -> dict[str, float]:
    """What a rollout's groups look like, before anything is learned from them.

    Rewards are those of grades that are not errors; without any there are no reward metrics.
    ``skipped_prompts`` were too long, so that others were asked instead.
    """
    grades = [grade for group in groups for grade in group.grades]
    by_group = [
        np.array([g.reward for g in group.grades if g.status is not Status.ERROR])
        for group in groups
    ]
    rewards = np.concatenate(by_group)
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    ends = [c.finish for group in groups for c in group.completions]
    metrics = {
        "rollout/length": float(np.mean(lengths)),
        **{f"rollout/{name}": ends.count(end) / len(ends) for name, end in ENDINGS.items()},
        "rollout/responses": float(len(grades)),
    }
    if skipped_prompts:
        metrics["rollout/skipped_prompts"] = float(skipped_prompts)
    if rewards.size:
        dead = [np.ptp(scored) == 0 for scored in by_group if scored.size]
        metrics |= {
            "rollout/reward": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std()),
            "rollout/reward_min": float(rewards.min()),
            "rollout/reward_max": float(rewards.max()),
            "rollout/dead_groups": float(np.mean(dead)),
        }
    for part in sorted({name for grade in grades for name in grade.parts}):
        values = [grade.parts[part] for grade in grades if part in grade.parts]
        metrics[f"rollout/part_{part}"] = float(np.mean(values))
    for part in sorted({g.prompt.part for g in groups if g.prompt.part is not None}):
        own = [r for g, r in zip(groups, by_group, strict=True) if g.prompt.part == part]
        if any(scored.size for scored in own):
            metrics[f"rollout/reward/{part}"] = float(np.concatenate(own).mean())
    for status in Status:
        count = sum(grade.status == status for grade in grades)
        metrics[f"rollout/grades_{status}"] = count / len(grades)
    return metrics
