"""Responses of a model: rows of a file, a readable log, and the excerpt that a page shows."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.runs.metrics import iterate_rows
from burnish.types import FloatArray, Group, IntArray, Prompt

ResponseRow = dict[str, Any]
"""A row of rollouts.jsonl or evaluations.jsonl: one response; ``rows`` writes its keys."""
FILES = ("rollouts.jsonl", "evaluations.jsonl")
"""Files with responses; the source of a response in a page is its file's place here."""
TOKENS, PAIRS = 2_000, 200
"""Tokens of a response, and pairs of responses, in a page. Prompts are never cut: a prompt that has
no room is left out."""
ELSEWHERE = ("prompt", "prompt_id", "response")
"""Keys of a row that a page does without: a response is its tokens, unless they read otherwise."""


def rows(
    step: int,
    groups: Sequence[Group],
    *,
    decode: Callable[[IntArray], list[str]],
    advantages: Sequence[float] | None = None,
    learner_logprobs: Sequence[FloatArray] | None = None,
    limit: int | None = None,
) -> Iterator[ResponseRow]:
    """A step's responses as rows, at most ``limit`` of them.

    ``decode`` turns token ids into one string each. ``advantages`` and ``learner_logprobs`` [C]
    are given per response, in the groups' order; they are None in a row if they were not given. The
    limit takes every group's first response, then every group's second, and so on; rows come in the
    groups' order.
    """
    ranked = [(k, g) for g, group in enumerate(groups) for k in range(len(group.completions))]
    chosen = set(sorted(ranked)[:limit])
    for place, (k, g) in enumerate(ranked):
        if (k, g) not in chosen:
            continue
        group = groups[g]
        completion, grade = group.completions[k], group.grades[k]
        tokens = decode(completion.token_ids)
        assert len(tokens) == len(completion.token_ids)
        scored = None
        if learner_logprobs is not None and completion.in_loss:
            scored = _rounded(np.where(completion.sampled, learner_logprobs[place], np.nan))
        yield {
            "step": step,
            "group": group.index,
            "prompt_id": group.prompt.prompt_id,
            "prompt": group.prompt.text,
            "asked": _asked(group.prompt),
            "sample": completion.sample_index,
            "response": completion.text,
            "tokens": tokens,  # [C] as decoded, the end token included
            "logprobs": _rounded(completion.logprobs),  # [C] under the policy that sampled them
            "learner_logprobs": scored,
            "forced": np.flatnonzero(~completion.sampled).tolist(),  # tokens not sampled
            "reward": _finite(grade.reward),
            "parts": {name: _finite(value) for name, value in grade.parts.items()},
            "status": str(grade.status),
            "correct": grade.correct,
            "advantage": None if advantages is None else _finite(advantages[place]),
            "finish": str(completion.finish),
            # Of the weights that sampled the first token; None if there are no tokens.
            "version": int(completion.versions[0]) if len(completion.versions) else None,
            "versions": version_ranges(completion.versions),
        } | _steps(completion.values)


def version_ranges(versions: IntArray) -> list[list[int]]:
    """The versions of the weights that sampled a response's tokens [C], in the tokens' order: each
    with the number of tokens in a row that it sampled.

    Without updates in flight there is one.
    """
    changed = np.flatnonzero(np.diff(versions)) + 1
    return [[int(part[0]), len(part)] for part in np.split(versions, changed) if len(part)]


def _steps(values: FloatArray | None) -> ResponseRow:
    """The first token of each step and the value before it; nothing if no steps are valued."""
    if values is None:
        return {}
    starts = np.flatnonzero(np.isfinite(values))
    return {"steps": [(int(start), float(values[start])) for start in starts]}


def first_and_last(rows: Iterable[ResponseRow]) -> list[tuple[ResponseRow, ResponseRow]]:
    """The same prompt's same sample at the first and the last step that saw it, in the rows' order.

    Responses that were seen at one step only are left out.
    """
    seen: dict[tuple[str, int], list[ResponseRow]] = {}
    for row in rows:
        seen.setdefault((row["prompt_id"], row["sample"]), []).append(row)
    return [(same[0], same[-1]) for same in seen.values() if same[0]["step"] < same[-1]["step"]]


