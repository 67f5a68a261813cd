"""One rollout: an engine samples completions of the task's prompts, and the task grades them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from burnish.console.progress import Report, unheard
from burnish.engine.protocol import Request, Sampler
from burnish.errors import DataError, EngineError, GraderError
from burnish.graders.tally import name_failures
from burnish.randomness import Stream
from burnish.recipe.length import Overlong
from burnish.recipe.recipe import RolloutConfig
from burnish.rollout.episode_metrics import episode_columns, lone_turns
from burnish.rollout.greedy_baseline import set_apart
from burnish.rollout.length import Shape, is_counted, is_cut, mask_cut, unshaped
from burnish.rollout.step_values import Steps, describe_steps, valued
from burnish.tasks.task import Task
from burnish.types import (
    ENDINGS,
    Completion,
    Finish,
    Grade,
    Group,
    Limit,
    Prompt,
    SamplingParams,
    Status,
)

ABORTED = Grade(
    math.nan,
    status=Status.ERROR,
    message="the engine aborted the sample: the model's log-probabilities were not finite; lower "
    "train.learning_rate, or set engine.precision to fp32",
)
"""The grade of a sample that the engine aborted."""
PATIENCE = 600.0
"""Timeout in seconds: an engine that returns no further token or completion has failed. The time
limit of an episode's environment or agent is added."""
NumberedPrompts = Sequence[tuple[int, Prompt]]
"""Prompts to sample: pairs of the group's index in the run and the prompt."""
Answered = Sequence[tuple[Request, tuple[Completion, ...]]]
"""Completed requests: pairs of the request and its completions, sorted by sample index."""
Note = Callable[..., None]
"""Callback that appends one event, given by its name and keywords, to the run's ledger."""


def ignore(event: str, **details: Any) -> None:
    """Ignore the event."""


def sample(
    engine: Sampler,
    numbered: NumberedPrompts,
    samples: int,
    params: SamplingParams,
    stream: Stream = Stream.TRAIN,
    report: Report = unheard,
    steps: Steps = None,
) -> list[tuple[Completion, ...]]:
    """Sample ``samples`` completions of each prompt; return them in the order of the prompts.

    ``stream`` determines the random draws (training or evaluation). ``steps`` adds a greedy
    response to each prompt as its last completion, or continuations from the steps of each response
    as its branches; None if the recipe needs neither.
    """
    requests = requests_of(numbered, samples, params, stream)
    responses = complete(engine, requests, report=report)
    if steps is None:
        return responses
    return steps.extend(requests, responses, partial(complete, engine))


def requests_of(
    numbered: NumberedPrompts, samples: int, params: SamplingParams, stream: Stream
) -> list[Request]:
    """Return one request of ``samples`` samples for each prompt."""
    # A held-out prompt may be sampled while the training group of the same number is in flight.
    kind = "group" if stream is Stream.TRAIN else "held-out"
    return [
        Request(
            f"{kind}-{group}",
            prompt.token_ids,
            samples,
            params,
            group,
            stream,
            episode=prompt.episode,
        )
        for group, prompt in numbered
    ]


def complete(
    engine: Sampler,
    requests: Sequence[Request],
    *,
    report: Report = unheard,
    further: Callable[[Answered], Sequence[Request]] | None = None,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Completion, ...]]:
    """Run the engine until all requests are completed; return the completions of each request,
    additional ones included, in the order of their submission.

    All requests are submitted before the first step, so that the same requests always give the same
    batches in the engine, and with them the same last bits of the logits. ``report`` receives the
    numbers of finished completions and of sampled tokens. ``further`` receives the requests that a
    step has completed, and returns additional requests to submit before the next step; None to
    submit none. Raises an EngineError if the engine loses samples, or makes no progress for
    ``patience`` seconds and the longest ``wall_seconds`` of the requests' episodes.
    """
    requests = list(requests)
    for request in requests:
        engine.submit(request)
    missing = {(request.request_id, i): None for request in requests for i in range(request.n)}
    done: dict[tuple[str, int], Completion] = {}
    total, before = len(missing), engine.sampled
    last, moved = (0, before), clock()
    while missing:
        allowed = patience + max((r.episode.wall_seconds for r in requests if r.episode), default=0)
        if not engine.unfinished or clock() - moved > allowed:
            late = f"was silent for {allowed:.0f} s" if engine.unfinished else "forgot samples"
            names = ", ".join(f"sample {i} of {name}" for name, i in list(missing)[:4])
            raise EngineError(f"the engine {late}; {len(missing)} of {total} are missing: {names}")
        touched = set()
        for completion in engine.step():
            name = completion.request_id, completion.sample_index
            done[name] = completion
            missing.pop(name, None)
            touched.add(completion.request_id)
        report(len(done), total, tokens=engine.sampled - before)
        if further is not None:
            own = [r for r in requests if r.request_id in touched]
            whole = [r for r in own if all((r.request_id, i) in done for i in range(r.n))]
            for request in further([(r, _answers(r, done)) for r in whole]) if whole else ():
                engine.submit(request)
                requests.append(request)
                missing |= {(request.request_id, i): None for i in range(request.n)}
                total += request.n
        if (len(done), engine.sampled) != last:
            last, moved = (len(done), engine.sampled), clock()
    return [_answers(request, done) for request in requests]


