"""The thread that owns an engine and samples the requests of many clients together.

`EngineThread.submit` may be called from any thread. Between two steps of the engine, the thread
submits new requests, aborts those whose future was cancelled, and loads new weights, so requests
join and leave the batch at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from burnish.engine.protocol import Engine, Request, TokenSource
from burnish.errors import BurnishError, EngineError
from burnish.types import Completion, Weights

Completions = tuple[Completion, ...]
"""The completions of a request, in the order of its samples."""


class NewTokens(NamedTuple):
    """Tokens of a sample that were just sampled, with their log-probabilities."""

    sample: int
    tokens: list[int]
    logprobs: list[float]


Listener = Callable[[NewTokens | Completion], None]
"""Callback for the progress of a request. It is called in the engine's thread and must return at
once."""


class QueueFull(EngineError):
    """Raised for a request that has no room, because too many samples are unfinished."""


class Stopped(EngineError):
    """Raised for requests if the engine's thread has stopped, or is stopping."""


@dataclass(frozen=True, eq=False)
class _Call:
    request: Request
    answer: Future[Completions]
    listener: Listener | None = None
    found: dict[int, Completion] = field(default_factory=dict)
    """The completions so far, by sample."""


class EngineThread:
    """Context manager that runs an engine in its own thread: it starts the thread and closes it at
    the end of the block. Nothing else may use the engine in the block."""

    def __init__(self, engine: Engine, capacity: int = 1024, *, serial: bool = False) -> None:
        """``capacity``: maximum number of unfinished samples. ``serial``: sample one request at a
        time, so that equal requests get bitwise equal completions."""
        self._engine, self._capacity, self._serial = engine, capacity, serial
        self._changed = threading.Condition()
        self._new: deque[_Call] = deque()
        self._calls: dict[str, _Call] = {}
        """Calls whose request the engine has, by the request's name."""
        self._load: tuple[Weights, Future[None]] | None = None
        """Weights to load before the next step, and the future that tells when that is done."""
        self._end: EngineError | None = None
        """Why the thread accepts no more requests; None while it does."""
        self.failure: Exception | None = None
        """The exception of the step that failed; None if no step has failed."""
        self.unfinished = 0
        """Number of samples that were submitted and are not complete."""
        if isinstance(engine, TokenSource):
            engine.on_tokens = self._pass_on
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request, listener: Listener | None = None) -> Future[Completions]:
        """Queue a request, and return the future of its completions. Cancelling the future aborts
        the request. ``listener`` gets each completion as soon as it is available, and before it, if
        the engine is a `TokenSource`, its tokens as they are sampled.

        Raise a `QueueFull` error if the request would exceed the capacity, or the error that
        stopped the thread, a `Stopped`. If the engine refuses the request, the future has the
        engine's error; if the thread stops before the request is complete, the future has the
        `Stopped` error.
        """
        call = _Call(request, Future(), listener)
        with self._changed:
            if self._end is not None:
                raise self._end
            if self.unfinished + request.n > self._capacity:
                raise QueueFull(
                    f"the server has {self.unfinished} unfinished samples and accepts "
                    f"{self._capacity}, so {request.n} more do not fit; try again later"
                )
            self.unfinished += request.n
            self._new.append(call)
            self._changed.notify()
        return call.answer

    def load(self, weights: Weights) -> Future[None]:
        """Load weights between two steps, and return a future that is done when they are loaded, or
        has the engine's error. Raise the `Stopped` error if the thread has stopped. A load that
        waits is replaced by a later one, and its future is cancelled."""
        done = Future[None]()
        with self._changed:
            if self._end is not None:
                raise self._end
            if self._load is not None:
                self._load[1].cancel()
            self._load = weights, done
            self._changed.notify()
        return done

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        return self._engine.version

    def close(self) -> None:
        """Fail the requests that are not complete with `Stopped`, and wait for the thread to end,
        which finishes the current step. Closing again does nothing."""
        self._stop(Stopped("the server is stopping"))
        self._thread.join()

    @property
    def reason(self) -> str:
        """Why the thread accepts no more requests; an empty string while it accepts them."""
        return str(self._end or "")

    def _stop(self, end: EngineError) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                self._load_new()
                self._submit_new()
                self._abort_cancelled()
                for completion in self._engine.step():
                    self._take(completion)
        except Exception as error:  # the engine's state is unknown: every client gets the error
            self._stop(Stopped(f"the engine failed: {type(error).__name__}: {error}"))
            self.failure = error
        assert self._end is not None
        if self._load is not None:
            self._load[1].set_exception(self._end)
        for call in (*self._calls.values(), *self._new):
            _fail(call, self._end)

    def _wait(self) -> bool:
        """Wait for a request. Return False if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._end or self._new or self._calls or self._load)
            return self._end is None

    def _load_new(self) -> None:
        with self._changed:
            found, self._load = self._load, None
        if found is None or not found[1].set_running_or_notify_cancel():
            return
        try:
            self._engine.load(found[0])
        except BurnishError as error:  # the engine keeps its weights
            found[1].set_exception(error)
        except Exception as error:
            found[1].set_exception(Stopped(f"the engine failed: {error}"))
            raise
        else:
            found[1].set_result(None)

    def _submit_new(self) -> None:
        while self._new and not (self._serial and self._calls):
            call = self._new[0]
            try:
                self._engine.submit(call.request)
            except Exception as error:  # it concerns this request alone
                self._leave(call)
                _fail(call, error)
            else:
                self._calls[call.request.request_id] = call
            self._new.popleft()

    def _abort_cancelled(self) -> None:
        for name in [name for name, call in self._calls.items() if call.answer.cancelled()]:
            self._engine.abort(name)

    def _pass_on(self, name: str, sample: int, tokens: list[int], logprobs: list[float]) -> None:
        """Tell a request's listener about new tokens."""
        listener = self._calls[name].listener
        if listener is not None:
            listener(NewTokens(sample, tokens, logprobs))

    def _take(self, completion: Completion) -> None:
        """Record a completion; if it is the last one of its request, answer the request."""
        call = self._calls[completion.request_id]
        if call.listener is not None:
            call.listener(completion)
        call.found[completion.sample_index] = completion
        if len(call.found) == call.request.n:
            del self._calls[completion.request_id]
            self._leave(call)
            with suppress(InvalidStateError):  # it was cancelled
                call.answer.set_result(tuple(call.found[i] for i in range(call.request.n)))

    def _leave(self, call: _Call) -> None:
        with self._changed:
            self.unfinished -= call.request.n


def _fail(call: _Call, error: Exception) -> None:
    with suppress(InvalidStateError):  # it was cancelled
        call.answer.set_exception(error)
