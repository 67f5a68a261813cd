from __future__ import annotations

from dataclasses import replace

import pytest

from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import require
from burnish.errors import EngineError


def test_an_engine_is_refused_for_what_it_does_not_give() -> None:
    own = NativeEngine.capabilities
    require(own, repeats=True)
    drawn = replace(own, counter_draws=False)
    require(drawn, repeats=False)
    with pytest.raises(EngineError, match="must provide reproducible draws"):
        require(drawn, repeats=True)
    lacking = replace(own, model_logprobs=False, token_versions=False)
    with pytest.raises(EngineError, match=r"log-probabilities .* and the version of every token"):
        require(lacking, repeats=False)
