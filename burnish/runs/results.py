"""One page for evaluations, side by side: how often it was right, and how it was wrong.

What a model wrote is escaped, and nothing on the page may run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import RunError
from burnish.runs import responses, statistics
from burnish.runs.directory import replace_file
from burnish.runs.responses import ResponseRow

EXAMPLES = 12
"""Of each category, and of each way in which two evaluations differ."""
CHARACTERS = 4000
"""Of a response."""
LONG = 600
"""Characters past which a prompt is shown whole only when it is opened."""


def is_right(row: ResponseRow) -> bool:
    return statistics.is_right(row["reward"] or 0, row["parts"])


def has_format(row: ResponseRow) -> bool:
    return bool(row["parts"].get("format", row["status"] != "unparsed"))


CATEGORIES: dict[str, Callable[[ResponseRow], bool]] = {
    "format and answer right": is_right,
    "format right, answer wrong": lambda row: (
        not is_right(row) and row["status"] != "error" and has_format(row)
    ),
    "format wrong": lambda row: (
        not is_right(row) and row["status"] != "error" and not has_format(row)
    ),
    "unparsed": lambda row: row["status"] == "unparsed",
    "truncated": lambda row: row["finish"] == "length",
    "timed out": lambda row: row["status"] == "timeout",
    "grader failed": lambda row: row["status"] == "error",
}
"""The first three and the last part the responses; the others say more of some of them."""


class Evaluation(NamedTuple):
    """A model measured on held-out prompts."""

    name: str
    settings: dict[str, Any]
    """All that the results depend on."""
    figures: dict[str, float]
    rows: list[ResponseRow]
    """A row for each response."""
    path: Path | None
    """The directory with all of it; None if nothing was written."""

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"Evaluation of {self.name}: {figures}"


def read(directory: Path) -> Evaluation:
    try:
        settings, figures = (
            json.loads((directory / name).read_text(encoding="utf-8"))
            for name in ("settings.json", "figures.json")
        )
    except (OSError, ValueError) as error:
        raise RunError(f"{directory} holds no finished evaluation: {error}") from error
    rows = list(responses.read(directory / "results.jsonl"))
    return Evaluation(directory.name, settings, figures, rows, directory)


def write_evaluation(directories: Sequence[Path], page: Path) -> Path:
    """Figures, categories and examples of each, and what they answered differently."""
    given = _named_by_model([read(directory) for directory in directories])
    settings = {
        key: [str(e.settings.get(key, "–")) for e in given] for e in given for key in e.settings
    }
    shown = {k: v for k, v in settings.items() if len(given) == 1 or len(set(v)) > 1}
    names = {key: None for e in given for key in e.figures}
    figures = {name: [_number(e.figures.get(name)) for e in given] for name in names}
    counts = {
        name: [_share(sum(map(holds, e.rows)), len(e.rows)) for e in given]
        for name, holds in CATEGORIES.items()
    }
    body = [_table("Figures", given, figures), _table("Responses", given, counts)]
    for name, holds in CATEGORIES.items():
        columns = [[row for row in e.rows if holds(row)][:EXAMPLES] for e in given]
        body.append(_section(name, ("".join(map(_example, rows)) for rows in columns)))
    for other in given[1:]:
        body += _differences(given[0], other)
    what = "Settings" if len(given) == 1 else "Settings that differ"
    body.append(_table(what, given, shown))
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    replace_file(page, template.replace("__BODY__", "\n".join(body)))
    return page


def _named_by_model(given: list[Evaluation]) -> list[Evaluation]:
    """Those of several models, which are numbered, under the models' names."""
    models = [str(e.settings.get("model.name", "")) for e in given]
    numbered = len(given) > 1 and all(e.name.isdecimal() for e in given)
    if not numbered or len(set(models)) < len(given):
        return given
    return [e._replace(name=model) for e, model in zip(given, models, strict=True)]


def _differences(one: Evaluation, other: Evaluation) -> list[str]:
    """Pairs of responses to the same prompt's same sample, of which one is right."""
    theirs = {(row["prompt_id"], row["sample"]): row for row in other.rows}
    keyed = [(row, theirs.get((row["prompt_id"], row["sample"]))) for row in one.rows]
    pairs = [(a, b) for a, b in keyed if b is not None and is_right(a) != is_right(b)]
    found = []
    for winner, first in ((one.name, True), (other.name, False)):
        chosen = [pair for pair in pairs if is_right(pair[0]) == first]
        cells = [cell for pair in chosen[:EXAMPLES] for cell in map(_example, pair)]
        title = f"only {winner} is right: {len(chosen):,} of {len(keyed):,}"
        found.append(_section(title, cells, columns=2))
    return found


def _table(title: str, given: Sequence[Evaluation], lines: dict[str, list[str]]) -> str:
    head = "".join(f"<th>{escape(e.name)}</th>" for e in given)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for name, values in lines.items()
    )
    return f"<h2>{title}</h2><table><tr><th></th>{head}</tr>{rows}</table>"


def _section(title: str, cells: Iterable[str], columns: int | None = None) -> str:
    parts = [f"<div>{cell or 'none'}</div>" for cell in cells]
    style = f"grid-template-columns: repeat({columns or len(parts)}, minmax(0, 1fr))"
    grid = f'<div class="grid" style="{style}">{"".join(parts)}</div>'
    return f"<details><summary>{escape(title)}</summary>{grid}</details>"


def _example(row: ResponseRow) -> str:
    about = f"{row['prompt_id']}, sample {row['sample']}: reward {row['reward']}, {row['status']}"
    about += f", {len(row['tokens'])} tokens, ended by {row['finish']}"
    prompt, response = f"<pre>{escape(row['asked'])}</pre>", row["response"][:CHARACTERS]
    if len(row["asked"]) > LONG:
        start = row["asked"][:LONG]
        start = start.rpartition(" ")[0] or start
        prompt = f"<details><summary>{escape(start)} …</summary>{prompt}</details>"
    said = f"<div class='prompt'>{prompt}</div><pre>{escape(response)}</pre>"
    return f"<article><p>{escape(about)}</p>{said}</article>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.4f}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / max(1, total):.1%})"
