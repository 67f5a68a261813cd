"""The equalities: whatever batch, schedule and pages do, the numbers are the learner's."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from burnish.engine.native import cpu
from burnish.engine.native import engine as engines
from burnish.engine.native.engine import NativeEngine
from burnish.engine.native.plain import Plain
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.randomness import Stream
from burnish.runs.responses import version_ranges
from burnish.types import Completion, Finish, SamplingParams

MIX = [
    tiny.request("short", 3, n=2, group=0, max_tokens=20),
    tiny.request("long", 41, n=3, group=1, max_tokens=30),
    tiny.request("hot", 9, n=1, group=2, temperature=1.7),
    tiny.request("pages", 16, n=4, group=3, max_tokens=17),
    tiny.request("greedy", 8, n=2, group=4, temperature=0.0),
    tiny.request("one token", 1, n=2, group=5),
]


@pytest.fixture(autouse=True)
def few_steps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU draws several tokens per step, but not all of these short responses at once."""
    monkeypatch.setattr(engines, "AHEAD", 8)


@pytest.fixture(autouse=True)
def short_prompts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, prompts as short as these are otherwise read once per sample."""
    monkeypatch.setattr(cpu, "SHARED_NUMBERS", 1)


@cache
def alone(*requests: Request) -> dict[tuple[str, int], Completion]:
    done: dict[tuple[str, int], Completion] = {}
    for one in requests:
        done |= tiny.finish(tiny.engine(), [one])
    return done


@pytest.mark.parametrize("one", MIX, ids=lambda r: r.request_id)
def test_decode_equals_the_learners_forward(one: Request) -> None:
    for done in tiny.finish(tiny.engine(), [one]).values():
        oracle = tiny.learner_logprobs(
            tiny.model(), one.prompt, done.token_ids, one.params.temperature
        )
        np.testing.assert_allclose(done.logprobs, oracle, atol=tiny.CLOSE)
        assert done.logprobs.dtype == np.float32
        assert len(done.token_ids) == one.params.max_tokens
        assert done.finish is Finish.LENGTH
        assert done.sampled.all()


def test_alone_equals_in_a_crowd() -> None:
    tiny.assert_same(alone(*MIX), tiny.finish(tiny.engine(), MIX))


def test_shared_prompt_equals_repeated_prompt() -> None:
    group = tiny.request("group", 37, n=5, group=7)
    shared = tiny.finish(tiny.engine(), [group])
    engine = tiny.engine()
    # Alone, sample i of the group: the same draws, its own prompt.
    for index in range(5):
        one = Request("group", group.prompt, index + 1, group.params, 7)
        own = tiny.finish(engine, [one])
        tiny.assert_same(
            {("group", index): shared["group", index]}, {("group", index): own["group", index]}
        )


def test_a_groups_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine()
    ran: list[int] = []
    hidden = engine._backend.hidden

    def counting(runs: Any) -> torch.Tensor:
        ran.append(sum(run.count for run in runs))
        return hidden(runs)

    monkeypatch.setattr(engine._backend, "hidden", counting)
    monkeypatch.setattr(engine._backend, "sample_ahead", None)
    tiny.finish(engine, [tiny.request("group", 40, n=6, max_tokens=5)])
    # The prompt once, its last token again for the five that join, then five decoding steps less
    # the last token, which nobody reads.
    assert sum(ran) == 40 + 5 + 6 * 4


@pytest.mark.parametrize("change", ["", "pressure", "weights"])
def test_a_turn_computes_what_the_last_one_has_not(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Unless its pages were needed in the meantime, or the weights are new. The
    log-probabilities are the learner's in each case."""
    model = tiny.model()
    engine = tiny.engine(tokens=160)
    ran: list[int] = []
    hidden = engine._backend.hidden

    def counting(runs: Any) -> torch.Tensor:
        ran.append(sum(run.count for run in runs))
        return hidden(runs)

    monkeypatch.setattr(engine._backend, "hidden", counting)
    monkeypatch.setattr(engine._backend, "sample_ahead", None)
    first = replace(tiny.request("a", 20, n=2, max_tokens=13), continues=True)
    turns = tiny.finish(engine, [first])
    if change == "pressure":
        tiny.finish(engine, [tiny.request("b", 60, n=4, max_tokens=30, min_tokens=30, group=1)])
    elif change == "weights":
        model = tiny.model(seed=5)
        engine.load(tiny.weights(model, 1))
    requests, kept = [], 0
    for index in range(2):
        last = turns["a", index]
        begun = replace(
            last,
            token_ids=np.append(last.token_ids, np.int32([1, 2, 3])),
            logprobs=np.append(last.logprobs, np.zeros(3, np.float32)),
            versions=np.append(last.versions, np.zeros(3, np.int32)),
            sampled=np.append(last.sampled, np.zeros(3, np.bool_)),
        )
        kept += 20 + len(last.token_ids) - 1  # the last token was sampled, not computed
        params = replace(first.params, max_tokens=24)
        name, given = f"a/{index}", {"n": 1, "begun": begun, "first": index, "params": params}
        requests.append(replace(first, request_id=name, **given))
    ran.clear()
    found = tiny.finish(engine, requests)
    if change:  # the second one waits for the prompt of the first one
        assert ran[0] == len(requests[0].given)
    else:
        assert ran[0] == sum(len(request.given) for request in requests) - kept
    for index, request in enumerate(requests):
        completion, start = found[f"a/{index}", 0], len(request.given) - 20
        expected = tiny.learner_logprobs(model, first.prompt, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs[start:], expected[start:], atol=tiny.CLOSE)
        fresh = tiny.engine(5 if change == "weights" else 0)
        ((_, whole),) = tiny.finish(fresh, [request]).items()
        assert whole.token_ids.tolist() == completion.token_ids.tolist()


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 7, "tokens": 100}])
def test_the_plain_backend_equals_the_devices_own(settings: dict[str, int]) -> None:
    engine = tiny.engine(**settings)
    engine._backend = Plain(engine._model, engine._cache)
    tiny.assert_same(alone(*MIX), tiny.finish(engine, MIX))


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_equals_whole(chunk: int) -> None:
    tiny.assert_same(alone(*MIX), tiny.finish(tiny.engine(step_tokens=chunk), MIX))


