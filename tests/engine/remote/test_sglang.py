"""SGLang's client against a strict server, and the strict server against the real one's answers."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from record_sglang import CONTRACT, EXCHANGES, ask, send
from sglang_server import TestServer

from burnish.cli.engine import Reference
from burnish.engine.conformance import FAIL, PASS, UPDATES, Suite
from burnish.engine.remote.sglang import SglangEngine
from burnish.errors import EngineError
from burnish.model import checkpoint
from burnish.types import Finish, Weights

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the servers compute on the CPU")
REAL = os.environ.get("BURNISH_TEST_SGLANG")
"""The url of a real server of the tiny model: BURNISH_TEST_SGLANG=http://127.0.0.1:30000"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(), path)
    tiny.tokenizer().save(path)
    tiny.finish(tiny.engine(), [tiny.request("compiles")])  # before any deadline
    return path


@pytest.fixture
def server() -> Iterator[TestServer]:
    # Its own weights are others, so that the client must load the model's.
    with closing(TestServer(tiny.engine(9, text=True), pace=2e-3)) as server:
        yield server


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.engine.remote.client.BUCKET", 8000)


@pytest.fixture(params=["strict", "real"])
def url(request: Any) -> str:
    """The url of each server."""
    if request.param == "real" and REAL is None:
        pytest.skip("no real SGLang server: set BURNISH_TEST_SGLANG to its url")
    return str(REAL if request.param == "real" else request.getfixturevalue("server").url)


@pytest.fixture
def will_cut(url: str, request: Any) -> Callable[[], None]:
    """Call it before requests that a load must find in flight; a real server is slow enough."""

    def will_cut() -> None:
        if url != REAL:
            server = request.getfixturevalue("server")
            server.cut_at = server.engine.sampled + 20

    return will_cut


@pytest.fixture
def engine(url: str, model: Path) -> Iterator[SglangEngine]:
    """The client of each server."""
    with closing(client(url, model)) as engine:
        yield engine


def client(url: str, model: Path, deadline: float = 20.0, **more: Any) -> SglangEngine:
    return SglangEngine(url, model, tiny.tokenizer(), deadline=deadline, **more)


def drive(
    engine: SglangEngine, requests: list[Any], between: Callable[[], None] = lambda: None
) -> dict[tuple[str, int], Any]:
    """Submits all, calls ``between`` when some tokens must be there, and waits for all."""
    for one in requests:
        engine.submit(one)
    time.sleep(0.1)
    between()
    return tiny.finish(engine, [])


