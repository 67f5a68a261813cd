"""Converts graded groups to arrays and JSON and back, so that a checkpoint can store them without
pickle.

Prompts are not saved: a task's prompts are a function of their number, so a prompt is found by the
index of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.types import (
    Completion,
    Finish,
    Grade,
    Group,
    Limit,
    Prompt,
    SamplingParams,
    SequenceStart,
    Status,
    Turn,
)

if TYPE_CHECKING:
    from torch import Tensor

HELD = "groups."
"""Prefix of the names of these tensors in a checkpoint."""
PER_TOKEN = ("token_ids", "logprobs", "versions", "sampled", "values")
"""Fields of a completion that are saved as tensors."""
TUPLES = ("stop", "stop_ids", "turn_temperatures")
"""Sampling parameters that are tuples, and lists in JSON."""
NAMES = (
    *("request_id", "sample_index", "stop", "text", "in_loss", "continued"),
    *("continuations", "continuation_errors"),
)
"""Fields of a completion that are saved as JSON."""


def save_held(held: Sequence[Sequence[Group]]) -> tuple[dict[str, Tensor], list[Any]]:
    """Convert lists of groups (the replay buffer, and each rollout in flight) to the content of a
    checkpoint. Return tensors with the per-token data of all responses, concatenated, whose names
    begin with `HELD`, and for each list one JSON row per group. Prompts are not included."""
    from torch import from_numpy

    tensors: dict[str, Tensor] = {}
    completions = [c for groups in held for group in groups for c in group.completions]
    for name in PER_TOKEN if completions else ():
        given = [getattr(c, name) for c in completions]
        if given[0] is not None:
            tensors[HELD + name] = from_numpy(np.concatenate(given))
    return tensors, [[_row(group) for group in groups] for groups in held]


def load_held(
    tensors: Mapping[str, Tensor],
    rows: Sequence[Sequence[Mapping[str, Any]]],
    prompt: Callable[[int], Prompt],
) -> list[list[Group]]:
    """Restore the lists of groups from the tensors and rows of `save_held`. ``prompt`` returns the
    prompt of a group, given its index. ``tensors`` may contain other tensors of the checkpoint."""
    arrays = {name: tensors[HELD + name].numpy() for name in PER_TOKEN if HELD + name in tensors}
    first = 0

    def completion(saved: Mapping[str, Any], params: SamplingParams) -> Completion:
        nonlocal first
        end = first + saved["length"]
        fields: dict[str, Any] = {name: saved[name] for name in NAMES if name in saved}
        fields["continuation_errors"] = tuple(fields.get("continuation_errors", ()))
        fields |= {name: values[first:end] for name, values in arrays.items()}
        first = end
        fields |= _load_episode(saved["episode"]) if "episode" in saved else {}
        return Completion(**fields, params=params, finish=Finish(saved["finish"]))

    def group(row: Mapping[str, Any]) -> Group:
        given: dict[str, Any] = row["params"]
        tuples = {name: tuple(given.get(name, ())) for name in TUPLES}
        params = SamplingParams(**{**given, **tuples})
        completions = tuple(completion(saved, params) for saved in row["completions"])
        grades = tuple(Grade(**{**g, "status": Status(g["status"])}) for g in row["grades"])
        return Group(row["index"], prompt(row["index"]), completions, grades)

    return [[group(row) for row in own] for own in rows]


def _row(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "params": asdict(group.completions[0].params),
        "completions": [
            {name: getattr(c, name) for name in NAMES}
            | {"length": len(c.token_ids), "finish": str(c.finish)}
            | _episode(c)
            for c in group.completions
        ],
        "grades": [{**asdict(g), "status": str(g.status)} for g in group.grades],
    }


def _episode(c: Completion) -> dict[str, Any]:
    """Return the fields of an episode as the entry "episode" of a row; an empty dict for other
    responses. The seconds of turns are left out, so that checkpoints of equal runs are equal."""
    if not c.turns:
        return {}
    sequences = [(one.start, one.prompt.tolist(), one.messages) for one in c.sequences]
    turns = [turn._replace(seconds=0.0)._asdict() for turn in c.turns]
    fields = {"turns": turns, "sequences": sequences}
    return {"episode": fields | {"limit": c.limit and str(c.limit), "first": c.first_messages}}


def _load_episode(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a completion from the entry of `_episode`."""
    first = saved["first"]
    turns = (Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in saved["turns"])
    return {
        "turns": tuple(turns),
        "sequences": tuple(
            SequenceStart(start, np.array(prompt, np.int32), *map(tuple, messages))
            for start, prompt, *messages in saved["sequences"]  # older checkpoints have no messages
        ),
        "limit": saved["limit"] and Limit(saved["limit"]),
        "first_messages": None if first is None else tuple(first),
    }
