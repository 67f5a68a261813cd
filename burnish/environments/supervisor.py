"""The supervisor of episodes: it forks, watches and ends one process per episode.

It loads the user's file once, and after that runs no code of the user. It waits for all episodes at
once and never blocks on one of them. Every episode leads a session of its own, which is killed when
the episode ends, together with the processes that have left the session.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from burnish.console.text import printable
from burnish.environments.agent import AgentSettings, load_agent
from burnish.environments.descendants import (
    child_processes,
    exit_text,
    kill_descendants,
    kill_group,
    reap,
)
from burnish.environments.episode import (
    LENGTH,
    OUT_OF_MEMORY,
    REPLY_BYTES,
    EnvironmentLimits,
    framed,
    play,
    read_reply,
)
from burnish.environments.loading import load_environment, split_spec
from burnish.environments.protocol import EnvironmentCall, Observation, failed_observation
from burnish.environments.tools import ToolSettings, add_tools
from burnish.machine.process import raise_open_files

POLL_SECONDS = 0.05
"""Interval at which a supervisor looks for episodes that have ended, while a call runs."""
IDLE_SECONDS = 0.5
"""The same interval while no call runs."""
OUTPUT_BYTES = 1 << 14
"""Bytes of an episode's output that are written to the log; the rest is discarded."""
TAIL_BYTES = 1 << 11
"""Bytes at the end of an episode's output that the error of a process that has ended quotes."""
CHUNK = 1 << 16
"""Bytes that are read at once."""
OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of processes that another process has killed."""


class EnvironmentFacts(NamedTuple):
    """What a supervisor tells its pool when it has loaded the environment."""

    deterministic: bool
    tools: tuple[Mapping[str, Any], ...]
    """JSON schemas of the tools."""


class PlayCall(NamedTuple):
    """One call of an environment. ``argument`` is the pair of row and seed for ``reset``, the
    model's message for ``step``, and None for ``close``, after which the episode's process ends."""

    number: int
    """Number of the call, which its reply has, too."""
    name: str
    call: EnvironmentCall
    argument: Any


class PlayReply(NamedTuple):
    """The result of the call of that number. ``was_killed`` says that someone else has killed the
    episode's process."""

    number: int
    observation: Observation
    was_killed: bool


@dataclass(eq=False)
class _Episode:
    """An episode's process as the supervisor sees it."""

    name: str
    pid: int
    channel: socket.socket
    output: IO[bytes]
    call: EnvironmentCall = "reset"
    number: int | None = None
    """Number of the call that runs; None if none does."""
    began: float = 0.0
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""
    printed: int = 0
    tail: bytes = b""
    """The end of the output."""
    ended: str | None = None
    """How the process ended between two calls; None while it lives."""
    was_killed: bool = False