def _asked(prompt: Prompt) -> str:
    """The prompt without the chat template around it."""
    return prompt.text if prompt.asked is None else prompt.asked


def _rounded(values: FloatArray) -> list[float | None]:
    return [_finite(round(float(value), 4)) for value in values]


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None


def readable(rows: Sequence[ResponseRow]) -> str:
    """The rows of one step as text; equal responses to a prompt are one line with their count."""
    lines, asked = [f"step {rows[0]['step']}"], None
    for (prompt, line), count in Counter((row["asked"], _line(row)) for row in rows).items():
        if prompt != asked:
            lines.append(f"  prompt {prompt!r}")
        lines.append(f"    {count:3d} × {line}")
        asked = prompt
    return "\n".join(lines) + "\n"


def _line(row: ResponseRow) -> str:
    figures = {"reward": row["reward"], **row["parts"], "advantage": row["advantage"]}
    told = ", ".join(f"{name} {value:z.4g}" for name, value in figures.items() if value is not None)
    note = "" if row["status"] == "scored" else f"  [{row['status']}]"
    return f"{row['response']!r}  {told}{note}"


def excerpt(run: Path, budget: int, reach: int) -> dict[str, Any]:
    """Responses for a page, at most ``budget`` characters of JSON: pairs before and after first,
    then the newest step, then responses of all steps.

    reach: how many bytes are read at each end of a file.
    """
    entries = _read(run, reach)
    pairs = _pairs(entries)
    for entry in [*(entry for pair in pairs for entry in pair), *_in_order(entries)]:
        if not entry["is_kept"] and len(entry["json"]) <= budget:
            budget -= len(entry["json"])
            entry["is_kept"] = True
    kept = [entry for entry in entries if entry["is_kept"]]
    for place, entry in enumerate(kept):
        entry["place"] = place
    files = [run / name for name in FILES if (run / name).exists()]
    return {
        "total": len(entries),
        "ends": any(file.stat().st_size > 2 * reach for file in files),
        "rows": [json.loads(entry["json"]) for entry in kept],
        "pairs": [(a["place"], b["place"]) for a, b in pairs if a["is_kept"] and b["is_kept"]],
    }


def _read(run: Path, reach: int) -> list[dict[str, Any]]:
    """An entry for each response: its JSON for the page, and the values that choose it."""
    entries = []
    for source, name in enumerate(FILES):
        for row in iterate_rows(run / name, reach):
            entry = {key: row[key] for key in ("step", "prompt_id", "sample")}
            entry |= {"source": source, "is_kept": False}
            entries.append(entry | {"json": json.dumps(_compact(row) | {"source": source})})
    return entries


def _pairs(entries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same prompt, first and last seen: in validation, else in training."""
    held_out = first_and_last(entry for entry in entries if entry["source"] == 1)
    found = held_out or first_and_last(entry for entry in entries if entry["source"] == 0)
    return sorted(found, key=lambda pair: pair[0]["sample"])[:PAIRS]


def _in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest step, then an order that looks random and that later responses do not change."""
    newest = max((entry["step"] for entry in entries), default=0)
    return sorted(entries, key=lambda e: (e["step"] < newest, zlib.crc32(e["json"].encode())))


def _compact(row: ResponseRow) -> ResponseRow:
    """A row for the page, cut if its response is long."""
    compact = {key: value for key, value in row.items() if key not in ELSEWHERE}
    for key in ("tokens", "logprobs", "learner_logprobs"):
        compact[key] = (row[key] or [])[:TOKENS]
    if "".join(row["tokens"]) != row["response"]:
        compact["response"] = row["response"][: len("".join(compact["tokens"]))]
    if len(row["tokens"]) > TOKENS:
        compact["whole"] = [len(row["tokens"]), len(row["response"])]
    return compact
