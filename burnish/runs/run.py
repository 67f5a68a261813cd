"""``Run``, an object with which scripts and notebooks read a run, and the summary of a run."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from burnish.console.text import counted, printable
from burnish.errors import RunError
from burnish.recipe.load import load_recipe
from burnish.recipe.recipe import Recipe
from burnish.runs import checkpoints
from burnish.runs.checkpoints import CheckpointInfo
from burnish.runs.directory import load_json, read_recipe
from burnish.runs.metrics import Series, collect, end_means, iterate_rows, window
from burnish.runs.note import read_note, write_note
from burnish.runs.report import Failure, read_failure, run_state, write_report
from burnish.runs.responses import first_and_last, iterate_responses
from burnish.runs.verdicts import read_warnings

PAIRS, LENGTH = 3, 200
"""Number of answers before and after training in a summary, and characters printed of each."""


class Run:
    """Reads the results of a run from its directory. Each access to an attribute reads the files
    again, so that it also works while the run is active.

    A run can be used as a path (``Path(run)``, ``run / "log.txt"``) and as a model (``model=run``).
    Raise a RunError if the directory has no run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        read_recipe(self.path)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe with all settings resolved."""
        return load_recipe(self.path / "recipe.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """First and last results, costs, and sample answers; of the steps so far if the run is
        active. Raise a RunError if no step has finished."""
        return summarise(self.path)

    @property
    def error(self) -> Failure | None:
        """Why the run failed (``kind``, ``message``, ``remedy``), and how to go on (``advice``, and
        the ``command`` in it). None if the run did not fail, or has been resumed since."""
        return read_failure(self.path)

    @property
    def warnings(self) -> list[str]:
        """Sentences about a run that has probably not learned, with remedies."""
        return read_warnings(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step. Step 0 was measured before the first training step."""
        return self._rows("metrics")

    @property
    def timings(self) -> list[dict[str, Any]]:
        """One row per step with the seconds of each phase."""
        return self._rows("timings")

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """One row per recorded response, with its tokens, reward and advantage."""
        return list(iterate_responses(self.path, "rollouts.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row per recorded response to a held-out prompt."""
        return list(iterate_responses(self.path, "evaluations.jsonl"))

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """The existing checkpoints, oldest first."""
        return [checkpoints.read_info(path) for path in checkpoints.list_checkpoints(self.path)]

    @property
    def best(self) -> CheckpointInfo:
        """The checkpoint with the highest score, or the last one if none has a score. Raise a
        RunError if there is no checkpoint."""
        return checkpoints.read_info(checkpoints.find_checkpoint(self.path, "best"))

    @property
    def note(self) -> str:
        """A note about the run, which can be changed: ``run.note = "…"``."""
        return read_note(self.path).text

    @note.setter
    def note(self, text: str) -> None:
        write_note(self.path, text)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the run, which can be replaced: ``run.tags = ["baseline"]``."""
        return read_note(self.path).tags

    @tags.setter
    def tags(self, tags: Iterable[str]) -> None:
        write_note(self.path, add=(new := tuple(tags)), remove=set(self.tags) - set(new))

    @property
    def model(self) -> str:
        """The run's path as a value for ``model=``, which then loads the best checkpoint."""
        return str(self.path)

    def frame(self, table: str = "metrics") -> Any:
        """Return a table as a pandas DataFrame: "metrics", "timings", "rollouts" or
        "evaluations". Raise a RunError if pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise RunError(
                f"Run.frame({table!r}) needs the package pandas; install it: pip install pandas, "
                f"or use Run.{table}, a list of dictionaries"
            ) from None
        return pandas.DataFrame(getattr(self, table))

    def report(self) -> Path:
        """Write report.html, in place of an earlier one, and return its path."""
        return write_report(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return the run's state, results, tags and note as HTML, for notebooks."""
        rows = [("state", self._state())]
        with suppress(RunError):  # there is no finished step yet
            rows += [("results", line) for line in outcome(self.summary)]
        rows += [("tags", ", ".join(self.tags)), ("note", self.note)]
        cells = "".join(
            f"<tr><td>{name}</td><td>{escape(text)}</td></tr>" for name, text in rows if text
        )
        link = f'<a href="{quote(os.fspath(self / "report.html"))}">{escape(str(self.path))}</a>'
        return f"<b>{link}</b><table>{cells}</table>"

    def _state(self) -> str:
        recipe, metrics = read_recipe(self.path), self.metrics
        done = max((int(row["step"]) for row in metrics), default=0)
        steps = recipe.get("train", {}).get("steps")
        return str(run_state(self.path, done, steps, now=time.time())["text"])

    def _rows(self, table: str) -> list[dict[str, Any]]:
        return list(iterate_rows(self.path / f"{table}.jsonl"))


def summarise(run: Path, *, is_over: bool | None = None) -> dict[str, Any]:
    """Return a run's first and last results, its cost, the model's answers before and after
    training, and warnings.

    ``is_over`` as in ``verdicts.read_warnings``. Raise a RunError if no step has finished.
    """
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    times = collect(iterate_rows(run / "timings.jsonl"))
    if "train/version" not in series:
        raise RunError(f"{run} has no finished step yet, so it has no summary")
    is_sampled = "rollout/responses" in series
    name = "reward" if is_sampled else "loss"
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
        summary[f"{name}_window"] = window(len(measured))
    if is_sampled:
        summary["responses"] = int(sum(count for _, count in series["rollout/responses"]))
    if held_out := _held_out(recipe, series):
        summary["validation"] = held_out
    if drift := series.get("kl/held_out_k1"):
        summary["kl_held_out_k1"] = drift[-1][1]
    summary["warnings"] = read_warnings(run, is_over=is_over)
    if (run / "summary.json").exists() and "ended_early" in (
        stored := load_json(run / "summary.json")
    ):
        summary["ended_early"] = stored["ended_early"]
    return summary | {"before_and_after": _before_and_after(run)}


def _held_out(recipe: dict[str, Any], series: Series) -> dict[str, Any] | None:
    """Return the first, last and best value of the metric that selects the best checkpoint, and the
    step of the best; None if the run has no such metric."""
    chosen, points = recipe.get("validation", {}), _target_points(recipe, series)
    if not points:
        return None
    # as in Recipe.is_lower_better
    is_loss = "rollout/responses" not in series and "metric" not in chosen
    default = "min" if is_loss or chosen.get("metric") == "validation/loss" else "max"
    better = min if chosen.get("goal", default) == "min" else max
    step, best = better(points, key=lambda point: point[1])
    found = {"first": points[0][1], "last": points[-1][1], "best": best, "best_step": int(step)}
    return found | ({"metric": chosen["metric"]} if "metric" in chosen else {})


def _target_points(recipe: dict[str, Any], series: Series) -> list[tuple[float, float]]:
    """Return the validations of the metric that selects the best checkpoint, as in
    Recipe.target_metric; an empty list if there is none."""
    if metric := recipe.get("validation", {}).get("metric"):
        return series.get(metric, [])
    name = "reward" if "rollout/responses" in series else "loss"
    return series.get(f"validation/{name}", []) if _is_rewarded(recipe) else []


def unsaved_best(run: Path) -> str | None:
    """Return a sentence if the step with the best validation has no checkpoint, so that another one
    counts as the best; None if it has one, or if the run has no validation or no checkpoint."""
    if checkpoints.latest(run) is None:
        return None
    recipe, series = read_recipe(run), collect(iterate_rows(run / "metrics.jsonl"))
    if (held_out := _held_out(recipe, series)) is None:
        return None
    chosen = checkpoints.read_info(checkpoints.find_checkpoint(run, "best"))
    value, best = dict(_target_points(recipe, series)).get(chosen.step), held_out["best"]
    if value == best:
        return None
    step = held_out["best_step"]
    when = f"at step {step}, which" if step else "before the first step, which"
    which = "the last" if value is None else f"the best that is saved ({value:z.3f})"
    return (
        f"the best validation ({best:z.3f}) was {when} has no checkpoint; {chosen.name} is {which}"
    )


def _is_rewarded(recipe: dict[str, Any]) -> bool:
    """Return whether a recipe has a reward, so that the held-out reward is meaningful. A run that
    only distils a teacher has none."""
    task = recipe.get("task", {})
    rewards = [one.get("reward") for one in task.get("tasks", {"": task}).values()]
    return "reward_model" in recipe or any(name != "none" for name in rewards)


def _before_and_after(run: Path) -> list[dict[str, Any]]:
    """Return the first response to each of a few validation prompts, in the first and in the last
    evaluation, with their rewards."""
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
    """Format ``end``, the result of `summarise`, in one to three lines: reward or loss, over a
    window of steps that grows with the run, with the cost of the run; the held-out reward or loss
    if it was measured; and why the run ended early if it did."""
    measure = "reward" if "responses" in end else "loss"
    sampled = f"{counted(end['responses'], 'response')}, " if "responses" in end else ""
    first, last = (end.get(f"{measure}_{which}") for which in ("first", "last"))
    moved = "no response was graded" if first is None else f"{measure} {first:z.2f} → {last:z.2f}"
    size = end.get(f"{measure}_window", 1)
    moved += f" (means of the first and the last {size} steps)" * (size > 1)
    taken = counted(end["gradient_steps"], "gradient step")
    lines = [f"{moved}, {sampled}{taken}, {end['seconds']['step']:.1f} s"]
    if "validation" in end:
        held, kl = end["validation"], end.get("kl_held_out_k1")
        drift = "" if kl is None else f" at {kl:z.2f} nats per token"
        best = f"best {held['best']:z.3f} at step {held['best_step']}"
        name = f" {held['metric']}" if "metric" in held else ""
        lines.append(f"held out{name} {held['first']:z.3f} → {held['last']:z.3f}{drift} ({best})")
    if "ended_early" in end:
        lines.append(f"ended early: {end['ended_early']}")
    return lines


def answers(end: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the prompts of ``end``, the result of `summarise`, and the model's answers
    before and after training. Control characters are escaped."""
    for pair in end["before_and_after"]:
        yield f"  {_line(pair['prompt'])}"
        for side in ("before", "after"):
            reward, text = pair[f"reward_{side}"], _line(pair[side])
            mark = "no grade" if reward is None else f"{reward:zg}"
            yield f"    {side:6} [{mark}] {text[:LENGTH]}{' …' * (len(text) > LENGTH)}"


def _line(text: str) -> str:
    return printable(text).replace("\n", "⏎")