class EpisodeSupervisor:
    """Runs episodes of one environment, each in its own process, and enforces their limits."""

    def __init__(
        self,
        pool: Connection,
        limits: EnvironmentLimits,
        spec: str,
        kind: ToolSettings | AgentSettings | None,
        script: Path | None,
    ) -> None:
        """Load ``spec``, an environment, whose model has the tools of ``kind`` if it names any, or
        an agent. ``script`` is the running script, of which only the definitions are executed.
        Raise a DataError if the file or a tool can't be loaded."""
        os.set_inheritable(pool.fileno(), False)
        self.pool = pool
        self.limits = limits
        is_script = split_spec(spec)[0] == script
        if isinstance(kind, AgentSettings):
            self.loaded = load_agent(spec, kind, is_script=is_script)
        else:
            self.loaded = load_environment(spec, is_script=is_script)
            if kind is not None:
                self.loaded = add_tools(self.loaded, kind, script)
        self.own_children = child_processes()  # processes that the file itself has started
        raise_open_files()  # it needs two per episode
        gc.collect()
        gc.freeze()  # so that collections in the episodes do not copy these pages
        self.episodes: dict[str, _Episode] = {}
        # Unlike epoll, this selector is not shared with the forks.
        self.selector = selectors.PollSelector()
        self.selector.register(pool, selectors.EVENT_READ)
        # Replies wait here: a supervisor that blocked on them would not watch the episodes.
        self.pool_socket = socket.socket(fileno=os.dup(pool.fileno()))
        self.replies = bytearray()
        self.leaves_processes = False
        """Whether an episode has ended since the last call of `kill_descendants`."""

    def serve(self, guardian: int) -> None:
        """Answer calls until the guardian dies. Raise EOFError or OSError if the pool has closed
        the connection."""
        while os.getppid() == guardian:
            is_busy = any(one.number is not None for one in self.episodes.values())
            for key, events in self.selector.select(POLL_SECONDS if is_busy else IDLE_SECONDS):
                if key.fileobj is self.pool:
                    if events & selectors.EVENT_READ:
                        self._begin(self.pool.recv())
                elif key.data in self.episodes.values() and not key.data.ended:
                    self._exchange(key.data, key.fileobj, events)
            self._finish()

    def _begin(self, calls: Sequence[PlayCall]) -> None:
        """Begin all calls of a list. If another call of an episode runs, it ends with an error, and
        so does the episode."""
        self._collect(reap())
        for number, name, call, argument in calls:
            if call == "reset":
                self._start(number, name, *argument)
                continue
            episode = self.episodes.get(name)
            if episode is not None and episode.number is not None:
                self._fail(episode, f"the episode was ended during {episode.call}")
                episode = None
            if episode is None:
                self._reply(number, failed_observation(f"episode {name!r} has no process"))
                continue
            episode.number, episode.call, episode.began = number, call, time.monotonic()
            if episode.ended:
                self._fail(episode, f"{episode.ended} before {call}", episode.was_killed)
            else:
                episode.outgoing = framed(pickle.dumps((call, argument)))
                self._send(episode)

    def _start(self, number: int, name: str, row: Mapping[str, Any], seed: int) -> None:
        """Fork the process of an episode, which begins with ``reset``."""
        if name in self.episodes:
            self._fail(self.episodes[name], "the episode was reset")
        began = time.monotonic()
        try:
            with contextlib.ExitStack() as opened:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                ends = zip(os.pipe(), ("rb", "wb"), strict=True)
                reader, writer = (opened.enter_context(open(*end, buffering=0)) for end in ends)
                pid = os.fork()
                if not pid:
                    self._become(theirs, writer.fileno(), [ours, reader], row, seed)
                theirs.close()
                writer.close()
                opened.pop_all()
        except OSError as error:  # too many open files or processes
            said = f"the environment's process can't be started: {error}"
            self._reply(number, failed_observation(said))
            return
        ours.setblocking(False)
        os.set_blocking(reader.fileno(), False)
        episode = _Episode(name, pid, ours, reader, number=number, began=began)
        self.episodes[name] = episode
        self.selector.register(ours, selectors.EVENT_READ, episode)
        self.selector.register(reader, selectors.EVENT_READ, episode)

    def _become(
        self,
        channel: socket.socket,
        output: int,
        others: Sequence[socket.socket | IO[bytes]],
        row: Mapping[str, Any],
        seed: int,
    ) -> NoReturn:
        """Turn this fork into the process of an episode: lead a session, write the output to the
        pipe, close the files of the supervisor, and play."""
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            self.pool.close()
            self.pool_socket.close()
            for one in self.episodes.values():
                one.channel.close()
                one.output.close()
            for file in others:
                file.close()
            play(channel, self.loaded, self.limits, row, seed)
        except BaseException:
            traceback.print_exc()  # into the log
        finally:
            os._exit(1)

    def _exchange(self, episode: _Episode, file: Any, events: int) -> None:
        if file is episode.output:
            self._log(episode)
            return
        if events & selectors.EVENT_WRITE:
            self._send(episode)
        if events & selectors.EVENT_READ:
            self._receive(episode)

    def _log(self, episode: _Episode) -> None:
        """Write the beginning of an episode's output to the log, and discard the rest."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                text = os.read(episode.output.fileno(), CHUNK)
                if not text:
                    self._forget(episode.output)
                    return
                episode.tail = (episode.tail + text)[-TAIL_BYTES:]
                kept = text[: max(0, OUTPUT_BYTES - episode.printed)]
                if kept:
                    os.write(1, kept)
                if len(kept) < len(text) and episode.printed <= OUTPUT_BYTES:
                    os.write(1, b"\n[the other output of this episode is discarded]\n")
                    episode.printed = OUTPUT_BYTES + 1
                episode.printed += len(kept)

    def _send(self, episode: _Episode) -> None:
        """Send as much of the call as the episode's process accepts now."""
        with contextlib.suppress(OSError):  # it is slow, or has died
            sent = episode.channel.send(episode.outgoing)
            episode.outgoing = episode.outgoing[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if episode.outgoing else 0)
        if episode.channel in self.selector.get_map():
            self.selector.modify(episode.channel, events, episode)

    def _receive(self, episode: _Episode) -> None:
        """Receive what the episode's process has sent, and reply to the pool if it is complete."""
        try:
            while part := episode.channel.recv(CHUNK):
                episode.incoming += part
                if len(episode.incoming) > REPLY_BYTES + LENGTH.size:
                    break
        except BlockingIOError:
            part = b"."
        except OSError:
            part = b""
        found, size = episode.incoming, len(episode.incoming) - LENGTH.size
        length = LENGTH.unpack_from(found)[0] if size >= 0 else REPLY_BYTES
        is_valid = size <= length <= REPLY_BYTES and (episode.number is not None or not found)
        if not is_valid:
            self._fail(episode, "the environment's process sent an invalid reply")
        elif size == length:
            observation = read_reply(bytes(found[LENGTH.size :]), episode.call)
            found.clear()
            if observation.error or episode.call == "close":
                self._discard(episode)
            self._answer(episode, observation)
        elif not part:
            self._forget(episode.channel)  # the process has died, or will be late

    def _finish(self) -> None:
        """End episodes that are late, kill what ended episodes have left, and send the replies."""
        self._collect(reap())
        seconds, now = self.limits.wall_seconds, time.monotonic()
        for episode in list(self.episodes.values()):
            if episode.number is not None and now - episode.began > seconds:
                self._fail(episode, f"{episode.call} took more than {seconds:g} s (wall_seconds)")
        if self.leaves_processes:
            self.leaves_processes = False
            kept = [one.pid for one in self.episodes.values() if not one.ended]
            self._collect(kill_descendants([*kept, *self.own_children]))
        self._send_replies()

    def _send_replies(self) -> None:
        """Send as many bytes of the replies as the pool accepts now."""
        with contextlib.suppress(BlockingIOError):
            while self.replies:
                sent = self.pool_socket.send(self.replies[:CHUNK], socket.MSG_DONTWAIT)
                del self.replies[:sent]
        more = selectors.EVENT_WRITE if self.replies else 0
        self.selector.modify(self.pool, selectors.EVENT_READ | more)

    def _collect(self, codes: Mapping[int, int]) -> None:
        """Note that processes have ended with these exit codes."""
        for episode in [one for one in self.episodes.values() if one.pid in codes]:
            if episode.number is not None and episode.channel in self.selector.get_map():
                self._receive(episode)  # what it has sent before
            if episode not in self.episodes.values():
                continue
            code = codes[episode.pid]
            self.leaves_processes = True
            if episode.number is not None:
                self._fail(episode, self._reason(episode.call, code), code in OUTSIDE)
            elif not episode.ended:
                episode.ended = f"the environment's process {exit_text(code)}"
                episode.was_killed = code in OUTSIDE
                self._close_files(episode)

    def _reason(self, call: EnvironmentCall, code: int) -> str:
        """Return why a process that ended with an exit code during a call has failed."""
        if code == -signal.SIGPROF:
            seconds = self.limits.cpu_seconds
            return f"{call} took more than {seconds:g} s of CPU time (cpu_seconds)"
        if code == OUT_OF_MEMORY:
            size = f"{self.limits.memory_bytes / 2**20:g} MB of memory (memory_bytes)"
            return f"{call} took more than {size}"
        return f"the environment's process {exit_text(code)} during {call}"

    def _fail(self, episode: _Episode, error: str, was_killed: bool = False) -> None:
        """End an episode and, if a call runs, reply with its error."""
        self._discard(episode)
        if episode.number is not None:
            output = printable(episode.tail.decode(errors="replace"))
            self._answer(episode, failed_observation(error, output=output), was_killed)

    def _answer(
        self, episode: _Episode, observation: Observation, was_killed: bool = False
    ) -> None:
        number, episode.number = episode.number, None
        assert number is not None
        seconds = time.monotonic() - episode.began
        self._reply(number, observation, seconds, was_killed)

    def _reply(
        self, number: int, found: Observation, seconds: float = 0.0, was_killed: bool = False
    ) -> None:
        reply = PlayReply(number, replace(found, seconds=seconds), was_killed)
        self.replies += framed(pickle.dumps(reply))  # as `Connection.send` frames it

    def _discard(self, episode: _Episode) -> None:
        """Kill the process of an episode and close its files."""
        del self.episodes[episode.name]
        if not episode.ended:
            kill_group(episode.pid)
            self._close_files(episode)
        self.leaves_processes = True

    def _close_files(self, episode: _Episode) -> None:
        self._log(episode)
        self._forget(episode.channel)
        self._forget(episode.output)
        episode.channel.close()
        episode.output.close()

    def _forget(self, file: socket.socket | IO[bytes]) -> None:
        if file in self.selector.get_map():
            self.selector.unregister(file)