def _answers(
    request: Request, done: Mapping[tuple[str, int], Completion]
) -> tuple[Completion, ...]:
    return tuple(done[request.request_id, i] for i in range(request.n))


def sampling_params(rollout: RolloutConfig, stop: tuple[str, ...], seed: int) -> SamplingParams:
    """Build the sampling parameters of training from a recipe, without temperatures of turns. The
    sorting model uses only the temperature and the seed."""
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    settings = rollout.model_dump(include=names | {"max_tokens", "min_tokens"})
    if rollout.think is not None:
        settings |= {f"think_{name}": value for name, value in rollout.think}
    return SamplingParams(**settings, stop=stop, seed=seed)


def grade(
    task: Task,
    numbered: NumberedPrompts,
    responses: Sequence[tuple[Completion, ...]],
    shape: Shape = unshaped,
) -> list[Group]:
    """Grade the responses to each prompt; return one group per prompt. If a response can't be
    graded, its grade is an error (`Grade.is_error`).

    Aborted samples get the grade `ABORTED` and are not passed to the task. ``shape`` changes the
    rewards of each group, such as by a length penalty. A greedy response is then removed from its
    group and becomes the baseline (`set_apart`). If responses have branches, these are graded as
    well, and replaced by the values of the responses' steps (`valued`).
    """
    given = list(zip(numbered, responses, strict=True))
    left = iter(_grades(task, [(p, c) for (_, p), completions in given for c in completions]))
    groups = [
        set_apart(shape(Group(index, prompt, cs, tuple(next(left) for _ in cs))))
        for (index, prompt), cs in given
    ]
    return valued(groups, partial(_grades, task))