def expected(weights: list[Any], request: Any, found: Any) -> np.ndarray:
    """Log-probabilities of a completion, each token by the weights of its version."""
    heat = request.params.temperature
    rows = [tiny.learner_logprobs(m, request.prompt, found.token_ids, heat) for m in weights]
    return np.choose(found.versions, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_the_models(engine: SglangEngine, temperature: float) -> None:
    request = tiny.request("a", 9, n=4, temperature=temperature, max_tokens=16)
    done = drive(engine, [request, replace(request, request_id="b", group=1)])
    for found in done.values():
        np.testing.assert_allclose(
            found.logprobs, expected([tiny.model()], request, found), atol=tiny.CLOSE
        )
        assert found.sampled.all()
        assert not found.versions.any()
    groups = [{tuple(done[name, i].token_ids) for i in range(4)} for name in "ab"]
    assert [len(group) for group in groups] == ([1, 1] if temperature == 0 else [4, 4])
    assert engine.sampled == sum(len(found.token_ids) for found in done.values())


@pytest.mark.parametrize("how", [{"top_p": 0.6, "top_k": 9}, {"min_p": 0.1}], ids=str)
def test_truncation_does_not_change_logprobs(engine: SglangEngine, how: dict[str, Any]) -> None:
    request = tiny.request("a", 9, n=4, max_tokens=16, **how)
    for found in drive(engine, [request]).values():
        wanted = expected([tiny.model()], request, found)
        np.testing.assert_allclose(found.logprobs, wanted, atol=tiny.CLOSE)


def test_responses_end_as_the_native_engine_ends_them(engine: SglangEngine) -> None:
    request = tiny.request("a", 9, n=6, max_tokens=40, stop=("e", "\x04"), stop_ids=(7, 9))
    ids, text = request.params.stop_ids, tiny.tokenizer()
    for found in drive(engine, [request]).values():
        told = found.token_ids.tolist()
        ends = [i for i, token in enumerate(told) if token in (*ids, tiny.END)]
        if found.finish is Finish.LENGTH:
            assert len(told) == 40
            assert not ends
        elif isinstance(found.stop, int):
            assert ends == [len(told) - 1]
            assert told[-1] == found.stop
        else:
            assert found.text.endswith(found.stop)
            assert text.decode(told).endswith(found.stop)
            assert not any(stop in text.decode(told[:-1]) for stop in request.params.stop)


def test_a_seed_repeats_a_sample_and_a_load_does_not_change_its_draws(
    engine: SglangEngine, will_cut: Callable[[], None]
) -> None:
    request = tiny.request("a", 9, n=4, max_tokens=60, group=3)
    same = drive(engine, [request])
    will_cut()
    cut = drive(engine, [request], lambda: engine.load(tiny.weights(tiny.model(), 1)))
    tiny.assert_same(same, cut)
    assert any(set(found.versions) == {0, 1} for found in cut.values())
    whole = max(same.values(), key=lambda found: len(found.token_ids))
    part = {name: getattr(whole, name)[:5] for name in ("token_ids", "logprobs", "versions")}
    begun = replace(whole, **part, sampled=whole.sampled[:5])
    again = replace(request, n=1, first=whole.sample_index, begun=begun)
    assert drive(engine, [again])["a", 0].token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.parametrize("keeps", [False, True])
def test_each_token_is_of_its_version(server: TestServer, model: Path, keeps: bool) -> None:
    request, new = tiny.request("a", 9, n=6, max_tokens=60), tiny.model(5)
    with closing(client(server.url, model, keeps_cache=keeps)) as engine:
        engine.expect(new.probe, 1e-4)
        server.cut_at = server.engine.sampled + 20
        done = drive(engine, [request], lambda: engine.load(tiny.weights(new, 1)))
        assert engine.version == 1
        assert server.flushed == (0 if keeps else 2)
    mixed = [found for found in done.values() if set(found.versions) == {0, 1}]
    assert mixed, "no sample was cut"
    for found in done.values():
        wanted = expected([tiny.model(), new], request, found)
        # A response that goes on is computed in other pieces than the oracle's: 1.1e-5 was seen.
        gaps = np.abs(found.logprobs - wanted)
        is_mixed = set(found.versions) == {0, 1}
        assert gaps[found.versions == 0].max(initial=0) < 2 * tiny.CLOSE
        if keeps and is_mixed:
            assert gaps[found.versions == 1].max() > 0.1, "its cache was computed again"
        else:
            assert gaps.max() < 2 * tiny.CLOSE


@pytest.mark.parametrize("keeps", [False, True])
def test_requests_that_wait_in_the_client_begin_with_the_new_weights(
    server: TestServer, model: Path, keeps: bool
) -> None:
    """Samples beyond ``max_running`` have not been sent when weights come; neither they nor a later
    request reads the cache of the old ones, which a request in flight goes on with."""
    request, new = tiny.request("a", 41, n=2, max_tokens=40), tiny.model(5)
    waiting = [replace(request, request_id=f"w{i}", n=3, group=i + 1) for i in range(3)]
    late = replace(request, request_id="late", group=9)
    with closing(client(server.url, model, keeps_cache=keeps, max_running=2)) as engine:
        drive(engine, [replace(request, request_id="before")])

        def update() -> None:
            engine.load(tiny.weights(new, 1))
            engine.submit(late)

        server.cut_at = server.engine.sampled + 20
        done = drive(engine, [request, *waiting], update)
    assert len(done) == 2 + 9 + 2
    others = [found for (name, _), found in done.items() if name != "a"]
    assert all(set(found.versions) == {1} for found in others)
    for found in others:
        wanted = expected([tiny.model(), new], request, found)
        np.testing.assert_allclose(found.logprobs, wanted, atol=2 * tiny.CLOSE)


def test_a_call_that_meets_new_weights_on_its_way_is_sent_again(
    server: TestServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent before the update and reached the server after it: its key is the old one."""
    request, new, arrive = tiny.request("a", 41, max_tokens=20), tiny.model(5), server._generate
    loaded = threading.Event()

    def slow(**body: Any) -> Any:
        assert "token_ids_logprob" in body or loaded.wait(20)
        return arrive(**body)

    with closing(client(server.url, model, keeps_cache=True)) as engine:
        drive(engine, [replace(request, request_id="before")])
        monkeypatch.setattr(server, "_generate", slow)
        engine.submit(request)
        engine.load(tiny.weights(new, 1))
        loaded.set()
        (found,) = tiny.finish(engine, []).values()
    assert set(found.versions) == {1}
    wanted = expected([tiny.model(), new], request, found)
    np.testing.assert_allclose(found.logprobs, wanted, atol=2 * tiny.CLOSE)


@pytest.mark.parametrize("restart", ["client", "incarnation"])
def test_versions_that_are_counted_again_find_no_older_cache(
    server: TestServer, model: Path, restart: str
) -> None:
    """A run that was restarted loads version 1 again, and its weights are others."""
    request = tiny.request("a", 41, max_tokens=20)
    engine = client(server.url, model, keeps_cache=True)
    engine.load(tiny.weights(tiny.model(5), 1))
    drive(engine, [request])
    if restart == "client":
        engine.close()
        engine = client(server.url, model, keeps_cache=True)
    new = tiny.model(6)
    engine.load(tiny.weights(new, 1)._replace(incarnation=1))
    (found,) = drive(engine, [request]).values()
    engine.close()
    wanted = expected([tiny.model(), new], request, found)
    np.testing.assert_allclose(found.logprobs, wanted, atol=2 * tiny.CLOSE)


def test_a_response_begun_elsewhere_finds_no_older_cache(server: TestServer, model: Path) -> None:
    request, new = tiny.request("a", 41, max_tokens=20, stop_ids=()), tiny.model(5)
    with closing(client(server.url, model, keeps_cache=True)) as engine:
        (old,) = drive(engine, [request]).values()
        names = ("token_ids", "logprobs", "versions", "sampled")
        begun = replace(old, **{name: getattr(old, name)[:3] for name in names})
        engine.load(tiny.weights(new, 1))
        (found,) = drive(engine, [replace(request, begun=begun)]).values()
    assert found.versions.tolist() == [0] * 3 + [1] * (len(found.versions) - 3)
    wanted = expected([tiny.model(), new], request, found)
    np.testing.assert_allclose(found.logprobs, wanted, atol=2 * tiny.CLOSE)


def test_an_abort_reaches_requests_that_wait_in_the_client(server: TestServer, model: Path) -> None:
    server.pace = 0.05
    with closing(client(server.url, model, max_running=2)) as engine:
        before = len(server.seen)
        for name in "ab":
            engine.submit(tiny.request(name, 9, n=5, max_tokens=80))
        engine.abort("b")
        assert engine.unfinished == 10
        done = engine.step()
        assert [(c.request_id, c.finish, len(c.token_ids)) for c in done] == [
            ("b", Finish.ABORT, 0)
        ] * 5
        engine.abort("a")
        done = tiny.finish(engine, [])
    assert len(done) == 5
    assert all(found.finish in (Finish.ABORT, Finish.STOP) for found in done.values())
    sent = [body for path, body in server.seen[before:] if path == "/generate"]
    assert len(sent) == 2


def test_an_abort_that_overtakes_its_call_is_sent_again(
    server: TestServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not know the call yet when the abort comes, and ignores it."""
    arrive, aborted = server._generate, threading.Event()

    def slow(**body: Any) -> Any:
        assert aborted.wait(20)
        return arrive(**body)

    server.pace = 0.1
    with closing(client(server.url, model)) as engine:
        monkeypatch.setattr(server, "_generate", slow)
        engine.submit(tiny.request("a", 9, max_tokens=80))
        engine.abort("a")
        aborted.set()
        start = time.monotonic()
        (found,) = tiny.finish(engine, []).values()
        assert time.monotonic() - start < 4, "eighty tokens take eight seconds"
    assert found.finish in (Finish.ABORT, Finish.STOP)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_the_check_passes_by_each_way_and_sees_a_key_that_stays(
    server: TestServer, model: Path, way: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = "keep" if keeps else "recompute"
    submit = server.cache.submit
    for is_planted in (False, True)[: 1 + (way == "disk")]:
        if is_planted:  # one key for all versions, or a cache that is not emptied
            monkeypatch.setattr(server.cache, "submit", lambda request, key: submit(request, "0"))
            monkeypatch.setattr(server.cache, "flush", lambda: None)
        how = {"keeps_cache": keeps, "weights": way, "max_running": 3}
        with closing(client(server.url, model, **how)) as engine:
            reference, prompts = Reference(model, "fp32", "cpu"), [tiny.prompt(20), tiny.prompt(3)]
            suite = Suite(engine, reference, prompts, room=69, on_update=mode)
            for name in UPDATES[:2]:
                found = suite.run(name)
                assert found.status == (FAIL if is_planted else PASS), found


def test_a_part_of_the_weights_is_enough_if_the_rest_is_as_it_was(engine: SglangEngine) -> None:
    new, some = tiny.model(), "model.norm.weight"
    with torch.no_grad():
        new.exchange()[some].mul_(1.5)
    engine.expect(new.probe, 1e-4)
    engine.load(Weights(1, 0, {some: new.exchange()[some].clone()}, is_partial=True))
    other = {"model.embed_tokens.weight": new.exchange()["model.embed_tokens.weight"].clone()}
    with pytest.raises(EngineError, match=r"model\.norm.*differ; version 1 stays loaded"):
        engine.load(Weights(2, 0, other, is_partial=True))


def test_an_aborted_request_gives_its_tokens_so_far(engine: SglangEngine) -> None:
    requests = [tiny.request(name, 9, n=2, max_tokens=80, group=2) for name in ("a", "ab")]
    done = drive(engine, requests, lambda: engine.abort("a"))
    assert {done["a", i].finish for i in range(2)} <= {Finish.ABORT, Finish.STOP}
    assert all(done["ab", i].finish is not Finish.ABORT for i in range(2))
    assert not engine.unfinished


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        (lambda: tiny.weights(tiny.model(d_ff=40), 1), "do not fit"),
        (lambda: tiny.weights(tiny.model(n_layers=3), 1), r"model\.layers\.2.*differ"),
        (lambda: tiny.weights(tiny.model(n_layers=1), 1), r"model\.layers\.1.*differ"),
    ],
)
def test_wrong_weights_are_not_sent(engine: SglangEngine, weights: Any, rule: str) -> None:
    before = engine.probe()
    with pytest.raises(EngineError, match=f"{rule}.*version 0 stays loaded"):
        engine.load(weights())
    assert np.allclose(engine.probe(), before, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [("stale", "stale or incomplete"), ("torn", "holds unknown weights.*no room")],
)
def test_a_load_that_failed_leaves_no_mixture(
    server: TestServer, model: Path, fault: str, rule: str
) -> None:
    new = tiny.model(5)
    with closing(client(server.url, model)) as engine:
        engine.expect(new.probe, 1e-4)
        server.fault = fault
        for _ in range(2):  # and it is not asked again
            with pytest.raises(EngineError, match=f"{server.url} .*{rule}.*burnish resume"):
                engine.load(tiny.weights(new, 1))
        with pytest.raises(EngineError, match=rule):
            drive(engine, [tiny.request("a")])


def test_a_load_that_changed_nothing_keeps_the_version(
    server: TestServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(client(server.url, model)) as engine:
        monkeypatch.setattr("burnish.engine.remote.sglang_weights.save_file", lambda *a, **k: None)
        with pytest.raises(EngineError, match=r"refused /update.*version 0 stays loaded"):
            engine.load(tiny.weights(tiny.model(5), 1))
        monkeypatch.undo()
        engine.load(tiny.weights(tiny.model(5), 1))
        assert engine.version == 1


@pytest.mark.parametrize(
    ("fault", "rule"), [("silent", "within engine.deadline"), ("dead", "does")]
)
def test_no_wait_is_endless(server: TestServer, model: Path, fault: str, rule: str) -> None:
    before = threading.enumerate()
    engine = client(server.url, model, deadline=0.3)
    engine.submit(tiny.request("a", 9, max_tokens=80))
    server.fault = fault
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"{server.url} .*{rule}"):
        engine.load(tiny.weights(tiny.model(), 1))
    assert time.monotonic() - start < 5
    keeping = [t for t in threading.enumerate() if t not in before and not t.daemon]
    assert not keeping, "the interpreter's end waits for these threads"


@pytest.mark.parametrize(
    ("fault", "deadline", "rule"),
    [
        ("refuses", 9.0, "refused /init"),
        ("killed", 9.0, "does not answer /init"),
        ("deaf", 1.0, "did not answer /init_weights_update_group within engine.deadline"),
        ("late", 1.0, "did not answer /init_weights_update_group within engine.deadline"),
    ],
)
def test_a_server_that_does_not_join_is_an_error(
    server: TestServer, model: Path, fault: str, deadline: float, rule: str
) -> None:
    server.fault, start = fault, time.monotonic()
    before = threading.enumerate()
    with pytest.raises(EngineError, match=f"{server.url} .*{rule}"):
        client(server.url, model, deadline=deadline, weights="distributed")
    assert time.monotonic() - start < 5
    left = [t for t in threading.enumerate() if t not in before]
    assert all(t.daemon for t in left)
    # gloo's own deadline is over: a thread that returns from it at exit would abort the process.
    assert deadline > 5 or not any("_work" in t.name for t in left)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_each_way_brings_the_same_weights(
    url: str, model: Path, way: str, will_cut: Callable[[], None]
) -> None:
    request, new = tiny.request("a", 9, n=6, max_tokens=60), tiny.model(5)
    with closing(client(url, model, weights=way)) as engine:
        np.testing.assert_allclose(engine.probe(), tiny.model().probe(), atol=1e-4)
        engine.expect(new.probe, 1e-4)
        will_cut()
        done = drive(engine, [request], lambda: engine.load(tiny.weights(new, 1)))
        part = {"model.norm.weight": new.exchange()["model.norm.weight"].clone()}
        other = tiny.weights(new, 2).tensors | part
        engine.load(Weights(2, 0, other))
        assert engine.version == 2
        assert engine._server.call("/server_info")["weight_version"] == "2"
    assert any(set(found.versions) == {0, 1} for found in done.values())
    for found in done.values():
        wanted = expected([tiny.model(), new], request, found)
        np.testing.assert_allclose(found.logprobs, wanted, atol=2 * tiny.CLOSE)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_the_last_bucket_empties_the_cache(server: TestServer, model: Path, way: str) -> None:
    with closing(client(server.url, model, weights=way)) as engine:
        engine.load(tiny.weights(tiny.model(5), 1))
        assert server.flushed == 2
    sent = [body for path, body in server.seen if body and path.startswith("/update_weights")]
    assert (len(sent) > 4) == (way != "disk")
    assert [body["weight_version"] for body in sent if "weight_version" in body] == ["0", "1"]
    assert not server.groups
    assert not server.paused


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("way", "fault", "rule"),
    [
        ("tensor", "torn", "holds unknown weights.*no room"),
        ("distributed", "torn", "holds unknown weights.*no room"),
        ("distributed", "killed", "holds unknown weights.*does not answer /update"),
        ("distributed", "deaf", "/update_weights_from_distributed within engine.deadline"),
    ],
)
def test_a_bucket_that_is_lost_leaves_no_mixture(
    server: TestServer, model: Path, way: str, fault: str, rule: str
) -> None:
    deadline = 1.0 if fault == "deaf" else 20.0
    with closing(client(server.url, model, deadline=deadline, weights=way)) as engine:
        server.fault, start = fault, time.monotonic()
        for _ in range(2):
            with pytest.raises(EngineError, match=f"{server.url} .*{rule}.*burnish resume"):
                engine.load(tiny.weights(tiny.model(5), 1))
    assert time.monotonic() - start < 5


