"""A run as a script or a notebook meets it: its directory, read when something is asked of it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish import config
from burnish.errors import RunError
from burnish.runs import checkpoints
from burnish.runs.checkpoints import Saved
from burnish.runs.directory import read_recipe
from burnish.runs.metrics import collect, end_means, iterate_rows
from burnish.runs.report import write_report
from burnish.runs.responses import first_and_last
from burnish.schema.recipe import Recipe
from burnish.wording import counted, printable

PAIRS, SAID = 3, 200
"""Answers before and after in a summary, and the characters of each that are told."""


class Run:
    """A run's directory. Attributes read its files afresh, also while the run is still going on.

    A run is a path (``Path(run)``, ``run / "log.txt"``), and it is a model: pass it as ``model=``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        read_recipe(self.path)

    @property
    def recipe(self) -> Recipe:
        """The recipe as it ran, every setting resolved."""
        return config.load(self.path / "recipe.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """Where the run began and where it ended, or has come to so far."""
        return summarise(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step; the row of step 0 was measured before the first step."""
        return self._rows("metrics")

    @property
    def timings(self) -> list[dict[str, Any]]:
        """A row for each step: seconds of each phase."""
        return self._rows("timings")

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """A row for each response that was kept, with its tokens, reward and advantage."""
        return self._rows("rollouts")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """A row for each response to a held-out prompt that was kept."""
        return self._rows("evaluations")

    @property
    def checkpoints(self) -> list[Saved]:
        """The checkpoints that are kept, the oldest first."""
        return [checkpoints.describe(path) for path in checkpoints.all_of(self.path)]

    @property
    def best(self) -> Saved:
        """The checkpoint of the best score, or the last if none has a score."""
        return checkpoints.describe(checkpoints.choose(self.path, "best"))

    @property
    def model(self) -> str:
        """The name of the model that the run learned: its best checkpoint is meant."""
        return str(self.path)

    def frame(self, table: str = "metrics") -> Any:
        """The rows of metrics, timings, rollouts or evaluations as a pandas DataFrame."""
        return importlib.import_module("pandas").DataFrame(getattr(self, table))

    def report(self) -> Path:
        """Writes report.html and returns its path."""
        return write_report(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _rows(self, table: str) -> list[dict[str, Any]]:
        return list(iterate_rows(self.path / f"{table}.jsonl"))


def summarise(run: Path) -> dict[str, Any]:
    """A run's two ends, its cost, and the model's answers before and after, from its files."""
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    times = collect(iterate_rows(run / "timings.jsonl"))
    if "train/version" not in series:
        raise RunError(f"{run} has no step yet, so there is nothing to sum up")
    is_sampled = "rollout/responses" in series
    name, better = ("reward", max) if is_sampled else ("loss", min)
    summary: dict[str, Any] = {
        "recipe": recipe.get("name"),
        "seed": recipe.get("seed", 0),
        "steps": len(series["train/version"]),
        "gradient_steps": int(series["train/version"][-1][1]),
        "seconds": {
            phase.removeprefix("time/"): sum(seconds for _, seconds in times[phase])
            for phase in sorted(times)
            if phase.startswith("time/")
        },
    }
    if measured := series.get("rollout/reward" if is_sampled else "train/loss"):
        ends = end_means([value for _, value in measured])
        summary[f"{name}_first"], summary[f"{name}_last"] = ends
    if is_sampled:
        summary["responses"] = int(sum(count for _, count in series["rollout/responses"]))
    if (held_out := series.get(f"validation/{name}")) and _is_rewarded(recipe):
        step, best = better(held_out, key=lambda point: point[1])
        first, last = held_out[0][1], held_out[-1][1]
        summary["validation"] = {"first": first, "last": last, "best": best, "best_step": step}
    if drift := series.get("kl/held_out_k1"):
        summary["kl_held_out_k1"] = drift[-1][1]
    return summary | {"before_and_after": _before_and_after(run)}


def _is_rewarded(recipe: dict[str, Any]) -> bool:
    """Whether a held-out reward says anything: not if a run only learns from a teacher."""
    task = recipe.get("task", {})
    rewards = [one.get("reward") for one in task.get("tasks", {"": task}).values()]
    return "reward_model" in recipe or any(name != "none" for name in rewards)


def _before_and_after(run: Path) -> list[dict[str, Any]]:
    """The first samples of a few validation prompts at the first and the last evaluation."""
    pairs = first_and_last(iterate_rows(run / "evaluations.jsonl"))
    return [
        {
            "prompt": first["asked"],
            "before": first["response"],
            "reward_before": first["reward"],
            "after": last["response"],
            "reward_after": last["reward"],
        }
        for first, last in pairs
        if first["sample"] == 0
    ][:PAIRS]


def outcome(end: dict[str, Any]) -> list[str]:
    """A summary in a line or two: how the reward or the loss went, and the held-out one."""
    measure = "reward" if "responses" in end else "loss"
    sampled = f"{counted(end['responses'], 'response')}, " if "responses" in end else ""
    first, last = (end.get(f"{measure}_{which}") for which in ("first", "last"))
    moved = "no response was graded" if first is None else f"{measure} {first:z.2f} → {last:z.2f}"
    taken = counted(end["gradient_steps"], "gradient step")
    lines = [f"{moved}, {sampled}{taken}, {end['seconds']['step']:.1f} s"]
    if "validation" in end:
        held, kl = end["validation"], end.get("kl_held_out_k1")
        drift = "" if kl is None else f" at {kl:z.2f} nats per token"
        best = f"best {held['best']:z.3f} at step {held['best_step']}"
        lines.append(f"held out {held['first']:z.3f} → {held['last']:z.3f}{drift} ({best})")
    return lines


def answers(end: dict[str, Any]) -> Iterator[str]:
    """The model's answers before and after, in lines without control characters."""
    for pair in end["before_and_after"]:
        yield f"  {_line(pair['prompt'])}"
        for side in ("before", "after"):
            reward, said = pair[f"reward_{side}"], _line(pair[side])
            mark = "no grade" if reward is None else f"{reward:zg}"
            yield f"    {side:6} [{mark}] {said[:SAID]}{' …' * (len(said) > SAID)}"


def _line(text: str) -> str:
    return printable(text).replace("\n", "⏎")
