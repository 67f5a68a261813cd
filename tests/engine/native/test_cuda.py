"""What a recorded decoding step reads is what the scheduler planned, and several of them in a row
sample what one at a time would.

On a CPU the recorded graph is stood in for (see `replay`); on a GPU (BURNISH_TEST_DEVICE=cuda) it
is the graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from replay import ahead, one_by_one
from torch import Tensor

from burnish.engine.native import cuda, decoding, sampler
from burnish.engine.native import engine as engines
from burnish.engine.native.decoding import AHEAD
from burnish.engine.native.engine import AHEAD_OF_OTHERS, NativeEngine
from burnish.engine.native.sampler import Limited
from burnish.engine.native.sequence import GREEDY, Prefix, RequestGroup, Sequence
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.types import Completion, Finish, SamplingParams


def sample(tokens: list[int], computed: int, pages: list[int]) -> Sequence:
    group = RequestGroup(Request("r", np.array(tokens, np.int32), 1, SamplingParams()))
    found = group.sequences[0]
    found.computed, found.pages = computed, pages
    return found


def test_the_state_says_where_each_row_reads_and_writes() -> None:
    samples = [sample([5, 6, 7, 8, 9, 10], 5, [3, 1]), sample([11], 0, [7])]
    integers, floats, shares = decoding.state_of(samples, 8, size=4)
    buffers = decoding.Buffers(8, 4, torch.device("cpu"))
    buffers.write(integers, floats)
    rows = buffers.rows(8)
    limit = samples[0].group.limit
    fields = torch.stack(rows[: len(decoding.EMPTY)])
    assert fields[:, 0].tolist() == [10, 5, 1 * 4 + 1, 0, 6, 0, 0, limit, 0, 0]
    assert fields[:, 1].tolist() == [11, 0, 7 * 4, 2, 1, 0, 0, limit, 0, 0]
    assert all(tuple(row) == decoding.EMPTY for row in fields[:, 2:].T.tolist())
    assert rows.pages[:3].tolist() == [3, 1, 7]
    assert not shares
    want, *_ = sampler.draws(samples, decoding.AHEAD, "cpu")
    assert torch.equal(rows.points[:2], want)


def test_rows_of_a_request_share_its_prompt() -> None:
    request = Request("r", np.arange(9, dtype=np.int32), 11, SamplingParams())
    samples = RequestGroup(request).sequences
    prefix = Prefix([4, 2])
    for own, found in enumerate(samples):
        found.computed, found.pages, found.prefix = 8, [4, 2, 20 + own], prefix
    alone = sample([1, 2, 3], 2, [9])
    first = 3 * np.arange(12)
    items, owns = decoding.shared_items([*samples[:4], alone, *samples[4:]], first, size=4)
    assert items == [[0, 8, 0, 1, 2, 3, 5, 6, 7, 8], [0, 8, 9, 10, 11, *[-1] * 5]]
    assert owns == [8, 8, 8, 8, 0, *[8] * 7]


@pytest.mark.parametrize(
    ("rows", "want"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64), (65, 128), (129, 192), (257, 384), (1000, 1024)],
)
def test_rows_are_rounded_up(rows: int, want: int) -> None:
    assert cuda.padded(rows) == want


MOST = 32
"""Largest number of tokens of a response."""


def requests(**params: Any) -> list[Request]:
    given = [("a", 3, 2), ("b", 41, 3), ("c", 9, 1), ("d", 16, 4), ("e", 1, 2)]
    return [
        tiny.request(name, length, n, group=i, max_tokens=MOST - 12 + 3 * i, **params)
        for i, (name, length, n) in enumerate(given)
    ]


Done = dict[tuple[str, int], Completion]


@cache
def plainly(text: bool, **params: Any) -> Done:
    """The responses to `requests`, sampled one token at a time; settings change nothing."""
    return tiny.finish(one_by_one(text=text), requests(**params))


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        ({}, {}),
        ({"temperature": 0.6}, {}),
        ({"temperature": 0.0}, {}),
        ({"stop_ids": tuple(range(0, 256, 9))}, {}),
        ({"stop": ("a", "the", "\n", "1", "x")}, {"text": True}),
        ({"min_tokens": 5, "stop_ids": tuple(range(0, 256, 9))}, {}),
        ({}, {"max_running": 5}),
        ({}, {"tokens": 120, "max_running": 6}),
        ({}, {"step_tokens": 7}),
    ],
)
def test_tokens_sampled_ahead_are_those_sampled_one_by_one(params: Any, settings: Any) -> None:
    given = requests(**params)
    engine, steps = ahead(**settings)
    done = tiny.finish(engine, given)
    tiny.assert_same(plainly("text" in settings, **params), done)
    assert AHEAD_OF_OTHERS <= max(steps) <= AHEAD
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    for key, one in done.items():
        assert len(one.versions) == len(one.token_ids) == len(one.logprobs), key


def test_nothing_is_sampled_inside_a_prompt_that_gets_one_token_of_a_step() -> None:
    settings = {"step_tokens": 4}
    given = [tiny.request(name, 1, max_tokens=30, group=i) for i, name in enumerate("abc")]
    given.append(tiny.request("d", 21, group=3))
    engine, steps = ahead(**settings)
    done = tiny.finish(engine, given)
    tiny.assert_same(tiny.finish(one_by_one(**settings), given), done)
    assert AHEAD_OF_OTHERS < max(steps) <= AHEAD


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 20, "stop_ids": tuple(range(decoding.ENDS + 1))},
        {"max_tokens": 1},
        {"min_p": 0.05},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
    ],
)
def test_what_has_to_be_read_on_the_way_is_sampled_one_by_one(params: dict[str, Any]) -> None:
    engine, steps = ahead()
    one = tiny.request("a", n=3, **{"max_tokens": 20} | params)
    tiny.assert_same(tiny.finish(one_by_one(), [one]), tiny.finish(engine, [one]))
    assert steps == []


def test_greedy_and_sampled_and_held_rows_run_ahead_together() -> None:
    engine, steps = ahead()
    held = {"min_tokens": 17, "stop_ids": (3, 7, 11, 101, 102)}
    given = [
        *requests()[:1],
        *requests(temperature=0.0)[1:2],
        *requests(temperature=0.7, **held)[2:4],
        *requests(temperature=0.0, **held)[4:],
    ]
    tiny.assert_same(tiny.finish(one_by_one(), given), tiny.finish(engine, given))
    assert sum(steps) > 20


@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="a GPU looks without this list")
def test_steps_end_when_all_rows_have_ended() -> None:
    engine, steps = ahead()
    one = tiny.request("a", n=3, max_tokens=60, stop_ids=tuple(range(0, 256, 36)))
    done = tiny.finish(engine, [one])
    tiny.assert_same(tiny.finish(one_by_one(), [one]), done)
    longest = max(len(found.token_ids) for found in done.values())
    looks = engine._backend.looks
    assert not looks[-1]
    assert cuda.LOOK * len(looks) <= longest + 2 * cuda.LOOK * len(steps)


def test_new_weights_between_two_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AHEAD", 4)
    given, other = requests(), tiny.weights(tiny.model(1), 1)
    engine, _ = ahead()
    done = tiny.finish(
        engine, given, between=lambda step: engine.load(other) if step == 2 else None
    )
    for one in given:
        for i in range(one.n):
            got = done[one.request_id, i]
            first = int((got.versions == 0).sum())
            assert 0 < first < len(got.versions)
            for version, part in ((0, slice(None, first)), (1, slice(first, None))):
                args = tiny.model(version), one.prompt, got.token_ids, 1.0
                oracle = tiny.learner_logprobs(*args)
                np.testing.assert_allclose(got.logprobs[part], oracle[part], atol=tiny.CLOSE)


@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="a graph computes the logits")
def test_a_sample_whose_logits_overflow_is_lost_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = requests()
    engine, steps = ahead()
    real, calls = engine._backend.logits, []

    def overflows(hidden: Tensor) -> Tensor:
        logits = real(hidden).clone()
        calls.append(len(logits))
        if steps and len(calls) % 3 == 0:
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(engine._backend, "logits", overflows)
    done, plain = tiny.finish(engine, given), plainly(False)
    lost = [key for key, one in done.items() if one.finish is Finish.ABORT]
    assert lost
    for key, one in plain.items():
        length = len(done[key].token_ids)
        assert done[key].token_ids.tolist() == one.token_ids[:length].tolist()
        assert key in lost or length == len(one.token_ids)


def test_greedy_rows_alone_equal_greedy_rows_among_others() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0)) * 3
    points, heat = torch.full((40,), 0.5, dtype=torch.float64), torch.ones(40)
    alone = sampler.sample_tokens(logits, points, heat, Limited({GREEDY: range(40)}, {}))
    others = sampler.sample_tokens(logits, points, heat, Limited({GREEDY: range(30)}, {}))
    for a, b in zip(alone, others, strict=True):
        assert torch.equal(a[:30], b[:30])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_recorded_decoding_ahead_equals_the_learners_forward(temperature: float) -> None:
    own = tiny.model(d_model=64).cuda()  # heads that the kernels can read
    settings = EngineSettings(kv_bytes=1 << 22, page_size=4)
    engine = NativeEngine(own, None, settings)
    assert engine._backend.sample_ahead is not None
    given = requests(temperature=temperature)
    for (name, _), done in tiny.finish(engine, given).items():
        one = next(r for r in given if r.request_id == name)
        oracle = tiny.learner_logprobs(own, one.prompt, done.token_ids, temperature)
        np.testing.assert_allclose(done.logprobs, oracle, atol=1e-4)


def any_request(random: np.random.Generator, name: str, number: int) -> Request:
    """A request with random limits."""
    params: dict[str, Any] = {"max_tokens": int(random.integers(1, 40))}
    if random.random() < 0.4:
        params["stop_ids"] = tuple(random.integers(0, 256, 12).tolist()[: random.integers(1, 13)])
    if random.random() < 0.3:
        params["stop"] = ("a", "1", "\n", "th")
    if random.random() < 0.3:
        params["min_tokens"] = int(random.integers(0, params["max_tokens"] + 1))
    if random.random() < 0.3 and params["max_tokens"] > 12:
        params |= {"think_tokens": 6, "think_end": "</t>", "think_phrase": "</t>"}
    params["temperature"] = float(random.choice([0.0, 0.7, 1.0]))
    length, samples = int(random.integers(1, 45)), int(random.integers(1, 5))
    asked = tiny.request(name, length, samples, group=number, **params)
    return replace(asked, continues=random.random() < 0.3)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_happens_between_blocks_changes_a_token(seed: int) -> None:
    """Random requests, some submitted, aborted or met by new weights (of equal values) later, with
    few pages and rows: a sample's tokens are those that it has alone, one at a time."""
    random = np.random.default_rng(seed)
    settings: dict[str, Any] = {
        "text": True,
        "on_update": str(random.choice(["keep", "recompute"])),
        "max_running": int(random.choice([3, 6, 128])),
        "tokens": int(random.choice([140, 400, 4096])),
    }
    engine, steps = ahead(**settings)
    given = [any_request(random, f"r{i}", i) for i in range(8)]
    later, aborted = list(given[4:]), set[str]()
    done: Done = {}
    for one in given[:4]:
        engine.submit(one)
    while engine.unfinished or later:
        for found in engine.step():
            key = found.request_id, found.sample_index
            assert key not in done
            done[key] = found
        if later and random.random() < 0.5:
            engine.submit(later.pop())
        if random.random() < 0.2:
            engine.load(tiny.weights(tiny.model(), engine.version + 1))
        if random.random() < 0.05:
            name = str(random.choice([one.request_id for one in given]))
            aborted.add(name)
            engine.abort(name)
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    assert max(steps, default=2) > 1
    plain = one_by_one(text=True)
    want = tiny.finish(plain, [replace(one, continues=False) for one in given])
    assert done.keys() == want.keys()
    for key, found in done.items():
        length = len(found.token_ids)
        assert found.token_ids.tolist() == want[key].token_ids[:length].tolist(), key
        assert sorted(found.versions) == found.versions.tolist()
        if found.finish is Finish.ABORT:
            assert key[0] in aborted
        else:
            ended = found.finish, found.stop, found.text
            assert ended == (want[key].finish, want[key].stop, want[key].text)
            np.testing.assert_allclose(found.logprobs, want[key].logprobs, atol=2 * tiny.CLOSE)


