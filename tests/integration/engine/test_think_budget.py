"""Forced endings: the engine puts a phrase into responses whose think budget is spent."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import replay
import tiny

from burnish.engine.native.plain import Plain
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Request
from burnish.errors import EngineError
from burnish.types import Completion, Finish

PHRASE = "</t> A:"
IDS = tiny.tokenizer().encode(PHRASE).tolist()


def request(name: str, length: int, n: int, group: int, budget: int, **params: Any) -> Request:
    think = {"think_tokens": budget, "think_end": "</t>", "think_phrase": PHRASE}
    return tiny.request(name, length, n=n, group=group, **{"max_tokens": 24, **think, **params})


MIX = [
    request("soon", 9, 3, 0, 1),
    request("pages", 16, 4, 1, 8),
    request("greedy", 8, 2, 2, 5, temperature=0.0),
    request("hot", 5, 2, 3, 13, temperature=1.7),
    request("whole", 41, 2, 4, 12, min_tokens=16),
    tiny.request("free", 7, n=2, group=5, max_tokens=24),
]


@cache
def alone() -> dict[tuple[str, int], Completion]:
    done: dict[tuple[str, int], Completion] = {}
    for one in MIX:
        done |= tiny.finish(tiny.engine(text=True), [one])
    return done


def same(done: dict[tuple[str, int], Completion]) -> None:
    tiny.assert_same(alone(), done)
    for key, completion in done.items():
        assert completion.sampled.tolist() == alone()[key].sampled.tolist()


@pytest.mark.parametrize("one", MIX[:-1], ids=lambda r: r.request_id)
def test_the_phrase_is_context_with_the_models_logprobs(one: Request) -> None:
    engine = tiny.engine(text=True)
    without = tiny.request(
        one.request_id,
        len(one.prompt),
        n=one.n,
        group=one.group,
        temperature=one.params.temperature,
        min_tokens=one.params.min_tokens,
        max_tokens=24,
    )
    budget, done = one.params.think_tokens, tiny.finish(engine, [one])
    assert budget is not None
    end = budget + len(IDS)
    drawn = 0
    for key, free in tiny.finish(tiny.engine(text=True), [without]).items():
        completion, drawn = done[key], drawn + int(done[key].sampled.sum())
        assert completion.token_ids[:budget].tolist() == free.token_ids[:budget].tolist()
        assert completion.token_ids[budget:end].tolist() == IDS
        assert not completion.sampled[budget:end].any()
        assert completion.sampled[:budget].all()
        assert completion.sampled[end:].all()
        assert len(completion.token_ids) > end
        assert PHRASE in completion.text
        temperature = one.params.temperature
        oracle = tiny.learner_logprobs(tiny.model(), one.prompt, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, oracle, atol=tiny.CLOSE)
    assert engine.sampled == drawn


@pytest.mark.parametrize(
    "settings",
    [{}, {"step_tokens": 7}, {"max_running": 3}, {"tokens": 80}],
    ids=["crowd", "chunks", "few slots", "preempted"],
)
def test_batch_schedule_and_pages_change_nothing(settings: dict[str, int]) -> None:
    engine = tiny.engine(text=True, **settings)
    same(tiny.finish(engine, MIX))
    assert (engine.scheduler.preemptions > 0) == ("tokens" in settings)


def test_the_plain_backend_equals_the_devices_own() -> None:
    engine = tiny.engine(text=True)
    engine._backend = Plain(engine._model, engine._cache)
    same(tiny.finish(engine, MIX))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_updates_in_flight_change_nothing(on_update: str) -> None:
    engine = tiny.engine(text=True, on_update=on_update)

    def update(step: int) -> None:
        engine.load(tiny.weights(tiny.model(), engine.version + 1))

    done = tiny.finish(engine, MIX, update)
    same(done)
    versions = done["pages", 0].versions
    assert versions[8] < versions[8 + len(IDS)]  # weights came while the phrase was put in


def test_sampling_ahead_stops_at_the_budget() -> None:
    """As a GPU does: several tokens of each sample before the host looks at them."""
    engine, asked = replay.ahead(text=True)
    for given in (MIX[:1], MIX[1:2], MIX):
        done = tiny.finish(engine, given)
        tiny.assert_same({key: alone()[key] for key in done}, done)
        for key, completion in done.items():
            assert completion.sampled.tolist() == alone()[key].sampled.tolist()
    assert max(asked) > 1


def spelled(text: str) -> list[int]:
    ids: list[int] = tiny.tokenizer().encode(text).tolist()
    return ids


def read(text: str, budget: int, context: int = 500, **params: Any) -> Sequence:
    """A response whose sampled tokens are the text's, one per byte."""
    one = request("a", 3, 1, 0, budget, **{"max_tokens": 100, **params})
    sequence = RequestGroup(one, tiny.tokenizer(), context).sequences[0]
    left = spelled(text)
    while sequence.finish is None and (left or sequence.forced is not None):
        token = left.pop(0) if sequence.forced is None else sequence.forced
        assert sequence.take([token], [0.0], 0) == 1
    return sequence


def test_a_response_that_ends_its_thinking_is_left_alone() -> None:
    assert read("so</t> 12", 6).text == "so</t> 12"  # the end comes with the budget's last token
    assert read("so</t> 12", 5).text == f"so</t{PHRASE}> 12"  # one token too late


def test_stop_strings_begin_in_the_phrase_and_end_in_sampled_text() -> None:
    done = read("ab 7\n", 2, stop=("A: 7",))
    assert (done.finish, done.text) == (Finish.STOP, f"ab{PHRASE} 7")
    done = read("ab 7\nA:", 2, stop=("A:",))  # the phrase's own does not count
    assert (done.stop, done.text) == ("A:", f"ab{PHRASE} 7\nA:")


def test_without_room_for_an_answer_nothing_is_put_in() -> None:
    # 3 tokens of prompt, 4 of thinking, 7 of the phrase: the answer needs a 15th.
    assert read("abcdefgh", 4, context=15).text == f"abcd{PHRASE}e"
    assert read("abcdefghijklm", 4, context=14).text == "abcdefghijk"


def test_a_bad_budget_is_refused() -> None:
    engine = tiny.engine(text=True)
    for params in ({"think_tokens": 12}, {"think_tokens": 0}, {"think_phrase": ""}):
        bad = request("a", 3, 1, 0, **{"budget": 4, "max_tokens": 12} | params)
        with pytest.raises(EngineError, match="think"):
            engine.submit(bad)
    with pytest.raises(AssertionError, match="need a tokenizer"):
        tiny.engine().submit(request("a", 3, 1, 0, 4))


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_logits_that_overflow_within_the_phrase_abort_the_sample(steps: int) -> None:
    engine = tiny.engine(text=True)
    engine.submit(request("a", 5, 1, 0, 3))
    for _ in range(steps):  # the third token is the last one before the phrase
        assert engine.step() == []
    wild = tiny.weights(tiny.model(), 1)
    name = "model.layers.0.mlp.down_proj.weight"
    wild.tensors[name] = (wild.tensors[name] * 3e38).clamp(-3e38, 3e38)
    engine.load(wild)
    done = []
    while engine.unfinished:
        done += engine.step()
    (completion,) = done
    assert completion.finish is Finish.ABORT
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
    assert np.isfinite(completion.logprobs).all()
