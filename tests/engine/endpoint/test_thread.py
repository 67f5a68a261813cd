"""One thread samples for many: what it answers, and what one request's failure means to others."""

import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for

import numpy as np
import pytest
import tiny

from burnish.engine.endpoint.thread import EngineThread, NewTokens, QueueFull, Stopped
from burnish.errors import EngineError


class Gated:
    """An engine whose steps wait until the gate is open, or raise."""

    def __init__(self):
        self.gate, self.error, self.engine = threading.Event(), None, tiny.engine()
        self.submit, self.abort = self.engine.submit, self.engine.abort

    def step(self):
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        return self.engine.step()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def keyed(answers):
    return {(one.request_id, one.sample_index): one for answer in answers for one in answer}


def test_requests_of_many_threads_are_answered_as_if_each_was_alone():
    requests = [tiny.request(f"r{i}", 3 + i, n=1 + i % 3, group=i) for i in range(12)]
    answers = {}
    with EngineThread(tiny.engine()) as thread:

        def ask(request):
            answers[request.request_id] = thread.submit(request).result(60)

        clients = [threading.Thread(target=ask, args=[request]) for request in requests]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert thread.unfinished == 0
    found = keyed(answers[request.request_id] for request in requests)
    alone = {}
    for request in requests:
        alone |= tiny.finish(tiny.engine(), [request])
    # Each is within CLOSE of the learner's log-probabilities, on its own side of them.
    tiny.assert_same(found, alone, 2 * tiny.CLOSE)


def test_a_cancelled_request_leaves_the_engine_and_no_other():
    engine = Gated()
    thread = EngineThread(engine)
    futures = [thread.submit(tiny.request(name, n=2)) for name in ("gone", "stays")]
    with thread:
        until(lambda: engine.engine.unfinished == 4)
        futures[0].cancel()
        engine.gate.set()
        assert [one.request_id for one in futures[1].result(60)] == ["stays", "stays"]
        until(lambda: thread.unfinished == 0)
        with pytest.raises(CancelledError):
            futures[0].result()
        assert engine.engine.scheduler.pages.free == engine.engine.scheduler.pages.count


def test_a_refused_request_gets_its_own_error():
    with EngineThread(tiny.engine()) as thread:
        refused = thread.submit(tiny.request("too long", 200))
        accepted = thread.submit(tiny.request("fits"))
        with pytest.raises(EngineError, match="1 to 95 tokens in this model, got 200"):
            refused.result(60)
        assert len(accepted.result(60)) == 1
        assert thread.unfinished == 0


def test_the_queue_has_a_limit():
    engine = Gated()
    with EngineThread(engine, capacity=3) as thread:
        first = thread.submit(tiny.request("first", n=2))
        with pytest.raises(QueueFull, match="2 unfinished samples and accepts 3, so 2 more"):
            thread.submit(tiny.request("second", n=2))
        engine.gate.set()
        first.result(60)
        assert len(thread.submit(tiny.request("second", n=2)).result(60)) == 2


def test_serial_requests_are_bitwise_those_of_an_engine_alone():
    requests = [tiny.request(f"r{i}", 3 + i, n=1 + i % 3, group=i) for i in range(6)]
    engine = Gated()
    with EngineThread(engine, serial=True) as thread:
        futures = [thread.submit(request) for request in requests]
        until(lambda: engine.engine.unfinished)
        assert engine.engine.unfinished == 1
        engine.gate.set()
        found = keyed(future.result(60) for future in futures)
    for request in requests:
        for name, alone in tiny.finish(tiny.engine(), [request]).items():
            assert found[name].token_ids.tolist() == alone.token_ids.tolist()
            assert found[name].logprobs.tolist() == alone.logprobs.tolist()


def test_an_engine_that_fails_fails_every_request():
    engine = Gated()
    engine.error = RuntimeError("out of memory")
    with EngineThread(engine) as thread:
        futures = [thread.submit(tiny.request(name)) for name in "abc"]
        engine.gate.set()
        for future in futures:
            with pytest.raises(Stopped, match="the engine failed: RuntimeError: out of memory"):
                future.result(60)
        until(lambda: thread.failure is engine.error)
        with pytest.raises(Stopped, match="out of memory"):
            thread.submit(tiny.request("d"))


def test_closing_fails_what_is_not_complete():
    engine = Gated()
    with EngineThread(engine) as thread:
        future = thread.submit(tiny.request("long"))
        until(lambda: engine.engine.unfinished)
        threading.Timer(0.1, engine.gate.set).start()
    assert wait_for([future], 1).done
    with pytest.raises(Stopped, match="the server is stopping"):
        future.result()


def test_tokens_and_completions_are_told_as_they_come():
    engine, told = tiny.engine(), []
    with EngineThread(engine) as thread:
        future = thread.submit(tiny.request("r", n=3), told.append)
        done = future.result(60)
    new = [each for each in told if isinstance(each, NewTokens)]
    assert len(told) == len(new) + 3
    for one in done:
        assert any(each is one for each in told)
        own = [each for each in new if each.sample == one.sample_index]
        assert [token for each in own for token in each.tokens] == one.token_ids.tolist()
        logprobs = np.float32([logprob for each in own for logprob in each.logprobs])
        assert logprobs.tolist() == one.logprobs.tolist()


def test_weights_are_loaded_between_steps():
    engine, new = Gated(), tiny.weights(tiny.model(1), 7)
    engine.load = engine.engine.load
    with EngineThread(engine) as thread:
        before = thread.submit(tiny.request("before", max_tokens=40))
        until(lambda: engine.engine.unfinished)
        replaced, loaded = thread.load(tiny.weights(tiny.model(2), 6)), thread.load(new)
        engine.gate.set()
        loaded.result(60)
        assert replaced.cancelled()
        assert {*before.result(60)[0].versions.tolist()} == {0, 7}
        (after,) = thread.submit(tiny.request("after")).result(60)
        assert {*after.versions.tolist()} == {7}
        bad = tiny.weights(tiny.model(1), 8)
        next(iter(bad.tensors.values())).fill_(float("nan"))
        with pytest.raises(EngineError, match="version 7 stays loaded"):
            thread.load(bad).result(60)
        assert len(thread.submit(tiny.request("again")).result(60)) == 1
    alone = tiny.finish(tiny.engine(1), [tiny.request("after")])
    assert after.token_ids.tolist() == alone["after", 0].token_ids.tolist()
    with pytest.raises(Stopped):
        thread.load(new)