@pytest.mark.parametrize("make", [lambda: ahead()[0], one_by_one, tiny.engine])
def test_an_overflow_leaves_pages_that_are_kept_for_another_episode(make: Any) -> None:
    engine = make()
    first = replace(tiny.request("x", 17, max_tokens=3), continues=True)
    second = replace(tiny.request("y", 17, max_tokens=75), first=1, continues=True)
    real, overflows = engine._backend.logits, False

    def logits(hidden: Tensor) -> Tensor:
        found = real(hidden).clone()
        return found.fill_(torch.nan) if overflows else found

    engine._backend.logits = logits
    engine.submit(first)
    engine.submit(second)
    done: dict[str, Completion] = {}
    while "x" not in done:
        done |= {one.request_id: one for one in engine.step()}
    overflows = True
    while "y" not in done:
        done |= {one.request_id: one for one in engine.step()}
    overflows = False
    assert done["y"].finish is Finish.ABORT
    after = {"begun": done["x"], "turn": 3, "params": replace(first.params, max_tokens=15)}
    turn = replace(first, request_id="x2", **after)
    want = tiny.finish(one_by_one(), [replace(turn, continues=False)])
    tiny.assert_same(want, tiny.finish(engine, [turn]))


def test_samples_that_decode_advance_while_prompts_keep_coming() -> None:
    engine, _ = ahead()
    engine.submit(tiny.request("long", 9, max_tokens=20))
    done = set[str]()
    for number in range(1, 2000):
        engine.submit(tiny.request(f"{number}", 9, max_tokens=1, group=number, seed=number))
        done |= {one.request_id for one in engine.step()}
        if "long" in done:
            break
    assert "long" in done
    assert number > 20  # prompts came first meanwhile


