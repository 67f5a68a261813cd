"""Writing safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], file: Path, about: Mapping[str, str]) -> None:
    """Write a safetensors file with the metadata ``about``; replace a file of that name. The file
    gets the mode that the umask leaves, as other new files do."""
    from safetensors.torch import save_file

    file.unlink(missing_ok=True)
    file.touch()
    mode = S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file, dict(about))  # only its owner can read a file that this writes
    file.chmod(mode)
