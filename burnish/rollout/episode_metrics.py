"""Metrics of multi-turn episodes: turns, tool calls, and tokens of the environment's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.environments.protocol import TOOL_CALLS, TOOL_ERRORS
from burnish.types import Group


def episode_columns(responses: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the metrics of multi-turn episodes, one value per episode, by their names; an empty
    dict if no response is an episode. A response is a mapping as in `averages`."""
    episodes = [response for response in responses if response.get("turns")]
    if not episodes:
        return {}
    turns = [taken_turns(episode["turns"]) for episode in episodes]
    columns: dict[str, list[float]] = {
        "turns": [len(own) for own in turns],
        "observation_tokens": [_inserted(episode) for episode in episodes],
    }
    calls = [_last(own, TOOL_CALLS) for own in turns]
    if all(count is None for count in calls):
        calls = [_tool_messages(own) for own in turns]
    errors = [_last(own, TOOL_ERRORS) for own in turns]
    for name, counts in {TOOL_CALLS: calls, TOOL_ERRORS: errors}.items():
        if any(count is not None for count in counts):
            columns[name] = [count or 0.0 for count in counts]
    return columns


def lone_turns(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of turns that no other episode of their group reached, as ``lone_turns``; an
    empty dict if there are no turns. Episodes whose grade is an error do not count."""
    lone = total = 0
    for group in groups:
        counts = [len(c.turns) for c, grade in group.graded if not grade.is_error]
        longest, second = sorted([0, 0, *counts])[-1:-3:-1]
        lone += longest - second
        total += sum(counts)
    return {"lone_turns": lone / total} if total else {}


def taken_turns(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the turns that the policy took. A turn without tokens only has the error of an
    environment that failed before the first turn."""
    return [turn for turn in turns if turn["end"] > turn["start"]]


def _last(turns: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the last value of an environment's metric; None if no turn has it."""
    values = [turn["metrics"][metric] for turn in turns if metric in turn["metrics"]]
    return float(values[-1]) if values else None


def _tool_messages(turns: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the number of messages of the role "tool"; None if there is none."""
    count = sum(message["role"] == "tool" for turn in turns for message in turn["messages"])
    return float(count) if count else None


def _inserted(episode: Mapping[str, Any]) -> int:
    return int(episode["inserted"]) if "inserted" in episode else len(episode["forced"])
