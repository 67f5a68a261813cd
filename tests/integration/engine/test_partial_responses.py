"""A response that has begun goes on as if it had never been interrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from burnish.engine.protocol import Request
from burnish.errors import EngineError
from burnish.types import Completion

STREAMS = ("token_ids", "logprobs", "versions", "sampled")


def begun(completion: Completion, tokens: int) -> Completion:
    kept = {name: getattr(completion, name)[:tokens] for name in STREAMS}
    return replace(completion, **kept)


def go_on(request: Request, whole: Completion, tokens: int) -> Request:
    """The request of one sample from its first tokens on, with the draws that it had."""
    sample = whole.sample_index
    return replace(request, n=1, first=sample, begun=begun(whole, tokens))


@pytest.mark.parametrize("tokens", [1, 7, 11])
def test_it_ends_as_the_whole_response_did(tokens: int) -> None:
    """A text of bytes stops in the middle of stop strings, too."""
    asked = tiny.request("r", 9, n=3, group=4, min_tokens=6)
    whole = tiny.finish(tiny.engine(text=True), [asked])
    text = whole["r", 0].text  # the first sample's own text has its stop at bytes 6 to 8
    asked = replace(asked, params=replace(asked.params, stop=(text[6:9],)))
    whole = tiny.finish(tiny.engine(text=True), [asked])
    assert whole["r", 0].stop == text[6:9]
    for sample in range(3):
        one = whole["r", sample]
        if tokens < len(one.token_ids):
            got = tiny.finish(tiny.engine(text=True), [go_on(asked, one, tokens)])
            tiny.assert_same({("r", 0): one}, got)


def test_marks_of_the_beginning_are_kept() -> None:
    asked = tiny.request("r", 9, n=1)
    whole = tiny.finish(tiny.engine(), [asked])["r", 0]
    flags = np.arange(12) != 2
    part = begun(replace(whole, sampled=flags, versions=whole.versions - 1), 5)
    (got,) = tiny.finish(tiny.engine(), [replace(asked, begun=part)]).values()
    assert got.sampled.tolist() == flags.tolist()
    assert got.versions.tolist() == [-1] * 5 + [0] * 7


def test_a_prefix_is_computed_once_and_shared_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three samples each from tokens 8 and 16 of one response to a prompt of 12, pages of 4."""
    asked = tiny.request("r", 12, n=1, max_tokens=20)
    engine = tiny.engine()
    whole = tiny.finish(engine, [asked])["r", 0]
    ran: list[int] = []
    hidden = engine._backend.hidden

    def counting(runs: Any) -> torch.Tensor:
        ran.append(sum(run.count for run in runs))
        return hidden(runs)

    monkeypatch.setattr(engine._backend, "hidden", counting)
    monkeypatch.setattr(engine._backend, "sample_ahead", None)
    early, late = (
        replace(asked, request_id=str(t), n=3, first=3 * t, begun=begun(whole, t)) for t in (8, 16)
    )
    tiny.finish(engine, [early])
    # Prompt and prefix once; their last token again for two that join; 12 tokens each, of which
    # the last is not read.
    assert sum(ran) == 20 + 2 + 3 * 11
    ran.clear()
    tiny.finish(engine, [late])
    assert sum(ran) == 28 + 2 + 3 * 3
    ran.clear()
    tiny.finish(engine, [early, late])
    # Together, the later prefix takes the 4 full pages before the earlier one's last token.
    assert sum(ran) == 20 + 2 + 33 + (28 - 16) + 2 + 9


def test_a_beginning_without_room_is_refused() -> None:
    asked = tiny.request("r", 9, n=1)
    whole = tiny.finish(tiny.engine(), [asked])["r", 0]
    with pytest.raises(EngineError, match=r"fewer than max_tokens = 12, got 12"):
        tiny.engine().submit(replace(asked, begun=whole))
