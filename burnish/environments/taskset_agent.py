"""The harness of a verifiers taskset as an agent.

verifiers runs the harness's program and relays its requests to burnish's endpoint. A trace is what
one role does; its requests have its id as X-Session-ID. Each episode is played in a fork of the
process that has loaded the taskset, because loading takes seconds: verifiers keeps an HTTP client
for each base URL until its environment closes, and here that is the end of the episode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from burnish.console.text import printable
from burnish.environments.taskset import (
    LONGEST_ERROR,
    LoadedTaskset,
    TasksetSource,
    load_taskset,
    row_of,
)

KEY = "BURNISH_ENDPOINT_KEY"
"""Environment variable with the key of the endpoint, which verifiers reads."""

Agent = Callable[[Any, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Plays the task of a row with an OpenAI client; returns the reward, metrics, and "unlearned"."""


class AgentFailure(Exception):
    """An episode has no reward; the text says why."""


def make_agent(given: Mapping[str, Any]) -> Agent:
    """Load a taskset, given by the fields of `TasksetSource`; return the agent that plays one task
    in a process of its own. Raise an error like `load_taskset`."""
    loaded = load_taskset(TasksetSource(**given))

    async def run(client: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        return await play_task(loaded, row, str(client.base_url), str(client.api_key))

    return run


async def play_task(
    loaded: LoadedTaskset, row: Mapping[str, Any], base_url: str, key: str
) -> dict[str, Any]:
    """Play the task of a row with the model at an endpoint; return the result of `trace_result`.
    Raise an AgentFailure if the episode has no reward."""
    import verifiers.v1 as vf

    task = loaded.tasks[row["task"]] if row["task"] < len(loaded.tasks) else None
    if task is None or row_of(task)["key"] != row["key"]:
        raise AgentFailure(
            f"the taskset has another task {row['task']} than when the run began; its load must "
            "return the same tasks each time"
        )
    os.environ[KEY] = key
    client = vf.EvalClientConfig(base_url=base_url.rstrip("/"), api_key_var=KEY)
    async with loaded.env.serving():
        episode = await loaded.env.run_episode(task, vf.ModelContext("policy", client))
    return trace_result(loaded, episode)


def trace_result(loaded: LoadedTaskset, episode: Any) -> dict[str, Any]:
    """Return the reward and the metrics of the episode's trace that learns, and the ids of the
    others as "unlearned". Raise an AgentFailure if a part of the episode failed, if the trace has
    no finite reward, or if not exactly one trace learns.

    A reward is one of the trace. A signal that verifiers did not compute counts 0 in its sum, so
    an episode with such a signal is a failure, although verifiers calls it "ok".
    """
    if episode.errors:
        raise AgentFailure(_quoted(episode.errors[-1]))
    learned = [trace for trace in episode.traces if _learns(loaded, trace)]
    accepted = loaded.env.complete(episode)
    for trace in learned if accepted else [*learned, *episode.traces]:
        if not trace.ok:
            error = trace.last_error
            reason = trace.stop_condition if error is None else _quoted(error)
            raise AgentFailure(f"{trace.agent.name}: {reason}")
    if not accepted:
        raise AgentFailure("the environment does not accept its episode (complete)")
    if len(learned) != 1:
        raise AgentFailure(_which_learns(loaded, episode, learned))
    (trace,) = learned
    if not trace.rewards:
        raise AgentFailure(
            "the trace has no reward; give the task a method with @verifiers.v1.reward"
        )
    for name, one in trace.rewards.items():
        if one is None:
            why = trace.stop_condition or "no reason is known"
            raise AgentFailure(f"the reward {name} was not computed ({why})")
        if not math.isfinite(one.value):
            raise AgentFailure(f"the reward {name} must be finite, got {one.value}")
    metrics = {name: one.score for name, one in trace.rewards.items()}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    unlearned = [one.id for one in episode.traces if one is not trace]
    return {**metrics, "reward": trace.reward, "unlearned": unlearned}


def _learns(loaded: LoadedTaskset, trace: Any) -> bool:
    """Whether a trace is learned from: its role is trainable, is the recipe's, and is played by the
    policy."""
    name = trace.agent.name
    if loaded.source.role not in (None, name):
        return False
    return bool(trace.agent.trainable) and loaded.roles[name].client is None


def _which_learns(loaded: LoadedTaskset, episode: Any, learned: Sequence[Any]) -> str:
    names = ", ".join(trace.agent.name for trace in learned or episode.traces)
    if learned:
        return (
            f"an episode must have one trace that learns, got {len(learned)} ({names}); set "
            "task.role to one role, which must play once"
        )
    return f"no trace of the episode learns (roles: {names}); set task.role, or trainable = True"


def _quoted(error: Any) -> str:
    return printable(f"{error.type}: {error.message}"[:LONGEST_ERROR])
