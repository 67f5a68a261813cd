"""A model's responses as rows of JSONL files, as a plain-text log, and as an excerpt for pages."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.runs.metrics import iterate_rows
from burnish.types import Completion, FloatArray, Group, IntArray, Prompt

Row = dict[str, Any]
ResponseRow = Row
"""One response: a row of rollouts.jsonl or evaluations.jsonl, made by ``rows``."""
FILES = ("rollouts.jsonl", "evaluations.jsonl")
"""Files with responses. Pages refer to a file by its index here."""
TURN_TIMES = "turn_times.jsonl"
"""File with the seconds of the environment's calls in each episode that `FILES` has."""
TOKENS, PAIRS = 2_000, 200
"""Maximum number of tokens per response and of pairs of responses in a page. Prompts are never
truncated: a response whose prompt does not fit is left out."""
TEXT, EPISODE, TURNS = 4_000, 40_000, 200
"""Maximum number of characters of each message of an episode, of all its messages if they have more
than ``SHORTEST`` each, and of turns, in a page."""
SHORTEST = 200
"""Number of characters of a message that a page always has."""
ELSEWHERE = ("prompt", "prompt_id", "response")
"""Keys of a row that pages omit. The response is included if its tokens do not spell it."""


def rows(
    step: int,
    groups: Sequence[Group],
    *,
    decode: Callable[[IntArray], list[str]],
    advantages: Sequence[float] | None = None,
    learner_logprobs: Sequence[FloatArray] | None = None,
    limit: int | None = None,
) -> Iterator[ResponseRow]:
    """Yield a step's responses as rows, at most ``limit`` of them (None: all).

    ``decode`` returns one string per token id. ``advantages`` and ``learner_logprobs`` have one
    entry per response, in the order of the groups; an entry of the latter has one value per token,
    [C]. If they are None, so are these values in the rows. The limit keeps each group's first
    response, then each group's second, and so on. Rows are in the order of the groups.
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
            "asked": _question(group.prompt),
            "sample": completion.sample_index,
            "response": completion.text,
            "tokens": tokens,  # [C] decoded, including the end token
            "logprobs": _rounded(completion.logprobs),  # [C] under the policy that sampled them
            "learner_logprobs": scored,
            "forced": np.flatnonzero(~completion.sampled).tolist(),  # tokens not sampled
            "reward": _finite(grade.reward),
            "parts": {name: _finite(value) for name, value in grade.parts.items()},
            "status": str(grade.status),
            **({"message": grade.message} if grade.is_error else {}),
            "correct": grade.correct,
            "advantage": None if advantages is None else _finite(advantages[place]),
            "finish": str(completion.finish),
            # Version of the weights that sampled the first token; None if there are no tokens.
            "version": int(completion.versions[0]) if len(completion.versions) else None,
            "versions": version_ranges(completion.versions),
            **_steps(completion.values),
            **_episode(group.prompt, completion, decode),
        }


def final_text(row: ResponseRow) -> str:
    """Return the text that has a response's answer: the last turn of an episode, or else the whole
    response."""
    return str(row["turns"][-1]["text"] if row.get("turns") else row["response"])


def version_ranges(versions: IntArray) -> list[list[int]]:
    """Run-length encode the weight versions that sampled a response's tokens [C].

    Returns [version, number of consecutive tokens] pairs in the order of the tokens. There is one
    pair unless the weights were updated during sampling.
    """
    changed = np.flatnonzero(np.diff(versions)) + 1
    return [[int(part[0]), len(part)] for part in np.split(versions, changed) if len(part)]


def _steps(values: FloatArray | None) -> ResponseRow:
    """Return the entry "steps" of a row: for each step of the response, the index of its first
    token and the estimated value before that token. Return an empty dict if the recipe does not
    estimate step values."""
    if values is None:
        return {}
    starts = np.flatnonzero(np.isfinite(values))
    return {"steps": [(int(start), float(values[start])) for start in starts]}


def _episode(
    prompt: Prompt, completion: Completion, decode: Callable[[IntArray], list[str]]
) -> ResponseRow:
    """Return the entries of a multi-turn episode; an empty dict if the prompt has no environment.

    "first_messages" are the messages before the first turn. "turns" has one dict per turn with the
    fields of `Turn` except its seconds, which differ whenever the run is repeated. "limit" is the
    limit that truncated the episode, None if none did. "sequences", if there are any, are the
    sequences with prompts of their own: the index of the first token, the prompt and, for an
    agent's conversations, its messages.
    """
    episode = prompt.episode
    if episode is None:
        return {}
    if completion.first_messages is not None:
        episode = episode._replace(messages=completion.first_messages)
    sequences = [
        {"start": one.start, "prompt": "".join(decode(one.prompt))}
        | ({"messages": list(one.messages)} if one.messages else {})
        for one in completion.sequences
    ]
    return {
        "first_messages": episode.opening,
        "turns": [
            {name: value for name, value in turn._asdict().items() if name != "seconds"}
            for turn in completion.turns
        ],
        "limit": None if completion.limit is None else str(completion.limit),
    } | ({"sequences": sequences} if sequences else {})


def turn_times(file: str, rows: Sequence[ResponseRow], groups: Sequence[Group]) -> Iterator[Row]:
    """Yield the rows of `TURN_TIMES` for ``rows``, which were made from ``groups`` and belong to
    ``file``: the seconds of the environment's calls in each episode. Other responses have none."""
    turns = {(g.index, c.sample_index): c.turns for g in groups for c in g.completions}
    for row in rows:
        if own := turns[row["group"], row["sample"]]:
            names = {name: row[name] for name in ("step", "group", "sample")}
            yield {"file": file, **names, "seconds": [round(turn.seconds, 6) for turn in own]}


