"""Graded groups as arrays and JSON, so that a checkpoint holds them without pickles.

A prompt is not saved: a task's prompts are a function of their number, so the group's index brings
it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams, Status

if TYPE_CHECKING:
    from torch import Tensor

HELD = "groups."
"""How the names of these tensors begin in a checkpoint."""
Arrays = dict[str, npt.NDArray[Any]]
PER_TOKEN = ("token_ids", "logprobs", "versions", "sampled")
NAMES = ("request_id", "sample_index", "stop", "text")


def save_groups(groups: Sequence[Group]) -> tuple[Arrays, list[dict[str, Any]]]:
    """The tokens of all responses one after the other, and a row per group."""
    completions = [completion for group in groups for completion in group.completions]
    if not completions:
        return {}, []
    arrays = {name: np.concatenate([getattr(c, name) for c in completions]) for name in PER_TOKEN}
    return arrays, [_row(group) for group in groups]


def load_groups(
    arrays: Mapping[str, npt.NDArray[Any]],
    rows: Sequence[Mapping[str, Any]],
    prompt: Callable[[int], Prompt],
) -> list[Group]:
    """The inverse of ``save_groups``; ``prompt`` gives the prompt of a group's index."""
    groups, first = [], 0
    for row in rows:
        given: dict[str, Any] = row["params"]
        stops = {name: tuple(given[name]) for name in ("stop", "stop_ids")}
        params, completions = SamplingParams(**{**given, **stops}), []
        for told in row["completions"]:
            end = first + told["length"]
            fields: dict[str, Any] = {name: told[name] for name in NAMES}
            fields |= {name: arrays[name][first:end] for name in PER_TOKEN}
            completions.append(Completion(**fields, params=params, finish=Finish(told["finish"])))
            first = end
        grades = tuple(Grade(**{**g, "status": Status(g["status"])}) for g in row["grades"])
        groups.append(Group(row["index"], prompt(row["index"]), tuple(completions), grades))
    return groups


def _row(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "params": asdict(group.completions[0].params),
        "completions": [
            {name: getattr(c, name) for name in NAMES}
            | {"length": len(c.token_ids), "finish": str(c.finish)}
            for c in group.completions
        ],
        "grades": [{**asdict(g), "status": str(g.status)} for g in group.grades],
    }


def save_held(held: Sequence[Sequence[Group]]) -> tuple[dict[str, Tensor], list[Any]]:
    """Lists of groups, those of a buffer and of rollouts in flight, as a checkpoint holds them:
    tensors, and values that JSON can hold."""
    from torch import from_numpy

    tensors: dict[str, Tensor] = {}
    rows = []
    for number, groups in enumerate(held):
        arrays, row = save_groups(groups)
        tensors |= {f"{HELD}{number}.{name}": from_numpy(x) for name, x in arrays.items()}
        rows.append(row)
    return tensors, rows


def load_held(
    tensors: Mapping[str, Tensor], rows: Sequence[Any], prompt: Callable[[int], Prompt]
) -> list[list[Group]]:
    """The inverse of ``save_held``; a checkpoint's other tensors may be among the tensors."""
    held = []
    for number, row in enumerate(rows):
        names = {name: f"{HELD}{number}.{name}" for name in PER_TOKEN} if row else {}
        arrays = {name: tensors[full].numpy() for name, full in names.items()}
        held.append(load_groups(arrays, row, prompt))
    return held