def test_a_refused_broadcast_keeps_the_version_and_makes_a_new_group(
    server: TestServer, model: Path
) -> None:
    with closing(client(server.url, model, weights="distributed")) as engine:
        for _ in range(2):  # the update is refused, then the group
            server.fault, start = "refuses", time.monotonic()
            with pytest.raises(EngineError, match=r"refused /.*version 0 stays loaded"):
                engine.load(tiny.weights(tiny.model(5), 1))
            assert time.monotonic() - start < 5
        server.fault = None
        engine.expect(tiny.model(5).probe, 1e-4)
        engine.load(tiny.weights(tiny.model(5), 1))
        assert engine.version == 1
        assert len(server.groups) == 1


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_sleeping_server_wakes_when_it_is_asked(
    server: TestServer, model: Path, has_copy: bool
) -> None:
    with pytest.raises(EngineError, match=f"{server.url} .*engine.sleep.*--enable-memory-saver"):
        client(server.url, model, sleeps=True)
    server.options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": has_copy}
    engine, request = client(server.url, model, sleeps=True), tiny.request("a", 9, max_tokens=60)
    uses: list[Callable[[], Any]] = [
        engine.probe,
        lambda: drive(engine, [request]),
        lambda: engine.load(tiny.weights(tiny.model(5), 1)),
        engine.close,
    ]
    engine.submit(request)
    with pytest.raises(EngineError, match="1 samples are not delivered"):
        engine.sleep()
    tiny.finish(engine, [])
    for use in uses:
        engine.sleep()
        assert server.released == ["kv_cache", "weights"][: 1 + has_copy]
        use()
        assert not server.released


