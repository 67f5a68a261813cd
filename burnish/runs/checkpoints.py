"""Checkpoints: tensors and counters from which a killed run goes on, bit for bit.

checkpoints/step-00000040 is one safetensors file. Its tensors are the model and the optimizer; its
metadata are "about" (as JSON: the step, its score, whether the recipe's cadence asked for it,
counters, and positions in files and streams) and "sha256", of all of that.

A checkpoint is whole or absent: it is written under a hidden name, flushed and renamed. Only the
process that holds the run's lock writes; pickles are never read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import RunError
from burnish.runs.directory import fsync

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(NamedTuple):
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    score: float | None
    """The validation figure that it was saved with; None if that step was not validated."""


class Saved(NamedTuple):
    """A checkpoint on the disk, not loaded."""

    name: str
    step: int
    score: float | None
    """Reward on held-out prompts, or minus the loss; None if it was not measured at that step."""
    path: Path
    planned: bool = True
    """Whether the recipe's cadence asked for it, and not a stop or a halt."""


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    score: float | None = None,
    keep: int = 2,
    planned: bool = True,
) -> Path:
    """Writes a checkpoint, then deletes all but the last ``keep`` and the one of highest score.

    A checkpoint that is not ``planned``, because a stop or a halt asked for it, is deleted when the
    next one is saved: a stopped and resumed run keeps the same checkpoints as one never stopped.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = run / "checkpoints"
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.new"
    finite = None if score is None or not math.isfinite(score) else score
    about = json.dumps({"step": step, "score": finite, "planned": planned, "state": state})
    alone = {name: _alone(tensor) for name, tensor in tensors.items()}
    try:
        folder.mkdir(exist_ok=True)
        save_file(alone, temporary, {"about": about, "sha256": _digest(about, alone)})
        fsync(temporary)
        os.rename(temporary, final)
        fsync(folder)
        fsync(run)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        before = latest(run)
        intact = "there is no earlier one" if before is None else f"{before} is intact"
        raise RunError(
            f"can't save a checkpoint of step {step} in {folder}: {error}; {intact}; "
            "make room there and continue with `burnish resume`"
        ) from error
    _prune(run, keep)
    return final


def all_of(run: Path) -> list[Path]:
    """The run's checkpoints, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=_step)


def latest(run: Path) -> Path | None:
    return next(reversed(all_of(run)), None)


def best(run: Path) -> Path | None:
    """The checkpoint of highest score; the first of equals."""
    return _best(describe(path) for path in all_of(run))


def choose(run: Path, which: str) -> Path:
    """A run's checkpoint: "best" (the last if none was validated), "last", or one by its name."""
    found = {path.name: path for path in all_of(run)}
    if not found:
        raise RunError(f"{run} has no checkpoint yet; train on, or resume it")
    last = list(found.values())[-1]
    named = {**found, "last": last, "best": best(run) or last}
    if which not in named:
        raise RunError(f"{run} has no checkpoint {which!r}; it has {', '.join(found)}")
    return named[which]


def describe(path: Path) -> Saved:
    """A checkpoint by its metadata; if the file is damaged, loading it says so."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            about = json.loads(file.metadata()["about"])
    except (OSError, SafetensorError):
        about = {}
    return Saved(path.name, _step(path), about.get("score"), path, about.get("planned", True))


def load(path: Path) -> Checkpoint:
    """A checkpoint whose every byte is as it was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "torch") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if _digest(metadata["about"], tensors) != metadata["sha256"]:
        raise _damaged(path, "it was changed, for its SHA-256 is another")
    about = json.loads(metadata["about"])
    return Checkpoint(about["step"], tensors, about["state"], about["score"])


def return_to(run: Path, path: Path, *, keep: int = 2) -> None:
    """Deletes the checkpoints that were saved after ``path``, and all that a killed process had no
    time to delete or to finish."""
    for later in all_of(run):
        if _step(later) > _step(path):
            later.unlink()
    _prune(run, keep)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own, as safetensors wants it; a view is copied."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    import torch

    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> RunError:
    earlier = [other for other in all_of(path.parent.parent) if _step(other) < _step(path)]
    remedy = f"resume with --from {earlier[-1].name}" if earlier else "start the run anew"
    return RunError(f"the checkpoint {path} is damaged: {why}; put it back, or {remedy}")


def _best(found: Iterable[Saved]) -> Path | None:
    scored = [(saved.score, saved.path) for saved in found if saved.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _prune(run: Path, keep: int) -> None:
    every = [describe(path) for path in all_of(run)]
    planned = [saved for saved in every if saved.planned]
    standing = planned if every[-1].planned else [*planned, every[-1]]
    kept = {_best(planned), *(saved.path for saved in standing[-keep:])}
    unfinished = (run / "checkpoints").glob(".*")  # ours, and those of safetensors
    for path in (*unfinished, *(saved.path for saved in every)):
        if path not in kept:
            path.unlink()