@pytest.mark.parametrize("running", [1, 5])
def test_few_slots_change_nothing(running: int) -> None:
    tiny.assert_same(alone(*MIX), tiny.finish(tiny.engine(max_running=running), MIX))


@pytest.mark.parametrize("chunk", [5, 256])
def test_prompts_that_begin_the_same_equal_each_alone(chunk: int) -> None:
    """Its pages are computed once; what comes after is computed on top of them."""
    begin = tiny.prompt(22, seed=7)
    prompts = [np.concatenate([begin, tiny.prompt(n, seed=n)]) for n in (1, 2, 9, 40)]
    requests = [
        Request(str(i), ids, n=1 + i % 2, params=SamplingParams(max_tokens=20), group=i)
        for i, ids in enumerate(prompts)
    ]
    engine = tiny.engine(step_tokens=chunk)
    done = tiny.finish(engine, requests)
    tiny.assert_same(alone(*requests), done)


@pytest.mark.parametrize("tokens", [72, 140])
def test_preempted_equals_not_preempted(tokens: int) -> None:
    engine = tiny.engine(tokens=tokens)
    tiny.assert_same(alone(*MIX), tiny.finish(engine, MIX))
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.pages.free == engine.scheduler.pages.count


@pytest.mark.parametrize(("on_update", "tokens"), [("keep", 100), ("recompute", 4096)])
def test_an_update_with_the_same_weights_changes_nothing(on_update: str, tokens: int) -> None:
    engine = tiny.engine(on_update=on_update, tokens=tokens)

    def update(step: int) -> None:
        if step % 3 == 1:
            engine.load(tiny.weights(tiny.model(), engine.version + 1))

    done = tiny.finish(engine, MIX, update)
    tiny.assert_same(alone(*MIX), done)
    versions = done["long", 0].versions
    assert versions[0] < versions[-1]
    assert (np.diff(versions) >= 0).all()


