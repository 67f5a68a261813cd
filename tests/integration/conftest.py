"""Makes the tiny models of the engine's tests and the rollouts of the learner's tests available."""

import sys
from pathlib import Path

from tests.learner.conftest import batch, one_thread  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
