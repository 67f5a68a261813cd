"""Checkpoints: tensors and counters from which a killed run goes on, bit for bit.

    checkpoints/step-00000040/tensors.safetensors   model and optimizer
                              state.json            counters, positions in files and streams
                              manifest.json         step, score, whether the recipe's cadence
                                                    asked for it, size and SHA-256 of both files

A checkpoint is whole or absent: it is written under a hidden name, flushed and renamed, and it is
renamed before it is deleted. A step that is saved again gets a new name (step-00000040.1), so that
no moment is without one. Only the process that holds the run's lock writes; pickles are never read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.errors import RunError
from burnish.runs.directory import fsync_directory

if TYPE_CHECKING:
    from torch import Tensor

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class Checkpoint(NamedTuple):
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    score: float | None
    """The validation figure it was saved with."""


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
    assert step >= 0
    assert keep >= 1
    from safetensors import SafetensorError

    folder = run / "checkpoints"
    taken = [repeat for number, repeat in map(_number, all_of(run)) if number == step]
    final = folder / (f"step-{step:08d}" + (f".{max(taken) + 1}" if taken else ""))
    temporary = folder / f".{final.name}.new"
    text = json.dumps(state, indent=1)
    try:
        folder.mkdir(exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        _save_tensors(tensors, temporary / TENSORS)
        (temporary / STATE).write_text(text, encoding="utf-8")
        files = {name: _fingerprint(temporary / name) for name in (TENSORS, STATE)}
        finite = None if score is None or not math.isfinite(score) else score
        manifest = {"step": step, "score": finite, "planned": planned, "files": files}
        (temporary / MANIFEST).write_text(_seal(manifest), encoding="utf-8")
        for file in temporary.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        fsync_directory(temporary)
        os.rename(temporary, final)
        fsync_directory(folder)
        fsync_directory(run)
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
    found = (run / "checkpoints").glob("step-*")
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_number)


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
    """A checkpoint by its manifest; if that is damaged, loading the checkpoint says so."""
    try:
        manifest = _read_manifest(path)
    except RunError:
        manifest = {}
    score, planned = manifest.get("score"), manifest.get("planned", True)
    return Saved(path.name, _number(path)[0], score, path, planned)


def load(path: Path) -> Checkpoint:
    """A checkpoint whose every byte is as it was written."""
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        if not (path / name).is_file():
            raise _damaged(path, name, "is missing")
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            raise _damaged(path, name, f"holds {size:,} bytes of {expected['bytes']:,}")
        if _fingerprint(path / name) != expected:
            raise _damaged(path, name, "was changed: its SHA-256 differs from the manifest's")
    from safetensors.torch import load_file

    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Checkpoint(manifest["step"], load_file(path / TENSORS), state, manifest["score"])


def return_to(run: Path, path: Path, *, keep: int = 2) -> None:
    """Deletes the checkpoints that were saved after ``path``, and those that a killed process had
    no time to delete."""
    for later in all_of(run):
        if _number(later) > _number(path):
            _delete(later)
    _prune(run, keep)
    _sweep(run / "checkpoints")


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Views of larger storages are copied: safetensors wants each tensor on its own."""
    from safetensors.torch import save_file

    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        whole[name] = plain
    save_file(whole, file)


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _seal(manifest: Mapping[str, Any]) -> str:
    """The manifest as text, with the SHA-256 of itself."""
    body = json.dumps(manifest)
    return json.dumps({"manifest": manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()})


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest: dict[str, Any] = json.loads(text)["manifest"]
    except FileNotFoundError:
        raise _damaged(path, MANIFEST, "is missing") from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(path, MANIFEST, "can't be read") from None
    if _seal(manifest) != text:
        raise _damaged(path, MANIFEST, "was changed")
    return manifest


def _damaged(path: Path, name: str, what: str) -> RunError:
    earlier = [other for other in all_of(path.parent.parent) if _number(other) < _number(path)]
    remedy = f"resume with --from {earlier[-1].name}" if earlier else "start the run anew"
    before = "the checkpoint before it" if earlier else "there is none before it"
    return RunError(f"{path / name} {what}; put it back, or {remedy} ({before})")


def _best(found: Iterable[Saved]) -> Path | None:
    scored = [(saved.score, saved.path) for saved in found if saved.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def _number(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _prune(run: Path, keep: int) -> None:
    every = all_of(run)
    newest_of_step = {_number(path)[0]: path for path in every}
    planned = [saved for saved in map(describe, newest_of_step.values()) if saved.planned]
    standing = list(dict.fromkeys([*(saved.path for saved in planned), every[-1]]))
    kept = {*standing[-keep:], _best(planned)}
    for path in every:
        if path not in kept:
            _delete(path)


def _delete(path: Path) -> None:
    dead = path.with_name(f".{path.name}.dead")
    os.rename(path, dead)
    shutil.rmtree(dead, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes checkpoints that a killed process left half written or half deleted."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)