def test_after_an_update_recomputing_forgets_the_old_weights() -> None:
    """From the update on, log-probabilities are those of the new model over the whole context."""
    engine = tiny.engine(on_update="recompute")
    one = tiny.request("a", 21, n=3, max_tokens=14)

    def update(step: int) -> None:
        if step == 1:
            engine.load(tiny.weights(tiny.model(1), 5))

    for done in tiny.finish(engine, [one], update).values():
        for seed, version in ((0, 0), (1, 5)):
            oracle = tiny.learner_logprobs(tiny.model(seed), one.prompt, done.token_ids, 1.0)
            mine = done.versions == version
            assert 0 < mine.sum() < len(mine)
            np.testing.assert_allclose(done.logprobs[mine], oracle[mine], atol=1e-5)
        old, new = (int((done.versions == version).sum()) for version in (0, 5))
        assert version_ranges(done.versions) == [[0, old], [5, new]]  # as rollouts.jsonl has them


def test_after_an_update_keeping_reads_the_old_cache() -> None:
    """Only tokens run since the update are the new model's; the cache before is the old one's."""
    engine = tiny.engine(on_update="keep")
    one = tiny.request("a", 21, n=2, max_tokens=14)

    def update(step: int) -> None:
        if step == 1:
            engine.load(tiny.weights(tiny.model(1), 5))

    for done in tiny.finish(engine, [one], update).values():
        new = done.versions == 5
        old = tiny.learner_logprobs(tiny.model(), one.prompt, done.token_ids, 1.0)
        np.testing.assert_allclose(done.logprobs[~new], old[~new], atol=1e-5)
        oracle = tiny.learner_logprobs(tiny.model(1), one.prompt, done.token_ids, 1.0)
        assert np.abs(done.logprobs[new] - oracle[new]).max() > 1e-3


def test_greedy_equals_transformers(tmp_path: Any) -> None:
    import families

    from burnish.model.checkpoint import load_model

    for family in families.FAMILIES:
        width = {"head_dim": tiny.WIDTH} if family == "qwen3" else {}
        peer = families.make(family, **width)
        own = load_model(families.save(peer, tmp_path / family))
        engine = NativeEngine(own, None, EngineSettings(kv_bytes=1 << 20, page_size=4))
        ids = tiny.prompt(11) % 96
        params = SamplingParams(temperature=0.0, max_tokens=24)
        done = tiny.finish(engine, [Request("a", ids, 1, params)])["a", 0]
        out = peer.generate(
            torch.tensor(ids[None], dtype=torch.long),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            pad_token_id=0,
        )
        # Transformers bans its end ids by min_new_tokens; these random models have their own.
        assert done.token_ids.tolist() == out[0, len(ids) :].tolist(), family


def test_draws_depend_on_group_sample_and_stream_alone() -> None:
    params = SamplingParams(max_tokens=16)
    ids = tiny.prompt(7)

    def tokens(group: int, stream: Stream, name: str = "a", seed: int = 0) -> list[list[int]]:
        chosen = SamplingParams(max_tokens=16, seed=seed) if seed else params
        done = tiny.finish(tiny.engine(), [Request(name, ids, 2, chosen, group, stream)])
        return [done[name, i].token_ids.tolist() for i in range(2)]

    assert tokens(3, Stream.TRAIN) == tokens(3, Stream.TRAIN, "another name")
    different = [
        tokens(3, Stream.TRAIN),
        tokens(4, Stream.TRAIN),
        tokens(3, Stream.EVALUATION),
        tokens(3, Stream.TRAIN, seed=1),
    ]
    samples = [tuple(sample) for pair in different for sample in pair]
    assert len(set(samples)) == len(samples)