def test_a_server_of_several_pipelines_is_refused(server: TestServer, model: Path) -> None:
    server.options["dp_size"] = 2
    with pytest.raises(EngineError, match=r"dp_size = 2.*engine\.weights = 'disk'"):
        client(server.url, model, weights="tensor")


def test_bad_servers_and_requests_are_refused(server: TestServer, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"{nobody} does not answer /server_info.*running"):
        client(nobody, model)
    server.version = "0.5.9"
    with pytest.raises(EngineError, match=r"must be 0\.5\.15 or newer, is 0\.5\.9"):
        client(server.url, model)
    server.version = "0.5.15.post1"
    engine = client(server.url, model)
    for changes, rule in [
        ({"min_tokens": 3}, "mask of min_tokens"),
        ({"repetition_penalty": 1.1}, "before repetition_penalty"),
        ({"think_tokens": 3, "think_end": "x", "think_phrase": "x"}, "think budget"),
        ({"stop_ids": (900,)}, "token ids must lie in"),
    ]:
        with pytest.raises(EngineError, match=rule):
            engine.submit(tiny.request("a", **changes))
    with pytest.raises(EngineError, match="1 to 89 tokens"):  # 96, and SGLang keeps 6
        engine.submit(tiny.request("a", 90))
    engine.close()


