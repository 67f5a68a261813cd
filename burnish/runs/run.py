"""A run as a script or a notebook meets it: its directory, read when something is asked of it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import burnish
from burnish import config, schema
from burnish.errors import BurnishError, RunError
from burnish.runs import checkpoints, directory, summary
from burnish.runs.checkpoints import Saved
from burnish.runs.metrics import iterate_rows
from burnish.runs.report import write_report

if TYPE_CHECKING:
    from burnish.api import Answer
    from burnish.runs.results import Evaluation


class Run:
    """A run's directory. Attributes read its files afresh, also while the run is still going on.

    A run is a path (``Path(run)``, ``run / "log.txt"``), and it is a model: pass it as ``model=``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        directory.read_recipe(self.path)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def recipe(self) -> schema.Recipe:
        """The recipe as it ran, every setting resolved."""
        return config.load(self.path / "recipe.toml")

    @property
    def summary(self) -> dict[str, Any]:
        """Where the run began and where it ended, or has come to so far."""
        if (self.path / "summary.json").is_file():
            return directory.read_json(self.path / "summary.json")
        if not any("train/version" in row for row in self.metrics):
            raise RunError(f"{self.path} has no step yet, so there is nothing to sum up")
        return summary.summarise(self.path)

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
    def best(self) -> Saved | None:
        """The checkpoint of the best score, or the last if none has one; None if there is none."""
        path = checkpoints.best(self.path) or checkpoints.latest(self.path)
        return None if path is None else checkpoints.describe(path)

    @property
    def model(self) -> str:
        """The name of the model that the run learned: its best checkpoint is meant."""
        return str(self.path)

    def frame(self, table: str = "metrics") -> Any:
        """The rows of metrics, timings, rollouts or evaluations as a pandas DataFrame."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise BurnishError(
                "a DataFrame needs pandas; install it with: pip install pandas (or use "
                f"run.{table}, the same rows as a list of dicts)"
            ) from None
        return pandas.DataFrame(getattr(self, table))

    def report(self) -> Path:
        """Writes report.html and returns its path."""
        return write_report(self.path)

    # The public functions, on this run. burnish hands them out; runs/ does not know them.

    def export(self, out: str | os.PathLike[str], *, which: str = "best") -> Path:
        """Writes the model as a Hugging Face directory; see ``burnish.export``."""
        return burnish.export(self.path, out, which=which)

    def generate(self, prompts: str | list[str], **sampling: Any) -> list[Answer]:
        """Samples answers from the run's model; see ``burnish.generate``."""
        return burnish.generate(prompts, model=self, **sampling)

    def evaluate(self, **settings: Any) -> Evaluation:
        """Measures the run's model on its held-out prompts; see ``burnish.evaluate``."""
        return burnish.evaluate(self, **settings)

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _rows(self, table: str) -> list[dict[str, Any]]:
        return list(iterate_rows(self.path / f"{table}.jsonl"))