def test_end_ids_are_sampled_recorded_and_named() -> None:
    engine = tiny.engine(text=True)
    likely = int(
        tiny.finish(engine, [tiny.request("probe", temperature=0.0, max_tokens=3)])[
            "probe", 0
        ].token_ids[2]
    )
    tokenizer = tiny.tokenizer(end_ids=(END_UNUSED, likely))
    settings = EngineSettings(kv_bytes=1 << 20, page_size=4)
    engine = NativeEngine(tiny.model(), tokenizer, settings)
    done = tiny.finish(engine, [tiny.request("a", temperature=0.0)])["a", 0]
    assert (done.finish, done.stop) == (Finish.STOP, likely)
    assert done.token_ids[-1] == likely
    assert len(done.logprobs) == len(done.token_ids) <= 3
    held = tiny.finish(engine, [tiny.request("a", temperature=0.0, min_tokens=7)])["a", 0]
    assert likely not in held.token_ids[:7]
    oracle = tiny.learner_logprobs(tiny.model(), tiny.prompt(9, 9), held.token_ids, 1.0)
    np.testing.assert_allclose(held.logprobs, oracle, atol=1e-5)  # before the ban


END_UNUSED = 259


def test_stop_ids_of_a_request() -> None:
    engine = tiny.engine()
    probe = tiny.finish(engine, [tiny.request("probe", temperature=0.0)])["probe", 0]
    stop = int(probe.token_ids[4])
    done = tiny.finish(engine, [tiny.request("a", temperature=0.0, stop_ids=(stop,))])["a", 0]
    first = probe.token_ids.tolist().index(stop)
    assert done.token_ids.tolist() == probe.token_ids[: first + 1].tolist()
    assert (done.finish, done.stop) == (Finish.STOP, stop)


def test_the_context_ends_a_response() -> None:
    done = tiny.finish(tiny.engine(), [tiny.request("a", 90, max_tokens=50)])["a", 0]
    assert len(done.token_ids) == 96 - 90
    assert done.finish is Finish.LENGTH


def test_aborted_samples_are_unfinished_until_they_are_delivered() -> None:
    engine = tiny.engine()
    for name in ("a", "b"):
        engine.submit(tiny.request(name, n=2, max_tokens=60))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    assert engine.unfinished == 4
    gone = engine.step()
    assert [(e.request_id, e.finish) for e in gone] == [("a", Finish.ABORT)] * 2
    assert all(0 < len(e.token_ids) < 60 for e in gone)
    assert engine.unfinished == 2
    rest = tiny.finish(engine, [tiny.request("a")])
    assert set(rest) == {("a", 0), ("b", 0), ("b", 1)}
    engine.abort("a")  # nothing of it is in flight any more
    assert engine.unfinished == 0


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "empty": ("1 to 95 tokens", {"prompt": np.array([], np.int32)}),
    "long": ("1 to 95 tokens in this model, got 96", {"prompt": tiny.prompt(96)}),
    "beyond": ("0 … 259", {"prompt": np.array([1, 260], np.int32)}),
    "negative id": ("0 … 259", {"prompt": np.array([-1], np.int32)}),
    "n": ("n must be at least 1", {"n": 0}),
    "max_tokens": ("max_tokens must be at least 1, got 0", {"params": {"max_tokens": 0}}),
    "min_tokens": ("min_tokens", {"params": {"max_tokens": 3, "min_tokens": 4}}),
    "negative": ("temperature must be 0", {"params": {"temperature": -0.5}}),
    "nan": ("temperature", {"params": {"temperature": float("nan")}}),
    "stop text": ("stop must hold texts", {"params": {"stop": "###"}}),
    "empty stop": ("stop must hold texts", {"params": {"stop": ("",)}}),
    "stop id": ("0 … 259", {"params": {"stop_ids": (260,)}}),
    "cache": ("must fit the cache of 64 tokens", {"params": {"max_tokens": 60}}),
}


def test_bad_requests_are_refused_and_the_others_served() -> None:
    engine, good = tiny.engine(tokens=64), tiny.request("good", n=2)
    engine.submit(good)
    engine.step()
    for message, wrong in BAD.values():
        params = SamplingParams(**wrong.get("params", {"max_tokens": 4}))
        prompt = wrong.get("prompt", tiny.prompt(9))
        with pytest.raises(EngineError, match=message):
            engine.submit(Request("bad", prompt, wrong.get("n", 1), params))
    with pytest.raises(AssertionError, match="in flight"):
        engine.submit(good)
    tiny.assert_same(alone(good), tiny.finish(engine, []))


