"""The responses that a page has room for, as the page's JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import responses
from burnish.runs.pages import encode
from burnish.runs.responses import ResponseRow

CHARACTERS, TOKENS = 20_000, 2_000
"""Bounds on one response. Prompts are never cut: a prompt that has no room is left out."""
PAIRS = 200
FILES = ("rollouts.jsonl", "evaluations.jsonl")
"""Where responses lie; a row's source is its file's place in this."""


class Entry(NamedTuple):
    """A response on disk: where it lies and what it costs."""

    source: int
    place: int
    step: int
    prompt_id: str
    sample: int
    prompt: str
    size: int


def excerpt(run: Path, budget: int, reach: int | None = None) -> dict[str, Any]:
    """As many responses as fit: pairs before and after first, then all steps evenly.

    reach: how many bytes are read at each end of a file, None for all of it. With it the newest
    responses follow the pairs, and the work is bounded however long the files are.
    """
    entries: list[Entry] = []
    texts: dict[str, str] = {}
    read: Callable[[], Iterator[tuple[int, int, ResponseRow]]] = partial(_read, run)
    if reach is not None:  # the second reading might find longer files and other ends
        held = list(_read(run, reach))
        read = partial(iter, held)
    for source, place, row in read():
        prompt = texts.setdefault(row["asked"], row["asked"])
        size = len(encode(_compact(source, row, 0))) + 6
        entries.append(
            Entry(source, place, row["step"], row["prompt_id"], row["sample"], prompt, size)
        )
    pairs = pair_up(entries)
    others = spread(entries) if reach is None else sorted(entries, key=lambda entry: -entry.step)
    chosen: dict[Entry, None] = {}
    prompts: dict[str, int] = {}
    for entry in [*(entry for pair in pairs for entry in pair), *others]:
        if entry in chosen:
            continue
        fresh = entry.prompt not in prompts
        cost = entry.size + (len(encode(entry.prompt)) + 1 if fresh else 0) + 14  # and its pair
        if cost > budget:
            continue
        budget -= cost
        chosen[entry] = None
        prompts.setdefault(entry.prompt, len(prompts))
    wanted = {(entry.source, entry.place): entry for entry in chosen}
    rows: list[dict[str, Any]] = []
    at: dict[Entry, int] = {}
    for source, place, row in read():
        kept = wanted.get((source, place))
        if kept is not None:
            at[kept] = len(rows)
            rows.append(_compact(source, row, prompts[kept.prompt]))
    shown = [(at[a], at[b]) for a, b in pairs if a in at and b in at]
    sizes = [(run / name).stat().st_size for name in FILES if (run / name).exists()]
    return {
        "total": len(entries),
        "ends": reach is not None and any(size > 2 * reach for size in sizes),
        "prompts": list(prompts),
        "rows": rows,
        "pairs": shown,
    }


def pair_up(entries: list[Entry]) -> list[tuple[Entry, Entry]]:
    """The same prompt and sample, first and last seen: in validation, else in training."""
    for source in (1, 0):
        seen: dict[tuple[str, int], list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.source == source:
                seen[entry.prompt_id, entry.sample].append(entry)
        pairs = [
            (min(same, key=lambda e: e.step), max(same, key=lambda e: e.step))
            for same in seen.values()
        ]
        pairs = [(a, b) for a, b in pairs if a.step < b.step]
        if pairs:
            return sorted(pairs, key=lambda pair: pair[0].sample)[:PAIRS]
    return []


def spread(entries: list[Entry]) -> list[Entry]:
    """An order whose every beginning covers the run's steps evenly."""
    number = {step: n for n, step in enumerate(sorted({entry.step for entry in entries}))}
    ranks: Counter[tuple[int, int]] = Counter()
    keyed = []
    for entry in entries:
        rank = ranks[entry.source, entry.step]
        ranks[entry.source, entry.step] += 1
        keyed.append((rank, f"{number[entry.step]:040b}"[::-1], entry))
    return [entry for *_, entry in sorted(keyed, key=lambda key: key[:2])]


def _read(run: Path, reach: int | None = None) -> Iterator[tuple[int, int, ResponseRow]]:
    for source, name in enumerate(FILES):
        for place, row in enumerate(responses.read(run / name, reach)):
            yield source, place, row


def _compact(source: int, row: ResponseRow, prompt: int) -> dict[str, Any]:
    """A row for the page: short keys, long responses cut."""
    tokens, room = [], CHARACTERS
    for token in row["tokens"][:TOKENS]:
        tokens.append(token[:room])
        room -= len(token)
        if room <= 0:
            break
    n = len(tokens)
    compact = {
        "v": source,
        "s": row["step"],
        "g": row["group"],
        "i": row["sample"],
        "p": prompt,
        "t": tokens,
        "l": [_number(value) for value in row["logprobs"][:n]],
        "m": [_number(value) for value in row["learner_logprobs"] or ()][:n],
        "r": _number(row["reward"]),
        "a": _number(row["advantage"]),
        "x": {name[:40]: _number(value) for name, value in list(row["parts"].items())[:12]},
        "f": row["finish"],
        "w": row["version"],
    }
    if row["status"] != "scored":
        compact["e"] = row["status"]
    whole = "".join(row["tokens"])
    if whole != row["response"]:
        compact["y"] = row["response"][:CHARACTERS]
    if n < len(row["tokens"]) or len(whole) > CHARACTERS:
        compact["c"] = [len(row["tokens"]), len(whole)]
    return {key: value for key, value in compact.items() if value not in (None, [], {})}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else rounded(value)


def rounded(value: float) -> float:
    return float(f"{value:.6g}")
