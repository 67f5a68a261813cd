"""Checkpoints: tensors and counters from which a killed run goes on, bit for bit.

checkpoints/step-00000040 is one safetensors file. Its tensors are the model and the optimizer; its
metadata are the step's score, and the state as JSON: counters and positions in files and streams.
If several ranks learn, it is a directory, see ``shards``.

A checkpoint is whole or absent: it is written under a hidden name, flushed and renamed. Only the
process that holds the run's lock writes; pickles are never read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import RunError
from burnish.runs import shards
from burnish.runs.directory import fsync

if TYPE_CHECKING:
    from torch import Tensor


class Saved(NamedTuple):
    """A checkpoint on the disk, not loaded."""

    name: str
    step: int
    score: float | None
    """Reward on held-out prompts, or minus the loss; None if it was not measured at that step."""
    path: Path


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    score: float | None = None,
    keep: int = 2,
    every: int = 1,
    write: Callable[[Path], None] | None = None,
) -> Path:
    """Writes a checkpoint, then deletes all but the last ``keep`` and the one of highest score.

    A checkpoint between the steps that ``every`` asks for, saved because the run stopped or halted,
    is deleted when the next one is saved: a stopped and resumed run keeps the same checkpoints as
    one never stopped. ``write`` has ranks write their parts into a directory; None if ``tensors``
    are all there are.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = run / "checkpoints"
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.new"
    finite = None if score is None or not math.isfinite(score) else score
    about = {"score": json.dumps(finite), "state": json.dumps(state)}
    alone = {name: _alone(tensor) for name, tensor in tensors.items()}
    try:
        folder.mkdir(exist_ok=True)
        _delete(temporary)
        if write is not None:
            temporary.mkdir()
            write(temporary)
            shards.write_index(temporary)
        file = temporary if write is None else temporary / shards.MAIN
        save_file(alone, file, about)
        fsync(file)
        fsync(temporary)
        os.rename(temporary, final)
        fsync(folder)
        fsync(run)
    except (OSError, SafetensorError) as error:
        _delete(temporary)
        raise RunError(
            f"can't save a checkpoint of step {step} in {folder}: {error}; earlier ones are "
            "intact; make room there and continue with `burnish resume`"
        ) from error
    _prune(run, keep, every)
    return final


def all_of(run: Path) -> list[Path]:
    """The run's checkpoints, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of)


def latest(run: Path) -> Path | None:
    return next(reversed(all_of(run)), None)


def best(run: Path) -> Path | None:
    """The checkpoint of highest score, the first of equals; None if none has a score."""
    return _best(map(describe, all_of(run)))


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
    """A checkpoint by its metadata; a damaged file has no score, and can't be loaded."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_main(path), "numpy") as file:
            score = json.loads(file.metadata()["score"])
    except (OSError, SafetensorError):
        score = None
    return Saved(path.name, step_of(path), score, path)


def load(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint; tensors of several ranks are read one by one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_main(path), "torch") as file:
            state = json.loads(file.metadata()["state"])
            if path.is_dir():
                return shards.Shards(path), state
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            f"the checkpoint {path} is damaged: {error}; put it back, or resume from an earlier "
            "one with --from"
        ) from error


def return_to(run: Path, path: Path, *, keep: int = 2, every: int = 1) -> None:
    """Deletes the checkpoints that were saved after ``path``, and files that a killed process had
    no time to delete or to finish."""
    for later in all_of(run):
        if step_of(later) > step_of(path):
            _delete(later)
    _prune(run, keep, every)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in a storage of its own, as safetensors wants it; a view is copied."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _best(found: Iterable[Saved]) -> Path | None:
    scored = [(saved.score, saved.path) for saved in found if saved.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _prune(run: Path, keep: int, every: int) -> None:
    paths = all_of(run)
    planned = [path for path in paths if step_of(path) % every == 0]
    newest = planned if paths[-1] in planned else [*planned, paths[-1]]
    kept = {_best(map(describe, planned)), *newest[-keep:]}
    unfinished = (run / "checkpoints").glob(".*")  # ours, and those of safetensors
    for path in (*unfinished, *paths):
        if path not in kept:
            _delete(path)


def _main(path: Path) -> Path:
    """The file of a checkpoint that has its metadata."""
    return path / shards.MAIN if path.is_dir() else path


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