def test_load_refuses_and_keeps_the_old_weights() -> None:
    engine = tiny.engine()
    one = tiny.request("a", n=2)
    engine.submit(one)
    engine.step()
    broken = tiny.weights(tiny.model(1), 1)
    broken.tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    with pytest.raises(EngineError, match=r"finite.*version 0 stays"):
        engine.load(broken)
    missing = tiny.weights(tiny.model(1), 1)
    del missing.tensors["model.norm.weight"]
    with pytest.raises(EngineError, match=r"missing.*version 0 stays"):
        engine.load(missing)
    assert engine.version == 0
    tiny.assert_same(alone(one), tiny.finish(engine, []))
    engine.load(tiny.weights(tiny.model(1), 1)._replace(incarnation=2))
    with pytest.raises(EngineError, match=r"incarnation 1 .*version 1 stays"):
        engine.load(tiny.weights(tiny.model(), 2)._replace(incarnation=1))
    assert engine.version == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is resident")
def test_loading_again_takes_no_more_memory() -> None:
    """MKL reserves 10 MB more than a packed weight fills; it must stay untouched memory."""
    model = tiny.model(d_model=256, d_ff=1024, n_layers=8)
    engine = NativeEngine(model, None, EngineSettings(kv_bytes=1 << 20))
    engine.load(tiny.weights(model, 1))
    used: list[float] = []
    for version in range(2, 8):
        parts = [torch.ones(2 << 20) for _ in range(16)]  # as a learner does between two loads
        del parts
        engine.load(tiny.weights(model, version))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    assert max(used) - used[0] < 40, used  # MB; the model has 34


def test_a_model_that_overflows_aborts_its_samples_and_leaves_no_trace() -> None:
    engine = tiny.engine(tokens=64)
    wild = tiny.weights(tiny.model(), 1)
    wild.tensors["model.layers.0.mlp.down_proj.weight"] *= 3e38
    wild.tensors["model.layers.0.mlp.down_proj.weight"].clamp_(-3e38, 3e38)
    engine.load(wild)
    gone = tiny.finish(engine, [tiny.request("wild", n=2)])
    assert {done.finish for done in gone.values()} == {Finish.ABORT}
    engine.load(tiny.weights(tiny.model(), 2))
    one = tiny.request("good", n=3)
    tiny.assert_same(alone(one), tiny.finish(engine, [one]))


def test_the_cache_stays_within_its_budget() -> None:
    engine = tiny.engine(tokens=200)
    assert engine._cache._pool.nbytes <= engine.scheduler.settings.kv_bytes
    with pytest.raises(EngineError, match="must fit the cache of 0 tokens"):
        tiny.engine(tokens=3).submit(MIX[0])


@pytest.mark.slow
def test_bfloat16_runs_packed_and_close_to_float32() -> None:
    own = tiny.model().to(torch.bfloat16)
    engine = NativeEngine(own, None, EngineSettings(kv_bytes=1 << 20, page_size=4))
    one = tiny.request("a", 21, n=3, max_tokens=20)
    for done in tiny.finish(engine, [one]).values():
        oracle = tiny.learner_logprobs(tiny.model(), one.prompt, done.token_ids, 1.0)
        assert np.abs(done.logprobs - oracle).mean() < 0.2
        same = tiny.learner_logprobs(own, one.prompt, done.token_ids, 1.0)
        assert np.abs(done.logprobs - same).mean() < 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_equalities_hold_on_a_gpu() -> None:
    engine = NativeEngine(tiny.model().cuda(), None, EngineSettings(kv_bytes=1 << 17, page_size=4))
    for (name, _), done in tiny.finish(engine, MIX).items():
        one = next(r for r in MIX if r.request_id == name)
        oracle = tiny.learner_logprobs(
            tiny.model(), one.prompt, done.token_ids, one.params.temperature
        )
        np.testing.assert_allclose(done.logprobs, oracle, atol=1e-4)