def iterate_responses(run: Path, file: str, reach: int | None = None) -> Iterator[ResponseRow]:
    """Yield the rows of one of a run's `FILES`, with the seconds of the environment's calls added
    to each turn if they were recorded. ``reach`` as in `iterate_rows`."""
    times = {
        tuple(row[name] for name in ("step", "group", "sample")): row["seconds"]
        for row in iterate_rows(run / TURN_TIMES, reach)
        if row["file"] == file
    }
    for row in iterate_rows(run / file, reach):
        turns = row.get("turns", ())
        own = times.get((row["step"], row["group"], row["sample"])) if turns else None
        if own is not None:
            row["turns"] = [t | {"seconds": s} for t, s in zip(turns, own, strict=False)]
        yield row


def first_and_last(rows: Iterable[ResponseRow]) -> list[tuple[ResponseRow, ResponseRow]]:
    """Return pairs of the first and the last row with the same prompt and sample index.

    Rows must be in the order of steps. Prompts that were sampled at only one step are left out.
    """
    seen: dict[tuple[str, int], list[ResponseRow]] = {}
    for row in rows:
        seen.setdefault((row["prompt_id"], row["sample"]), []).append(row)
    return [(same[0], same[-1]) for same in seen.values() if same[0]["step"] < same[-1]["step"]]


def _question(prompt: Prompt) -> str:
    """Return the text of a prompt without the chat template."""
    return prompt.text if prompt.question is None else prompt.question


def _rounded(values: FloatArray) -> list[float | None]:
    return [_finite(round(float(value), 4)) for value in values]


