"""Checkpoints: tensors and counters from which a killed run goes on, bit for bit.

    checkpoints/step-00000040/tensors.safetensors   model and optimizer
                              state.json            step, score, whether the recipe's cadence asked
                                                    for it, counters, positions in files and streams
                              manifest.json         the SHA-256 of both files

A checkpoint is whole or absent: it is written under a hidden name, flushed and renamed, and it is
renamed before it is deleted. Only the process that holds the run's lock writes; pickles are never
read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import RunError
from burnish.runs.directory import fsync

if TYPE_CHECKING:
    from torch import Tensor

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


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
    about = {"step": step, "score": finite, "planned": planned, "state": state}
    text = json.dumps(about, indent=1)
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        save_file({name: _alone(tensor) for name, tensor in tensors.items()}, temporary / TENSORS)
        (temporary / STATE).write_text(text, encoding="utf-8")
        (temporary / MANIFEST).write_text(json.dumps(_hashes(temporary)), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        os.rename(temporary, final)
        fsync(folder)
        fsync(run)
    except (OSError, SafetensorError) as error:
        before = latest(run)
        intact = "there is no earlier one" if before is None else f"{before} is intact"
        raise RunError(
            f"can't save a checkpoint of step {step} in {folder}: {error}; {intact}; "
            "make room there and continue with `burnish resume`"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
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
    """A checkpoint by its state; if that is damaged, loading the checkpoint says so."""
    try:
        about = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}
    return Saved(path.name, _step(path), about.get("score"), path, about.get("planned", True))


def load(path: Path) -> Checkpoint:
    """A checkpoint whose every byte is as it was written."""
    from safetensors.torch import load_file

    try:
        written = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found = _hashes(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if found != written:
        raise _damaged(path, f"its files differ from their SHA-256 in {MANIFEST}")
    about = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Checkpoint(about["step"], load_file(path / TENSORS), about["state"], about["score"])


def return_to(run: Path, path: Path, *, keep: int = 2) -> None:
    """Deletes the checkpoints that were saved after ``path``, and those that a killed process had
    no time to delete."""
    for later in all_of(run):
        if _step(later) > _step(path):
            _delete(later)
    _prune(run, keep)
    _sweep(run / "checkpoints")


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own, as safetensors wants it; a view is copied."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _hashes(folder: Path) -> dict[str, str]:
    found = {}
    for name in (TENSORS, STATE):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


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
    for saved in every:
        if saved.path not in kept:
            _delete(saved.path)


def _delete(path: Path) -> None:
    dead = path.with_name(f".{path.name}.dead")
    os.rename(path, dead)
    shutil.rmtree(dead, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes checkpoints that a killed process left half written or half deleted."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)