UNEXPECTED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a page": (lambda facts: b"<html>", "no version, no max_req_input_len, .*no tp_size"),
    "nothing": (lambda facts: None, "no version, "),
    "a list": (lambda facts: [facts], "no version, "),
    "broken JSON": (lambda facts: b'{"version"', "broken JSON"),
    "nested JSON": (lambda facts: b'{"a":' * 100_000, "broken JSON"),
    "another server's facts": (lambda facts: {"version": "1.0"}, "no max_req_input_len, no skip"),
    "one fact less": (
        lambda facts: {k: v for k, v in facts.items() if k != "dp_size"},
        "with no dp_size; ",
    ),
    "a fact of another kind": (
        lambda facts: facts | {"tp_size": "1", "dtype": None},
        "with dtype = None, tp_size = '1'; ",
    ),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_an_unexpected_server_info_is_one_error(
    server: TestServer, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the url, what is wrong there, and what to check."""
    change, rule = UNEXPECTED[name]
    facts = server._facts()
    monkeypatch.setattr(server, "_facts", lambda: change(facts))
    with pytest.raises(EngineError, match=f"{server.url} answers /server_info .*{rule}") as error:
        client(server.url, model)
    assert "broken" in rule or "check engine.url" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_server_that_was_started_again_is_not_asked_for_more(
    server: TestServer, model: Path
) -> None:
    engine = client(server.url, model)
    server.weight_version = "default"
    engine.submit(tiny.request("a"))
    with pytest.raises(EngineError, match=r"was restarted: its weights are 'default'.*resume"):
        tiny.finish(engine, [])
    with pytest.raises(EngineError, match="was restarted"):
        engine.probe()


def test_an_answer_without_its_parts_is_one_error(
    server: TestServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client(server.url, model)
    monkeypatch.setattr(server, "_generate", lambda **body: (200, {"meta_info": {}}))
    rule = r"answers /generate without meta_info\.output_token_ids_logprobs"
    with pytest.raises(EngineError, match=rule):
        engine.probe()
    engine.submit(tiny.request("a"))
    with pytest.raises(EngineError, match="answers /generate without weight_version"):
        tiny.finish(engine, [])


KEY = "sk-not-to-be-seen"


def test_a_server_with_an_api_key(server: TestServer, model: Path) -> None:
    server.key = KEY
    for wrong in (None, "another"):
        with pytest.raises(
            EngineError, match=r"refused /server_info \(401\).*engine\.key must name"
        ):
            client(server.url, model, key=wrong)
    with closing(client(server.url, model, key=KEY)) as engine:
        engine.load(tiny.weights(tiny.model(5), 1))
        assert len(drive(engine, [tiny.request("a", 9, n=3)])) == 3
        engine.abort("a")


def test_no_error_holds_the_key(
    server: TestServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may say it, and a redirection is not followed with it."""
    monkeypatch.setattr(server, "_facts", lambda: {"version": f"0.5.9 for {KEY}"})
    with pytest.raises(EngineError, match=r"newer, is 0\.5\.9 for \(key\)"):
        client(server.url, model, key=KEY)
    monkeypatch.setattr(server, "answer", lambda path, body: (307, None))
    with pytest.raises(EngineError, match=r"sends /server_info to .*does not follow") as error:
        client(server.url, model, key=KEY)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("way", ["disk", "distributed"])
def test_a_server_of_https(
    certificate: Path, model: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with closing(TestServer(tiny.engine(9, text=True), tls=tls)) as server:
        server.key = KEY
        with pytest.raises(EngineError, match=r"not trusted.*SSL_CERT_FILE"):
            client(server.url, model, key=KEY)
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
        with closing(client(server.url, model, key=KEY, weights=way)) as engine:
            engine.expect(tiny.model(5).probe, 1e-4)
            engine.load(tiny.weights(tiny.model(5), 1))
            assert len(drive(engine, [tiny.request("a", 9, n=3)])) == 3


def test_another_model_is_seen(server: TestServer, tmp_path: Path) -> None:
    checkpoint.save_model(tiny.model(d_ff=40), tmp_path)
    with pytest.raises(EngineError, match="refused /update_weights_from_disk"):
        client(server.url, tmp_path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1], "return_logprobs": True, "sampling_params": {}}),
        ("/generate", {"input_ids": "1", "return_logprob": True, "sampling_params": {}}),
        ("/pause_generation", {"mode": "abort", "hard": True}),
    ],
)
def test_the_strict_server_is_strict(server: TestServer, path: str, body: Any, model: Path) -> None:
    assert ask(server.url, path, body, model)[0] == 400


