"""Settings from which an engine is built.

`burnish/launch/engines.py` derives them from a recipe. They travel as JSON to an engine in another
process, so this module imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of the precisions."""
STEP_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Default number of tokens that the native engine computes per step, by device type."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine. An engine reads only the settings that concern it."""

    name: str = "native"
    """A key of `burnish.engine.build.MAKERS`."""
    model: str | None = None
    """Model directory in Hugging Face's layout; None if the model is already in memory."""
    precision: str = "fp32"
    """A key of `DTYPES`."""
    device: str = "cpu"
    """PyTorch's name of the device, such as cpu or cuda:1."""
    threads: int = 1
    """Number of CPU threads of PyTorch."""
    kv_bytes: int = 1 << 30
    """Size of the cache of keys and values. Samples that do not fit wait, or are recomputed
    later."""
    page_size: int = 16
    """Tokens per page of the native engine's cache, a multiple of 4."""
    max_running: int = 128
    """Maximum number of samples that decode at the same time."""
    step_tokens: int | None = None
    """Maximum number of tokens per step; longer prompts are computed in chunks. None selects the
    device's default."""
    on_update: Literal["keep", "recompute"] = "recompute"
    """Whether samples in flight keep or recompute their cache when new weights are loaded."""
    fp32_head: bool = False
    """Whether logits are computed in float32, whatever the precision."""
    sleep: bool = False
    """Whether the engine must be able to release its GPU memory between rollouts."""

    @property
    def directory(self) -> Path:
        """Path of the model directory, which must be set."""
        assert self.model is not None, f"the engine {self.name} needs a model directory"
        return Path(self.model)

    @property
    def dtype(self) -> str:
        """torch's name of the precision, such as bfloat16."""
        return DTYPES[self.precision]

    @property
    def step_limit(self) -> int:
        """Maximum number of tokens per step: `step_tokens`, or the device's default."""
        return self.step_tokens or STEP_TOKENS[self.device.partition(":")[0]]
