"""The responses that a page has room for, as the page's JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from burnish.runs.metrics import iterate_rows
from burnish.runs.pages import encode
from burnish.runs.responses import ResponseRow, first_and_last

CHARACTERS, TOKENS = 20_000, 2_000
"""Bounds on one response. Prompts are never cut: a prompt that has no room is left out."""
PAIRS = 200
FILES = ("rollouts.jsonl", "evaluations.jsonl")
"""Where responses lie; a response's source is its file's place in this."""
ELSEWHERE = ("prompt", "prompt_id", "asked", "response")
"""Keys of a row that a page has elsewhere: a response is its tokens, unless they read otherwise."""
AROUND = 40
"""Bytes of a response's commas and of its places in the lists of prompts and pairs."""
GOLDEN = 0.6180339887
"""Multiples of this number, modulo 1, are spread evenly from the first on."""

Entry = dict[str, Any]
"""A response: number, source, step, prompt_id, sample, asked, and its JSON for the page."""


def excerpt(run: Path, budget: int, reach: int) -> dict[str, Any]:
    """As many responses as fit into ``budget`` bytes: pairs before and after first, then the newest
    step, then all steps evenly.

    reach: how many bytes are read at each end of a file.
    """
    entries = _read(run, reach)
    pairs = _pairs(entries)
    chosen: set[int] = set()
    prompts: dict[str, int] = {}
    for entry in [*(entry for pair in pairs for entry in pair), *_spread(entries)]:
        asked = entry["asked"]
        cost = len(entry["json"]) + AROUND + (len(encode(asked)) if asked not in prompts else 0)
        if entry["number"] not in chosen and cost <= budget:
            budget -= cost
            chosen.add(entry["number"])
            prompts.setdefault(asked, len(prompts))
    kept = [entry for entry in entries if entry["number"] in chosen]
    place = {entry["number"]: n for n, entry in enumerate(kept)}
    places = [(place.get(a["number"]), place.get(b["number"])) for a, b in pairs]
    files = [run / name for name in FILES if (run / name).exists()]
    return {
        "total": len(entries),
        "ends": any(file.stat().st_size > 2 * reach for file in files),
        "prompts": list(prompts),
        "rows": [json.loads(entry["json"]) | {"prompt": prompts[entry["asked"]]} for entry in kept],
        "pairs": [pair for pair in places if None not in pair],
    }


def _read(run: Path, reach: int) -> list[Entry]:
    entries: list[Entry] = []
    for source, name in enumerate(FILES):
        for row in iterate_rows(run / name, reach):
            entry = {key: row[key] for key in ("step", "prompt_id", "sample", "asked")}
            entry |= {"number": len(entries), "source": source}
            entries.append(entry | {"json": str(encode(_compact(source, row)))})
    return entries


def _pairs(entries: list[Entry]) -> list[tuple[Entry, Entry]]:
    """The same prompt, first and last seen: in validation, else in training."""
    found: list[tuple[Entry, Entry]] = []
    for source in (1, 0):
        found = found or first_and_last(e for e in entries if e["source"] == source)
    return sorted(found, key=lambda pair: pair[0]["sample"])[:PAIRS]


def _spread(entries: list[Entry]) -> list[Entry]:
    """The newest step, then an order whose every beginning covers the run's steps evenly."""
    steps = {step: n for n, step in enumerate(sorted({entry["step"] for entry in entries}))}
    ranks: Counter[tuple[int, int]] = Counter()

    def key(entry: Entry) -> tuple[bool, int, float]:
        source, number = entry["source"], steps[entry["step"]]
        ranks[source, number] += 1
        return number < len(steps) - 1, ranks[source, number], number * GOLDEN % 1

    return sorted(entries, key=key)


def _compact(source: int, row: ResponseRow) -> ResponseRow:
    """A row for the page: without the prompt, and cut if it is long."""
    tokens, whole = row["tokens"], "".join(row["tokens"])
    compact = {key: value for key, value in row.items() if key not in ELSEWHERE}
    for key in ("tokens", "logprobs", "learner_logprobs"):
        compact[key] = (row[key] or [])[:TOKENS]
    compact["tokens"] = [token[:CHARACTERS] for token in compact["tokens"]]
    if whole != row["response"]:
        compact["response"] = row["response"][:CHARACTERS]
    if len(tokens) > TOKENS or len(whole) > CHARACTERS:
        compact["whole"] = [len(tokens), len(whole)]
    return compact | {"source": source}
