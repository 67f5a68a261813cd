"""An engine behind a socket answers as the engine itself does, bit for bit, and never hangs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from burnish.cli.engine import Reference
from burnish.engine.conformance import FAIL, PASS, UPDATES, Suite
from burnish.engine.native.engine import NativeEngine
from burnish.engine.remote import client, server, wire
from burnish.engine.remote import listener as listening
from burnish.engine.remote.client import RemoteEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model import checkpoint
from burnish.model.checksum import checksum_of_bytes
from burnish.types import Finish, Weights

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the process computes on the CPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(), path)
    tiny.tokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def apart(model: Path) -> Iterator[RemoteEngine]:
    """The native engine in a process of its own."""
    settings = EngineSettings("native", str(model), kv_bytes=1 << 20)
    with closing(client.start_engine(settings, python=sys.executable, deadline=120)) as engine:
        yield engine


def behind(engine: NativeEngine, model: Path, deadline: float = 20.0) -> RemoteEngine:
    """The engine behind a socket, in a thread of this process."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with theirs, suppress(Exception):  # a process prints it, and ends
            wire.send(theirs, server.engine_facts(engine, EngineSettings("native", str(model))))
            server.answer_calls(theirs, engine)

    threading.Thread(target=answer, daemon=True).start()
    return RemoteEngine(ours, "tiny", deadline)


def requests() -> list[Any]:
    begun = tiny.finish(tiny.engine(), [tiny.request("x", 5)])["x", 0]
    part = {name: getattr(begun, name)[:4] for name in wire.STREAMS}
    return [
        tiny.request("a", 9, n=3, group=4, min_tokens=6, stop=("e", "xy")),
        tiny.request("b", 12, n=2, temperature=0.7, stop_ids=(7, 9)),
        tiny.request("c", 3, temperature=0.0, top_p=0.9, top_k=5),
        tiny.request("d", 6, n=2, min_p=0.05, repetition_penalty=1.4),
        replace(tiny.request("x", 5), begun=replace(begun, **part), first=3),
        replace(
            tiny.request("y", 5, think_tokens=3, think_end="e", think_phrase="ee", stop=("a",)),
            begun=replace(begun, **part),
            turn=4,
            position=7,
        ),
    ]


def test_another_process_gives_the_same_bits(apart: RemoteEngine) -> None:
    ours = tiny.engine(text=True, page_size=16)
    tiny.assert_same(tiny.finish(apart, requests()), tiny.finish(ours, requests()), 0)
    assert (apart.sampled, apart.unfinished) == (ours.sampled, 0)
    assert apart.capabilities == ours.capabilities


