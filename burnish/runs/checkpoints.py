"""Checkpoints: the tensors and counters from which a killed run resumes bit for bit.

checkpoints/step-00000040 is one safetensors file. Its tensors are the model and the optimizer. Its
metadata hold the score of the step and the state as JSON: counters and positions in files and
random streams. If the learner has several ranks, the checkpoint is a directory, see
``model/shards.py``.

Saving is atomic: a checkpoint is written under a hidden name, flushed and renamed. Only the process
that holds the run's lock writes checkpoints. Pickle is never used.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import RunError
from burnish.machine.folders import fsync
from burnish.model import shards
from burnish.model.tensor_files import write_tensors

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointInfo(NamedTuple):
    """Metadata of a checkpoint on disk."""

    name: str
    step: int
    score: float | None
    """Value of the recipe's validation metric (by default the reward on held-out prompts, or the
    loss), negative if lower values are better; None if the step was not validated."""
    path: Path
    is_kept: bool = True
    """Whether later checkpoints keep it if it has the highest score: if its step was scheduled, or
    if the run had ended with it."""


def save_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    score: float | None = None,
    keep: int = 2,
    every: int = 1,
    ends: bool = False,
    write: Callable[[Path], None] | None = None,
) -> Path:
    """Save a checkpoint of the run in the directory ``run`` and return its path; then delete all
    but the last ``keep`` checkpoints and the one with the highest score.

    ``state`` is stored as JSON. ``score`` is None, or not finite, if the step has none. A
    checkpoint of a step that is not a multiple of ``every`` was saved because the run stopped or
    failed, or because it ``ends``. It is deleted when the next checkpoint is saved, so that a run
    that is interrupted and resumed keeps the checkpoints of an uninterrupted run. If the run had
    ended with it, and is extended, it is kept as long as it has the highest score. ``write`` makes
    the ranks write their shards into a directory; None if ``tensors`` is the complete checkpoint.
    If a file can't be written, raise a RunError; earlier checkpoints are intact.
    """
    from safetensors import SafetensorError

    folder = run / "checkpoints"
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.new"
    finite = None if score is None or not math.isfinite(score) else score
    about = {"score": json.dumps(finite), "state": json.dumps(state)}
    if step % every and not ends:
        about["is_kept"] = "false"
    unshared = {name: _own_storage(tensor) for name, tensor in tensors.items()}
    try:
        folder.mkdir(exist_ok=True)
        _delete(temporary)
        if write is not None:
            temporary.mkdir()
            write(temporary)
            shards.write_index(temporary)
        file = temporary if write is None else temporary / shards.MAIN
        write_tensors(unshared, file, about)
        fsync(file)
        fsync(temporary)
        os.rename(temporary, final)
        fsync(folder)
        fsync(run)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):  # the first error is more informative
            _delete(temporary)
        size, free = sum(tensor.nbytes for tensor in unshared.values()), 0
        with suppress(OSError):
            free = shutil.disk_usage(run).free
        raise RunError(
            f"can't save a checkpoint of step {step} in {folder}: {error}; it has {size:,} bytes "
            f"and {free:,} are free; earlier checkpoints are intact; free disk space and continue "
            "with `burnish resume`"
        ) from error
    _prune(run, keep, every)
    return final


def list_checkpoints(run: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of)


def latest(run: Path) -> Path | None:
    """Return the checkpoint of the last step; None if the run has no checkpoint."""
    return next(reversed(list_checkpoints(run)), None)


def best(run: Path) -> Path | None:
    """Return the checkpoint with the highest score, the earliest if several have it; None if no
    checkpoint has a score."""
    return _best(map(read_info, list_checkpoints(run)))


def find_checkpoint(run: Path, which: str) -> Path:
    """Return the path of a run's checkpoint; raise a RunError if it does not exist.

    ``which`` is "last", "best" (the last if no checkpoint has a score), or a checkpoint's name.
    """
    found = {path.name: path for path in list_checkpoints(run)}
    if not found:
        raise RunError(f"{run} has no checkpoint yet; let it train longer, or resume it")
    last = list(found.values())[-1]
    named = {**found, "last": last, "best": best(run) or last}
    if which not in named:
        raise RunError(f"{run} has no checkpoint {which!r}; it has {', '.join(found)}")
    return named[which]


def read_info(path: Path) -> CheckpointInfo:
    """Return a checkpoint's metadata. The score is None if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_main(path), "numpy") as file:
            about = file.metadata()
    except (OSError, SafetensorError):
        about = {"score": "null"}
    score, is_kept = json.loads(about["score"]), json.loads(about.get("is_kept", "true"))
    return CheckpointInfo(path.name, step_of(path), score, path, is_kept)


def load_checkpoint(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the state of a checkpoint; raise a RunError if it is
    damaged.

    The tensors of a sharded checkpoint are a mapping that reads each one on access.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_main(path), "torch") as file:
            state = json.loads(file.metadata()["state"])
            if path.is_dir():
                return shards.Shards(path), state
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            f"the checkpoint {path} is damaged: {error}; restore it, or resume from an earlier "
            "one with --from"
        ) from error


def return_to(run: Path, path: Path, *, keep: int = 2, every: int = 1) -> None:
    """Discard everything that was saved after the checkpoint ``path``, from which the run
    continues.

    Delete the checkpoints of later steps and all incomplete files. Of the others, keep the newest
    ``keep`` and the one with the highest score, as ``save_checkpoint`` does. ``every`` is the
    interval of scheduled checkpoints; one of any other step is kept only if it is the newest, or
    the best and the run had ended with it.
    """
    for later in list_checkpoints(run):
        if step_of(later) > step_of(path):
            _delete(later)
    _prune(run, keep, every)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, which its name contains."""
    return int(path.name.removeprefix("step-"))


def _own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor in its own storage, which safetensors requires; a view is copied."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _best(found: Iterable[CheckpointInfo]) -> Path | None:
    scored = [(saved.score, saved.path) for saved in found if saved.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _prune(run: Path, keep: int, every: int) -> None:
    """Delete unfinished files and all checkpoints except the one with the highest score among those
    that may be kept, the scheduled one with the highest score, and the last ``keep`` of the
    scheduled ones and the newest. There must be a checkpoint."""
    paths = list_checkpoints(run)
    planned = [path for path in paths if step_of(path) % every == 0]
    newest = planned if paths[-1] in planned else [*planned, paths[-1]]
    lasting = (saved for saved in map(read_info, paths) if saved.is_kept)
    kept = {_best(lasting), _best(map(read_info, planned)), *newest[-keep:]}
    unfinished = (run / "checkpoints").glob(".*")  # temporary files, also those of safetensors
    for path in (*unfinished, *paths):
        if path not in kept:
            _delete(path)


def _main(path: Path) -> Path:
    """Return the file that holds a checkpoint's metadata."""
    return path / shards.MAIN if path.is_dir() else path


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