def shape(told: Any, wanted: Any) -> Any:
    """The parts of an answer that ``wanted`` has, by their JSON types."""
    if isinstance(wanted, dict):
        return {name: shape(told[name], value) for name, value in wanted.items()}
    if isinstance(wanted, list):
        return [shape(told[0], wanted[0])] if wanted else []
    return type(told)


def test_the_strict_server_answers_as_the_real_one(server: TestServer, model: Path) -> None:
    rows = json.loads(CONTRACT.read_text())
    asked, sent = rows[: len(EXCHANGES)], rows[len(EXCHANGES) :]
    assert [(row["path"], row["body"]) for row in asked] == EXCHANGES
    for row, told in zip(sent, send(server.url), strict=True):
        assert shape(told, told) == shape(row, told)
        assert (row["path"], row["fields"]) == (told["path"], told["fields"])
    for row in asked:
        status, told = ask(server.url, row["path"], row["body"], model)
        assert status == row["status"], row
        if status == 200 and told:
            meant = shape(told, told)
            assert meant == shape(row["answer"], told), row["path"]


def test_the_real_servers_logprobs_are_the_models() -> None:
    """Recorded from SGLang 0.5.15 after it had loaded the tiny model, in float32 on a CPU."""
    rows = [row for row in json.loads(CONTRACT.read_text()) if row["path"] == "/generate"]
    found = [row for row in rows if row["status"] == 200]
    assert len(found) == 4
    for row in found:
        told = row["answer"]["meta_info"]["output_token_logprobs"]
        prompt, tokens = (np.array(ids) for ids in (row["body"]["input_ids"], [t[1] for t in told]))
        heat = row["body"]["sampling_params"].get("temperature", 1.0)
        wanted = tiny.learner_logprobs(tiny.model(), prompt, tokens, heat)
        np.testing.assert_allclose([t[0] for t in told], wanted, atol=tiny.CLOSE)