@pytest.mark.parametrize("shares", [True, False])
def test_weights_arrive_between_two_steps(
    apart: RemoteEngine, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through shared memory, and in buckets of a few tensors."""
    monkeypatch.setattr(client, "BUCKET", 9000)
    apart._shares = shares
    version, other = apart.version + 1, tiny.model(7)
    ours = tiny.engine(text=True, page_size=16)
    ours.load(Weights(version - 1, 0, tiny.weights(ours._model, 0).tensors))
    apart.load(Weights(version - 1, 0, tiny.weights(ours._model, 0).tensors))

    def between(engine: Any) -> Any:
        return lambda step: step == 5 and engine.load(tiny.weights(other, version))

    asked = [tiny.request("a", 9, n=3, max_tokens=20)]
    found = tiny.finish(apart, asked, between(apart))
    tiny.assert_same(found, tiny.finish(ours, asked, between(ours)), 0)
    assert set(found["a", 0].versions) == {version - 1, version} == {apart.version - 1, version}
    assert apart.probe() == other.probe()
    assert not list(client.SHARED.glob(f"burnish-engine-{os.getpid()}-*"))


@pytest.mark.parametrize("shares", [True, False])
def test_a_cache_of_older_weights_is_seen_behind_a_socket(
    model: Path, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of several buckets, through shared memory and the socket."""
    monkeypatch.setattr(client, "BUCKET", 9000)
    for wanted in (PASS, FAIL):
        own = tiny.engine(text=True, on_update="keep", max_running=8)
        if wanted == FAIL:
            own.scheduler.pages.forget_names = lambda: None  # type: ignore[method-assign]
        with closing(behind(own, model)) as engine:
            engine._shares = shares
            prompts, reference = [tiny.prompt(20)], Reference(model, "fp32", "cpu")
            suite = Suite(engine, reference, prompts, room=75, on_update="keep")
            assert suite.run(UPDATES[0]).status == wanted
            assert suite.run(UPDATES[1]).status == wanted


def test_only_an_engine_that_sleeps_is_put_to_sleep(model: Path) -> None:
    engine, slept = tiny.engine(), list[int]()
    asked = behind(engine, model)
    with pytest.raises(EngineError, match="unknown call 'sleep'"):
        asked.sleep()
    engine.sleep = lambda: slept.append(1)  # type: ignore[attr-defined]
    asked.sleep()
    assert slept == [1]


def test_a_failed_load_leaves_the_old_weights(model: Path) -> None:
    engine = behind(tiny.engine(), model)
    before = engine.probe()
    good = tiny.weights(tiny.model(1), 1)
    name = "model.norm.weight"
    bad = {
        "finite": good.tensors | {name: good.tensors[name] * torch.nan},
        "missing model.norm": {k: v for k, v in good.tensors.items() if k != name},
        "not expected": good.tensors | {name: torch.zeros(3)},
    }
    for rule, tensors in bad.items():
        with pytest.raises(EngineError, match=rf"(?s)engine tiny: .*{rule}.*version 0 stays"):
            engine.load(good._replace(tensors=tensors))
    assert (engine.version, engine.probe()) == (0, before)
    engine.load(good._replace(incarnation=2))
    with pytest.raises(EngineError, match="incarnation 1 can't follow incarnation 2"):
        engine.load(good._replace(incarnation=1))
    assert engine.probe() == tiny.model(1).probe()


@pytest.mark.parametrize("shares", [True, False])
def test_torn_weights_are_refused(
    model: Path, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = behind(tiny.engine(), model)
    engine._shares, before = shares, engine.probe()
    for module in (client, server):
        monkeypatch.setattr(
            module, "checksum_of_bytes", lambda data: checksum_of_bytes(data) + len(threads())
        )
    with pytest.raises(EngineError, match="checksum differs"):
        engine.load(tiny.weights(tiny.model(1), 1))
    assert (engine.version, engine.probe()) == (0, before)


def threads() -> list[str]:
    """A name if this is the main thread: then the sender's checksum is another."""
    return [t.name for t in [threading.current_thread()] if t is threading.main_thread()]


def test_weights_that_stay_old_end_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, newer = tiny.engine(), tiny.model(1)
    monkeypatch.setattr(own, "load", lambda weights: None)
    engine = behind(own, model)
    engine.expect(newer.probe, 1e-4)
    with pytest.raises(EngineError, match=r"version 1 are stale or incomplete"):
        engine.load(tiny.weights(newer, 1))
    with pytest.raises(EngineError, match="stale"):
        engine.step()


def test_small_steps_that_an_engine_misses_end_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bound on rounding, which is wide in bf16; the engine's probe stays to the bit."""
    own, policy = tiny.engine(), tiny.model()
    engine = behind(own, model)
    engine.expect(policy.probe, 1.0)
    scale = policy.layers[0].out.weight.data.mul_
    for version in (1, 2):
        scale(1.05)
        engine.load(tiny.weights(policy, version))
    monkeypatch.setattr(own, "load", lambda weights: None)
    scale(1.0001)  # too little to tell, since bf16 may round it away
    engine.load(tiny.weights(policy, 3))
    scale(1.05)
    with pytest.raises(EngineError, match=r"version 4 are stale.*while the expected ones moved"):
        engine.load(tiny.weights(policy, 4))


def test_abort_returns_the_tokens_so_far(model: Path) -> None:
    engine = behind(tiny.engine(), model)
    engine.submit(tiny.request("a", 9, n=2, max_tokens=40))
    for _ in range(6):
        assert engine.step() == []
    engine.abort("a")
    assert engine.unfinished == 2
    done = engine.step()
    assert [c.finish for c in done] == [Finish.ABORT] * 2
    assert all(0 < len(c.token_ids) <= 6 for c in done)


def test_a_bad_request_is_an_error_and_the_engine_goes_on(model: Path) -> None:
    engine = behind(tiny.engine(), model)
    with pytest.raises(EngineError, match="token ids must lie in"):
        engine.submit(replace(tiny.request("a"), prompt=np.array([999], np.int32)))
    with pytest.raises(EngineError, match="fit the cache"):
        behind(tiny.engine(tokens=16), model).submit(tiny.request("a", 40))
    assert len(tiny.finish(engine, [tiny.request("a")])) == 1


def test_an_unforeseen_error_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tiny.engine()
    monkeypatch.setattr(own, "load", lambda weights: own.nonsense)  # type: ignore[attr-defined]
    engine = behind(own, model)
    with pytest.raises(EngineError, match=r"engine tiny failed at 'load': AttributeError"):
        engine.load(tiny.weights(tiny.model(1), 1))
    with pytest.raises(EngineError, match="failed at 'load'"):
        engine.step()


def test_a_silent_engine_is_named_after_its_deadline(model: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire.send(theirs, server.engine_facts(tiny.engine(), EngineSettings("native", str(model))))
        engine = RemoteEngine(ours, "tiny", 0.2)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"tiny did not answer 'step' within .* 0\.2 s"):
            engine.step()
        assert time.monotonic() - began < 5


def test_clients_are_let_in_by_token_one_at_a_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process is real; killing it is an error that names the server."""
    listener, told = listening.open_listener("127.0.0.1", 0), list[str]()
    port = listener.getsockname()[1]
    url, started = f"tcp://127.0.0.1:{port}", list[Any]()
    settings = EngineSettings("native", str(model), kv_bytes=1 << 20)

    class Known(client.EngineProcess):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    def accept() -> None:
        with suppress(OSError):  # the listener is closed at the end
            listening.accept(listener, "right", settings, sys.executable, told.append)

    monkeypatch.setattr(listening, "EngineProcess", Known)
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with pytest.raises(EngineError, match="can't listen on"):
        listening.open_listener("127.0.0.1", port)
    with pytest.raises(EngineError, match="its token is wrong; set BURNISH_ENGINE_TOKEN"):
        client.connect_engine(url, "wrong", deadline=20)
    engine = client.connect_engine(url, "right", deadline=120)
    with pytest.raises(EngineError, match="serves another client"):
        client.connect_engine(url, "right", deadline=20)
    other = tiny.model(3)
    engine.load(tiny.weights(other, 1))
    assert engine.probe() == other.probe()
    os.killpg(started[0].process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"engine at {url} died at 'step'"):
        engine.step()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(20)
    assert len(started) == 1
    with pytest.raises(EngineError, match="no engine responds at"):
        client.connect_engine(url, "right", deadline=1)


def test_a_dead_engine_is_an_error_with_its_name_and_last_words(
    apart: RemoteEngine,
) -> None:
    """It comes last in this module: it ends the engine that the other tests share."""
    assert apart._child is not None
    with apart._child.log.open("a") as log:
        log.write("out of something\n")
    os.kill(apart._child.process.pid, signal.SIGKILL)
    told = rf"(?s)engine native \(process \d+ of {sys.executable}\) died at 'step' "
    with pytest.raises(
        EngineError, match=told + r"\(it was killed by SIGKILL\).*resume.*out of something"
    ):
        apart.step()
    with pytest.raises(EngineError, match="died at 'step'"):
        apart.step()
