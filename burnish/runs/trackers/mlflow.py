"""MLflow, by its client, so that no run or experiment is active globally."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from burnish.recipe.load import flatten
from burnish.runs.trackers.tracker import Tables, TrackedRun, Values

STATES = {"finished": "FINISHED", "stopped": "KILLED"}
"""MLflow's statuses of ended runs; a run in any other state has the status FAILED."""
PARAM_LENGTH, PARAMS, METRICS = 500, 100, 1000
"""Maximum length of a parameter, and maximum number of parameters and metrics per request, that
servers of all versions accept."""
_REJECTED = re.compile(r"[^\w.\- :/]")


class MlflowTracker:
    """A run in an MLflow experiment that has the name of the project."""

    def start(self, run: TrackedRun, kept: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if kept is None:
            tags = {} if run.group is None else {"group": run.group}
            experiment = self._experiment(run.project)
            made = self._client.create_run(experiment, tags=tags, run_name=run.path.name)
            self._id = str(made.info.run_id)
        else:
            self._id = kept
            self._client.update_run(kept, status="RUNNING")
        # A parameter can't be changed: it keeps its value if a resumed run has another.
        known = self._client.get_run(self._id).data.params
        flat = flatten(run.recipe | {"environment": run.environment})
        params = [
            Param(name, _text(value)[:PARAM_LENGTH])
            for name, value in ((_REJECTED.sub("_", key), value) for key, value in flat.items())
            if name not in known
        ]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(self._id, params=params[first : first + PARAMS])
        for name in ("recipe.toml", "environment.json"):
            self._client.log_artifact(self._id, str(run.path / name))
        return self._id

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created if it does not exist."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has just created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def log(self, step: int, values: Values, tables: Tables) -> None:
        """Store the values, and each table as an artifact with the layout of ``mlflow.log_table``,
        which itself needs pandas."""
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_REJECTED.sub("_", name), float(value), now, step)
            for name, value in values.items()
        ]
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + METRICS])
        for name, rows in tables.items():
            content = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            file = f"samples/{name}/step-{step:08d}.json"
            self._client.log_text(self._id, json.dumps(content), file)

    def finish(self, state: str, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_tag(self._id, "state", state)
        self._client.set_terminated(self._id, STATES.get(state, "FAILED"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
