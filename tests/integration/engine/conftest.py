"""Makes the helpers of the engine's tests importable."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))

# Tiny models: a second thread only waits, and waits long when the machine is busy.
torch.set_num_threads(1)