@pytest.mark.parametrize("make", [lambda: ahead()[0], one_by_one])
@pytest.mark.parametrize("call", range(1, 30, 4))
def test_samples_go_on_after_a_callback_that_raised(make: Any, call: int) -> None:
    given = [tiny.request(f"r{i}", 9 + i, 2, group=i, max_tokens=30) for i in range(3)]
    engine, calls = make(), []

    def on_tokens(*given: Any) -> None:
        calls.append(given)
        if len(calls) == call:
            raise ValueError("once")

    engine.on_tokens = on_tokens
    for one in given:
        engine.submit(one)
    done: Done = {}
    for _ in range(200):
        try:
            done |= {(one.request_id, one.sample_index): one for one in engine.step()}
        except ValueError:
            assert len(calls) == call
    assert not engine.unfinished
    tiny.assert_same(tiny.finish(one_by_one(), given), done)


def test_samples_decode_ahead_while_others_wait_for_pages() -> None:
    engine, steps = ahead(tokens=200)
    given = [tiny.request(f"r{i}", 9, 4, group=i, max_tokens=30) for i in range(8)]
    done = tiny.finish(engine, given)
    tiny.assert_same(tiny.finish(one_by_one(tokens=200), given), done)
    assert sum(steps) > 60
    assert max(steps) <= AHEAD
