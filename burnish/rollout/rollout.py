"""One rollout: prompts of the task, completions of an engine, grades: groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from reprlib import Repr
from typing import Any

import numpy as np

from burnish.draws import Stream
from burnish.engine.protocol import Request, Server
from burnish.errors import DataError, EngineError, GraderError
from burnish.progress import Report, unheard
from burnish.rollout.branches import Steps, describe_steps, valued
from burnish.rollout.greedy import set_apart
from burnish.rollout.length import Shape, is_counted, is_cut, mask_cut, unshaped
from burnish.schema.length import Overlong
from burnish.schema.recipe import Recipe
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
Asked = Sequence[tuple[int, Prompt]]
"""Prompts, each after the index of its group in the run."""
Answered = Sequence[tuple[Request, tuple[Completion, ...]]]
"""Requests, each with its completions in the order of their samples."""
QUOTED = 3
"""Messages that an error quotes."""
_SHORT = Repr()
_SHORT.maxstring = 80
Note = Callable[..., None]
"""Is told of an event by its name and keywords, for the ledger of a run."""


def ignore(event: str, **told: Any) -> None:
    """Notes nothing."""


def sample(
    engine: Server,
    asked: Asked,
    samples: int,
    params: SamplingParams,
    stream: Stream = Stream.TRAIN,
    report: Report = unheard,
    steps: Steps = None,
) -> list[tuple[Completion, ...]]:
    """``samples`` completions of each prompt; ``steps`` continues them."""
    requests = requests_of(asked, samples, params, stream)
    responses = complete(engine, requests, report=report)
    if steps is None:
        return responses
    return steps.extend(requests, responses, partial(complete, engine))


def requests_of(
    asked: Asked, samples: int, params: SamplingParams, stream: Stream
) -> list[Request]:
    # A held-out prompt may be sampled while the training group of the same number is in flight.
    kind = "group" if stream is Stream.TRAIN else "held-out"
    return [
        Request(f"{kind}-{group}", prompt.token_ids, samples, params, group, stream)
        for group, prompt in asked
    ]


def complete(
    engine: Server,
    requests: Sequence[Request],
    *,
    report: Report = unheard,
    further: Callable[[Answered], Sequence[Request]] | None = None,
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Completion, ...]]:
    """The completions of each request.

    All requests are submitted before the first step, so that the engine's batches, and with them
    the last bits of its logits, are the same whenever the same requests come. ``report`` is told
    the completions that are done and the tokens that were sampled. ``further`` is given the
    requests that a step has completed, and returns requests to submit before the next step; None
    if there are no others.
    """
    requests = list(requests)
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


def sampling(recipe: Recipe) -> SamplingParams:
    """How training samples; the sorting model reads the temperature and the seed alone."""
    names = {"temperature", "top_p", "top_k", "max_tokens", "min_tokens"}
    settings = recipe.rollout.model_dump(include=names)
    if (think := recipe.rollout.think) is not None:
        settings |= {f"think_{name}": value for name, value in think}
    return SamplingParams(**settings, stop=recipe.stop, seed=recipe.seed)


def grade(
    task: Task,
    asked: Asked,
    responses: Sequence[tuple[Completion, ...]],
    shape: Shape = unshaped,
) -> list[Group]:
    """The groups of the prompts and their responses, whose steps are valued if they have branches.
    The task does not see aborted samples, ``shape`` changes a group's rewards, and a response that
    is greedy is set apart."""
    given = list(zip(asked, responses, strict=True))
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
    """Whether the engine gave the sample up, so that its tokens are no response."""
    return completion.finish is Finish.ABORT


def check_errors(groups: Sequence[Group], *, limit: float, asked: int = 0) -> None:
    """Raises once more than a share of ``limit`` of the grades are errors: the grader's own, or
    the grades of samples that the engine aborted.

    ``asked``: responses that were asked for, if more than those that are here. The error quotes
    each message with the first response, and its row, that the message is about.
    """
    graded = [(group.prompt, *pair) for group in groups for pair in group.graded]
    errors = [given for given in graded if given[2].is_error]
    if len(errors) <= limit * max(asked, len(graded)):
        return
    first: dict[str, str] = {}
    for prompt, completion, grade in errors:
        said = grade.message or "no message"
        text, row = _SHORT.repr(completion.text), _SHORT.repr(prompt.reference)
        name = f"response {completion.sample_index} to {prompt.prompt_id}"
        first.setdefault(said, f"{name} ({text}, row {row}): {said}")
    raise GraderError(
        f"{len(errors)} of {len(graded)} responses got no grade, more than a share of {limit:g}; "
        "mend what the messages name, or raise rollout.max_errors. "
        f"{'; '.join(list(first.values())[:QUOTED])}{'; …' if len(first) > QUOTED else ''}"
    )


def drop_errors(
    groups: Sequence[Group], overlong: Overlong = "keep"
) -> tuple[list[Group], dict[str, float]]:
    """The groups without samples whose grade is an error (see `check_errors`), and how many samples
    and groups left. ``overlong`` says what becomes of responses that were cut at the limit.

    A group that has fewer than two samples left has no statistics and goes as a whole; its good
    samples count as dropped too. A group keeps its index.
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


def describe(groups: Sequence[Group], skipped_prompts: int = 0) -> dict[str, float]:
    """A rollout's groups in figures, before anything is learned from them.

    ``skipped_prompts`` were too long, so that others were asked instead.
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
        }
        for group in groups
        for completion, grade in group.graded
    ]
    by_group = [[g.reward for g in group.grades if not g.is_error] for group in groups]
    scored = [own for own in by_group if own]
    figures = averages(responses) | describe_steps(groups)
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
    """Calls, tokens and retries of judges, added up as ``judge/…``; empty if none was asked."""
    given = [grade.cost for group in groups for grade in group.grades if grade.cost]
    names = given[0] if given else ()
    return {f"judge/{name}": sum(cost[name] for cost in given) for name in names}


def averages(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over responses, each with its tokens, finish, reward, parts, status, correctness and,
    in a mixture, part.

    A response whose grade is an error has no reward; without any reward there is no such mean.
    """
    scored = [r for r in responses if r["status"] != Status.ERROR]
    right = [r for r in scored if r["correct"]]
    columns: dict[str, list[float]] = {"length": [_length(r) for r in responses]}
    columns["length_correct"] = [_length(r) for r in right]
    columns |= {name: [r["finish"] == end for r in responses] for name, end in ENDINGS.items()}
    columns["reward"] = [r["reward"] for r in scored]
    for part in sorted({r["part"] for r in scored if r.get("part") is not None}):
        columns[f"reward/{part}"] = [r["reward"] for r in scored if r.get("part") == part]
    for name in sorted({name for r in responses for name in r["parts"]}):
        columns[f"part_{name}"] = [r["parts"][name] for r in responses if name in r["parts"]]
    columns |= {f"grades_{s}": [r["status"] == s for r in responses] for s in Status}
    means = {name: float(np.mean(values)) for name, values in columns.items() if values}
    return means | {"responses": float(len(responses))}


def _length(response: Mapping[str, Any]) -> int:
    """Tokens that were sampled."""
    return len(response["tokens"]) - len(response.get("forced", ()))
