"""What the CLI calls, and what a script calls: ``burnish.train``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import config
from burnish.config import Recipe, SortTask
from burnish.draws import Stream
from burnish.errors import ConfigError
from burnish.runs.directory import RunDirectory, next_directory
from burnish.types import SamplingParams

if TYPE_CHECKING:
    from burnish.loops.sync import Step

WINDOW = 10
"""Steps over which the rewards at a run's two ends are averaged."""


def train(
    recipe: str | Recipe,
    *,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Path:
    """Runs a recipe and returns its run directory.

    ``recipe`` is a name that ``burnish recipes`` lists, a TOML file or a ``Recipe``; ``overrides``
    are "section.key=value"; ``out`` is a new directory, by default runs/NAME-1, runs/NAME-2, …
    """
    loaded = config.load(recipe, overrides, seed=seed) if isinstance(recipe, str) else recipe
    path = next_directory(Path("runs"), loaded.name) if out is None else Path(out)
    size = loaded.task
    if not isinstance(size, SortTask):
        raise ConfigError(f"train runs task.name = 'sort' alone so far, got {size.name!r}")
    # Torch loads only now: what is wrong with a recipe is said at once.
    from burnish.engine.sorter import SorterEngine
    from burnish.learner.learner import Learner
    from burnish.loops import sync
    from burnish.model.sorter import Sorter
    from burnish.runs.plots import draw_run
    from burnish.runs.rollouts import readable
    from burnish.tasks.sorting import Sorting

    task = Sorting(size, seed=loaded.seed)

    def model() -> Sorter:
        return Sorter(size.numbers, size.length, loaded.model.width, seed=loaded.seed)

    generator = SorterEngine(model())
    learner = Learner(model(), loaded.objective, loaded.train)
    with RunDirectory(path, loaded) as run:
        rows = []
        for step in sync.train(loaded, task=task, generator=generator, learner=learner):
            run.append_row("metrics.jsonl", {"step": step.number} | step.metrics)
            run.append_row("timings.jsonl", {"step": step.number} | step.timings)
            run.append("log.txt", readable(step.number, step.groups, step.advantages))
            rows.append(step.metrics | step.timings)
            on_step(step)
        greedy = generator.generate(
            task.prompts,
            first_group=0,
            samples=1,
            params=SamplingParams(temperature=0),
            stream=Stream.EVALUATION,
        )
        answers = [(p, task.grade(p, c), c) for p, (c,) in zip(task.prompts, greedy, strict=True)]
        summary = summarise(loaded, rows) | {
            "best_possible_reward": task.best_reward,
            "greedy": [
                {"prompt": p.text, "response": c.text, "reward": g.reward} | g.parts
                for p, g, c in answers
            ],
        }
        run.write("summary.json", json.dumps(summary, indent=2) + "\n")
        draw_run(path)
    return path


def summarise(recipe: Recipe, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A run's two ends and its cost."""

    def mean(part: Sequence[dict[str, float]], metric: str) -> float:
        return sum(row[metric] for row in part) / len(part)

    phases = sorted({key for row in rows for key in row if key.startswith("time/")})
    return {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "steps": len(rows),
        "gradient_steps": int(rows[-1]["train/version"]),
        "responses": int(sum(row["rollout/responses"] for row in rows)),
        "reward_first": mean(rows[:WINDOW], "rollout/reward"),
        "reward_last": mean(rows[-WINDOW:], "rollout/reward"),
        "seconds": {key.removeprefix("time/"): sum(r.get(key, 0) for r in rows) for key in phases},
    }