def _grades(task: Task, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
    whole = [(prompt, completion) for prompt, completion in pairs if not is_aborted(completion)]
    grades = task.grade_all(whole)
    if len(grades) != len(whole):
        raise DataError(f"the task gave {len(grades)} grades for {len(whole)} responses")
    left = iter(grades)
    return [ABORTED if is_aborted(completion) else next(left) for _, completion in pairs]


def is_aborted(completion: Completion) -> bool:
    """Return whether the engine aborted the sample, so that its tokens are not a response."""
    return completion.finish is Finish.ABORT


def check_errors(groups: Sequence[Group], *, limit: float, requested: int = 0) -> None:
    """Raise a GraderError if more than the share ``limit`` of the grades are errors: failures of
    the grader or of environments, or samples that the engine aborted. The same limit holds for the
    grades of continuations, which value the steps of responses.

    ``requested``: number of responses that were requested, if it is larger than the number in
    ``groups``; the share is relative to it. The error quotes some of the messages, each with the
    first response that has it, and the response's data row.
    """
    graded = [(group.prompt, *pair) for group in groups for pair in group.graded]

    def named(prompt: Prompt, completion: Completion, message: str | None) -> tuple[Any, ...]:
        name = f"response {completion.sample_index} to {prompt.prompt_id}"
        return name, completion.text, prompt.reference, message or "no message"

    def check(kind: str, errors: Sequence[tuple[Any, ...]], count: int, total: int) -> None:
        if len(errors) > limit * total:
            raise GraderError(
                f"{len(errors)} of {count} {kind} got no grade, more than a share of {limit:g}; "
                f"{name_failures(named(*failure) for failure in errors)}"
            )

    errors = [(prompt, c, grade.message) for prompt, c, grade in graded if grade.is_error]
    check("responses", errors, len(graded), max(requested, len(graded)))
    continued = [(prompt, c, said) for prompt, c, _ in graded for said in c.continuation_errors]
    count = sum(c.continuations for _, c, _ in graded)
    check("continuations of responses", continued, count, count)


def drop_errors(
    groups: Sequence[Group], overlong: Overlong = "keep"
) -> tuple[list[Group], dict[str, float]]:
    """Drop samples whose grade is an error, and treat responses that were truncated at the length
    limit as ``overlong`` says: keep them, drop them, or mask them (`mask_cut`). Return the
    remaining groups, and metrics that count the dropped samples and groups.

    A group that loses samples and has fewer than two left has no statistics and is dropped; its
    other sample counts as dropped, too. The remaining groups keep their indices.
    """
    kept = []
    for group in groups:
        good = [
            (completion, grade)
            for completion, grade in group.graded
            if not grade.is_error and is_counted(completion, overlong)
        ]
        if len(good) == len(group.grades):
            kept.append(group)
        elif len(good) >= 2:
            completions, grades = zip(*good, strict=True)
            kept.append(replace(group, completions=completions, grades=grades))
    kept = mask_cut(kept) if overlong == "mask" else kept
    samples = sum(len(g.grades) for g in groups) - sum(len(g.grades) for g in kept)
    found = {
        "rollout/dropped_samples": float(samples),
        "rollout/dropped_groups": float(len(groups) - len(kept)),
    }
    if overlong != "keep":
        cut = [is_cut(completion) for group in groups for completion in group.completions]
        found["rollout/overlong"] = float(np.mean(cut))
    return kept, found


def ungraded(groups: Sequence[Group]) -> list[Group]:
    """Return the responses without a grade, because grading failed or the environment did: the
    groups that have such responses, without their other responses. A sample that the engine
    aborted is not a response, unless it is an episode."""
    found = []
    for group in groups:
        errors = [pair for pair in group.graded if pair[1].is_error]
        failed = [pair for pair in errors if pair[0].turns or not is_aborted(pair[0])]
        if failed:
            completions, grades = zip(*failed, strict=True)
            found.append(replace(group, completions=completions, grades=grades))
    return found


def describe(groups: Sequence[Group], skipped_prompts: int = 0) -> dict[str, float]:
    """Compute metrics of a rollout's groups, before the learner uses them: means over responses,
    reward statistics and sampled tokens as ``rollout/…``, and costs of judges as ``judge/…``.

    ``skipped_prompts`` is the number of prompts that were too long and replaced by the next ones.
    """
    responses = [
        {
            "tokens": completion.token_ids[completion.sampled],
            "finish": completion.finish,
            "reward": grade.reward,
            "parts": grade.parts,
            "status": grade.status,
            "correct": grade.correct,
            "part": group.prompt.part,
            "turns": [turn._asdict() for turn in completion.turns],
            "inserted": int(np.count_nonzero(~completion.sampled)),
        }
        | ({"limit": completion.limit} if completion.turns else {})
        for group in groups
        for completion, grade in group.graded
    ]
    by_group = [[g.reward for g in group.grades if not g.is_error] for group in groups]
    scored = [own for own in by_group if own]
    figures = averages(responses) | lone_turns(groups) | describe_steps(groups)
    sampled = [completion.sampled for group in groups for completion in group.completions]
    figures["tokens_sampled"] = float(sum(map(np.count_nonzero, sampled)))
    figures["tokens_sampled"] += figures.get("continuation_tokens", 0.0)
    if skipped_prompts:
        figures["skipped_prompts"] = float(skipped_prompts)
    if scored:
        rewards = np.concatenate(scored)
        figures |= {
            "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
        }
    return {f"rollout/{name}": value for name, value in figures.items()} | costs(groups)


def costs(groups: Sequence[Group]) -> dict[str, float]:
    """Return the total calls, tokens and retries of judges as ``judge/…``. If no judge was called,
    return an empty dict."""
    given = [grade.cost for group in groups for grade in group.grades if grade.cost]
    names = given[0] if given else ()
    return {f"judge/{name}": sum(cost[name] for cost in given) for name in names}


def averages(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute means over responses, such as length, reward and the share of each status and finish
    reason, and the number of responses. A response is a mapping with the keys tokens, finish,
    reward, parts, status, correct and, in a mixture, part. Multi-turn episodes have the key turns,
    the limit that truncated them as "limit", and the number of inserted tokens as "inserted" or
    their indices as "forced".

    Responses whose grade is an error are left out of the means of rewards. A mean over no responses
    is left out.
    """
    scored = [r for r in responses if r["status"] != Status.ERROR]
    right = [r for r in scored if r["correct"]]
    columns: dict[str, list[float]] = {"length": [_length(r) for r in responses]}
    columns["length_correct"] = [_length(r) for r in right]
    columns |= {name: [r["finish"] == end for r in responses] for name, end in ENDINGS.items()}
    if any("limit" in r for r in responses):
        columns |= {f"truncated_{end}": [r.get("limit") == end for r in responses] for end in Limit}
    columns["reward"] = [r["reward"] for r in scored]
    for part in sorted({r["part"] for r in scored if r.get("part") is not None}):
        columns[f"reward/{part}"] = [r["reward"] for r in scored if r.get("part") == part]
    for name in sorted({name for r in responses for name in r["parts"]}):
        columns[f"part_{name}"] = [r["parts"][name] for r in responses if name in r["parts"]]
    episodes = episode_columns(responses)
    columns = {k: v for k, v in columns.items() if k.removeprefix("part_") not in episodes}
    columns |= episodes
    columns |= {f"grades_{s}": [r["status"] == s for r in responses] for s in Status}
    means = {name: float(np.mean(values)) for name, values in columns.items() if values}
    return means | {"responses": float(len(responses))}


def _length(response: Mapping[str, Any]) -> int:
    """Return the number of tokens that were sampled, without inserted ones."""
    return len(response["tokens"]) - len(response.get("forced", ()))
