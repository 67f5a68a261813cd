"""The driver's proxy of the learner, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.actors.remote_learner import RemoteLearner
from burnish.actors.transport import WeightsHandle
from burnish.errors import ActorError


def test_a_state_of_another_step_is_no_checkpoint(tmp_path: Path) -> None:
    """A run that gave up waiting for a step must not save what the learner is after it."""
    answer = WeightsHandle(0, 0, (), str(tmp_path / "none")), None, {"version": 3}
    rollouts: Any = SimpleNamespace(call_and_wait=lambda *call: answer)
    learner = RemoteLearner(rollouts, "", "store")
    learner.version = 2
    with pytest.raises(ActorError, match="at version 3 and the run at 2"):
        learner.state()
