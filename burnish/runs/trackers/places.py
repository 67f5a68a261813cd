"""Where each tracker stores a run, for the line that is displayed when the run begins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

OFFLINE = ("offline", "dryrun")
"""Values of WANDB_MODE with which W&B only writes local files."""


def tracker_place(tracker: str, run: Path, project: str, variables: Mapping[str, str]) -> str:
    """Return a sentence that says where a tracker stores a run, and how to display or upload it.

    ``variables`` are the environment variables, which choose servers and directories.
    """
    stored, further = PLACES[tracker](run, project, variables)
    return f"the tracker {tracker} writes to {stored}; {further}"


def _tensorboard(run: Path, project: str, variables: Mapping[str, str]) -> tuple[str, str]:
    return str(run), f"display it with: tensorboard --logdir {_quoted(run)}"


def _wandb(run: Path, project: str, variables: Mapping[str, str]) -> tuple[str, str]:
    folder = Path(variables.get("WANDB_DIR") or run / "trackers") / "wandb"
    if variables.get("WANDB_MODE") in OFFLINE:
        return f"{folder}, offline", f"upload it with: wandb sync {_quoted(folder)}/offline-run-*"
    server = _without_secrets(variables.get("WANDB_BASE_URL") or "wandb.ai")
    return f"the project {project} at {server}", f"its local files are in {folder}"


def _mlflow(run: Path, project: str, variables: Mapping[str, str]) -> tuple[str, str]:
    server = _without_secrets(variables.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")
    shown = "its page displays it"
    if server.startswith("sqlite:"):
        shown = (
            f"display it with: mlflow ui --backend-store-uri {shlex.quote(server)} (pip install "
            "mlflow)"
        )
    return f"the experiment {project} at {server}", shown


def _trackio(run: Path, project: str, variables: Mapping[str, str]) -> tuple[str, str]:
    names = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
    server = next((variables[name] for name in names if variables.get(name)), None)
    if server is not None:
        return f"the project {project} at {_without_secrets(server)}", "its page displays it"
    shown = f"display it with: trackio show --project {shlex.quote(project)}"
    return f"the project {project} in its local database", shown


PLACES = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
"""For each tracker, the function that returns where it stores a run, and what to do with it."""


def _without_secrets(address: str) -> str:
    """Return an address without a user, a password and a query, which may hold a token."""
    return re.sub(r"//[^/@]*@", "//", address).partition("?")[0]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