def _finite(value: float) -> float | None:
    """Return the value as a float; None for NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def format_log(rows: Sequence[ResponseRow]) -> str:
    """Format the rows of one step, at least one, as text. Equal responses to a prompt share a line
    with their count."""
    lines, previous = [f"step {rows[0]['step']}"], None
    for (prompt, line), count in Counter((row["asked"], _line(row)) for row in rows).items():
        if prompt != previous:
            lines.append(f"  prompt {prompt!r}")
        lines.append(f"    {count:3d} × {line}")
        previous = prompt
    return "\n".join(lines) + "\n"


def _line(row: ResponseRow) -> str:
    figures = {"reward": row["reward"], **row["parts"], "advantage": row["advantage"]}
    text = ", ".join(f"{name} {value:z.4g}" for name, value in figures.items() if value is not None)
    why = f": {row['message']}" if row.get("message") else ""
    note = "" if row["status"] == "scored" else f"  [{row['status']}{why}]"
    return f"{row['response']!r}  {text}{note}"


def excerpt(run: Path, budget: int, reach: int) -> dict[str, Any]:
    """Select responses of a run for a page, with at most ``budget`` characters of JSON: first pairs
    of responses before and after training, then the newest step, then responses of all steps.

    Return "rows", the selected rows; "pairs", pairs of indices into the rows; "total", the number
    of rows that were read; and "ends", whether a file was read only in part: ``reach`` bytes from
    each end.
    """
    entries = _read(run, reach)
    pairs = _pairs(entries)
    for entry in [*(entry for pair in pairs for entry in pair), *_in_order(entries)]:
        if not entry["is_kept"] and entry["size"] <= budget:
            budget -= entry["size"]
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
    """Read a run's responses; return an entry for each: its JSON for the page, and the values by
    which it is selected."""
    entries = []
    for source, name in enumerate(FILES):
        for row in iterate_responses(run, name, reach):
            entry = {key: row[key] for key in ("step", "prompt_id", "sample")}
            entry |= {"source": source, "is_kept": False}
            compact = _compact(row) | {"source": source}
            steady = json.dumps(_untimed(compact))
            entry |= {"size": len(steady), "hash": zlib.crc32(steady.encode())}
            entries.append(entry | {"json": json.dumps(compact)})
    return entries


def _pairs(entries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of the first and the last response to the same prompt, at most ``PAIRS``: of
    validation prompts or, if there are none, of training prompts."""
    held_out = first_and_last(entry for entry in entries if entry["source"] == 1)
    found = held_out or first_and_last(entry for entry in entries if entry["source"] == 0)
    return sorted(found, key=lambda pair: pair[0]["sample"])[:PAIRS]


def _in_order(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the newest step, then all others. Both parts are sorted by a hash, so
    that later responses do not change the order."""
    newest = max((entry["step"] for entry in entries), default=0)
    return sorted(entries, key=lambda e: (e["step"] < newest, e["hash"]))


def _untimed(row: ResponseRow) -> ResponseRow:
    """Return a row without seconds, so that a repeated run selects the same rows."""
    if "turns" not in row:
        return row
    turns = [{k: v for k, v in turn.items() if k != "seconds"} for turn in row["turns"]]
    return row | {"turns": turns}


def _compact(row: ResponseRow) -> ResponseRow:
    """Return a row for the page: without the keys in ``ELSEWHERE``, and truncated to ``TOKENS``
    tokens."""
    compact = {key: value for key, value in row.items() if key not in ELSEWHERE}
    for key in ("tokens", "logprobs", "learner_logprobs"):
        compact[key] = (row[key] or [])[:TOKENS]
    if "".join(row["tokens"]) != row["response"]:
        compact["response"] = row["response"][: len("".join(compact["tokens"]))]
    if len(row["tokens"]) > TOKENS:
        compact["whole"] = [len(row["tokens"]), len(row["response"])]
    if "turns" in row:
        compact.pop("response", None)  # the page shows the texts of the turns
        first, turns = row["first_messages"], row["turns"][:TURNS]
        opened = [one for one in row.get("sequences", ()) if "messages" in one][:TURNS]
        texts = len(first) + sum(1 + len(turn["messages"]) for turn in turns)
        texts += sum(len(one["messages"]) for one in opened)
        most = max(SHORTEST, min(TEXT, EPISODE // max(1, texts)))
        compact["first_messages"] = [_clipped(message, most) for message in first]
        compact["turns"] = [
            _clipped(turn, most, "text")
            | {"messages": [_clipped(message, most) for message in turn["messages"]]}
            for turn in turns
        ]
        if "sequences" in row:  # the page shows the conversations of agents, and no prompts
            compact["sequences"] = [
                {"start": one["start"], "messages": [_clipped(m, most) for m in one["messages"]]}
                for one in opened
            ]
        compact["turn_count"] = len(row["turns"])
        compact["failed"] = any(turn["error"] is not None for turn in row["turns"])
    return compact


def _clipped(record: Mapping[str, Any], most: int, key: str = "content") -> dict[str, Any]:
    """Return a message or a turn for the page: with at most ``most`` characters of its text and, if
    it is longer, its length as "characters"."""
    text = record[key]
    if len(text) <= most:
        return dict(record)
    return {**record, key: text[:most], "characters": len(text)}
