"""Makes the helpers of these tests, and the model families of the model's tests, importable."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

# Tiny models: a second thread only waits, and waits long when the machine is busy.
torch.set_num_threads(1)
