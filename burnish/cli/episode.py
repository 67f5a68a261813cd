"""``burnish generate --environment``: one episode, printed turn by turn while it is played. With
``--agent``, its conversations are printed at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from burnish.api import progress_display
from burnish.cli.tables import print_text
from burnish.console.text import counted, printable
from burnish.errors import ConfigError
from burnish.launch.resolve import resolve
from burnish.randomness import Stream
from burnish.recipe.load import load_recipe
from burnish.recipe.recipe import Recipe
from burnish.recipe.tasks import AgentTask, EnvironmentTask
from burnish.types import Completion, Finish, SamplingParams, Turn

KEPT = (
    *("turns", "turn_tokens", "observation_tokens", "system"),
    *("cpu_seconds", "wall_seconds", "memory_mb"),
)
"""Settings of a run's task that its model's episodes keep."""


AGENT_KEPT = ("turns", "turn_tokens", "cpu_seconds", "wall_seconds", "memory_mb")
"""The same settings of a run with an agent."""


def episode_recipe(
    model: str,
    environment: str | None,
    *,
    agent: str | None = None,
    adapter: str | None = None,
    row: str | None = None,
    data: str | None = None,
    max_tokens: int | None = None,
    turns: int | None = None,
    seed: int = 0,
) -> Recipe:
    """Return a recipe that plays one episode of ``environment`` or ``agent``: with ``row``, a JSON
    object, with a row of the file ``data``, or with an empty row if both are None.

    If the model is a run with an environment, the limits are those of the run, unless
    ``max_tokens`` or ``turns`` replace them. Raise a ConfigError
    if the row is not a JSON object, or if both are given.
    """
    task: dict[str, Any] = {"validation_rows": 0}
    rollout: dict[str, Any] = {}
    if (file := Path(model) / "recipe.toml").is_file():
        trained = load_recipe(file)
        kept: tuple[str, ...] = ()
        if isinstance(trained.task, EnvironmentTask) and environment is not None:
            kept = KEPT
        elif isinstance(trained.task, AgentTask) and agent is not None:
            kept = AGENT_KEPT
        if kept:
            task |= {name: getattr(trained.task, name) for name in kept}
            rollout["max_tokens"] = trained.rollout.max_tokens
    if turns is not None:
        task["turns"] = turns
    if max_tokens is not None:
        rollout["max_tokens"] = max_tokens
    if row is not None and data is not None:
        raise ConfigError("--row and --data both name the row; give one of the two")
    task |= {"train": data} if data is not None else {"rows": [_parse_row(row or "{}")]}
    named_task = {"name": "environment", "environment": environment}
    task |= named_task if agent is None else {"name": "agent", "agent": agent}
    named = {"name": model, "adapter": adapter}
    return load_recipe({"task": task, "model": named, "rollout": rollout, "seed": seed})


def _parse_row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--row must be a JSON object, got {text[:80]!r}: {error}; write it in single quotes, "
            "as in --row '{\"secret\": 7}'"
        ) from None
    if not isinstance(row, dict):
        raise ConfigError(
            f"--row must be a JSON object, got {text[:80]!r}; write it as in "
            "--row '{\"secret\": 7}'"
        )
    return row


def play_episode(recipe: Recipe, temperature: float) -> bool:
    """Play one episode of a recipe and print it; return whether the environment worked."""
    with progress_display(None, recipe.model.name):
        resolved = resolve(recipe)
        from burnish.launch.local import build_sampler

        task, engine, _ = build_sampler(resolved)
    recipe = resolved.recipe
    assert isinstance(recipe.task, EnvironmentTask | AgentTask)
    with closing(task):
        prompt = task.prompt(0)
        assert prompt.episode is not None
        print_text(f"── row {printable(json.dumps(prompt.episode.row, ensure_ascii=False))} ──")
        system = prompt.episode.system
        first = [] if system is None else [{"role": "system", "content": system}]
        _print_messages([*first, *prompt.episode.messages])
        params = SamplingParams(temperature, max_tokens=recipe.rollout.max_tokens, seed=recipe.seed)
        is_agent = isinstance(recipe.task, AgentTask)
        done = _played(engine, prompt, params, is_shown=not is_agent)
        if is_agent:
            _print_conversations(done)
    failed = any(turn.error is not None for turn in done.turns)
    end = _ending(done, recipe.task.turns, recipe.rollout.max_tokens)
    rewards = [turn.reward for turn in done.turns if turn.reward is not None]
    reward = f"reward {sum(rewards):g}" if rewards else "no reward"
    print_text(f"── {end}{'' if failed else f'; {reward}'} ──")
    return not failed


def _played(engine: Any, prompt: Any, params: SamplingParams, *, is_shown: bool) -> Completion:
    """Sample an episode; if ``is_shown``, print each turn when the environment has answered it."""
    from burnish.engine.protocol import Request

    name, shown, done = "episode", 0, list[Completion]()
    engine.submit(
        Request(
            name, prompt.token_ids, params=params, stream=Stream.GENERATE, episode=prompt.episode
        )
    )
    while not done:
        done = engine.step()
        if not is_shown:
            continue
        turns = done[0].turns if done else engine.turns_of(name)
        for number, turn in enumerate(turns[shown:], shown + 1):
            _print_turn(number, turn)
        shown = len(turns)
    return done[0]


def _print_conversations(done: Completion) -> None:
    """Print the conversations of an agent, each from its first message."""
    for number, turn in enumerate(done.turns, 1):
        taken = turn.end > turn.start
        for one in done.sequences if taken else ():
            if one.start == turn.start:
                _print_messages(one.messages)
        _print_turn(number, turn, has_answer=number == len(done.turns))
        if not taken and turn.error is not None:
            print_text(f"── failed: {printable(turn.error)} ──")


def _print_turn(number: int, turn: Turn, *, has_answer: bool = True) -> None:
    if turn.end > turn.start:
        print_text(f"── turn {number}, assistant: {counted(turn.end - turn.start, 'token')} ──")
        print_text(printable(turn.text))
        if has_answer:
            print_text(f"── {_answer(turn)} ──")
    _print_messages(turn.messages)


def _answer(turn: Turn) -> str:
    """Describe the environment's answer to a turn in one line."""
    reward = [] if turn.reward is None else [f"reward {turn.reward:g}"]
    metrics = [f"{printable(name)} {value:g}" for name, value in turn.metrics.items()]
    error = [] if turn.error is None else [f"failed: {printable(turn.error)}"]
    who = "agent" if "requests" in turn.metrics else "environment"
    return ", ".join([f"{who}: {1000 * turn.seconds:.1f} ms", *reward, *metrics, *error])


def _print_messages(messages: Sequence[Mapping[str, str]]) -> None:
    for message in messages:
        print_text(f"── {message['role']} ──")
        print_text(printable(message["content"]))


def _ending(done: Completion, turns: int, tokens: int) -> str:
    """Return why an episode ended."""
    taken = [turn for turn in done.turns if turn.end > turn.start]
    count = counted(len(taken), "turn")
    if done.turns and (error := done.turns[-1].error) is not None:
        if not taken:
            return f"the environment did not start: {printable(error)}"
        if "requests" in done.turns[-1].metrics:
            return f"the agent failed after {count}"
        return f"the environment failed in turn {len(taken)}"
    if done.finish is Finish.STOP:
        who = "agent" if "requests" in done.turns[-1].metrics else "environment"
        return f"ended by the {who} after {count}"
    if done.finish is Finish.ABORT:
        return f"aborted after {count}: the model's log-probabilities were not finite"
    if len(taken) >= turns:
        return f"truncated after {count}, the limit (--turns)"
    return f"truncated after {count}: {tokens:,} tokens (--max-tokens), or the model's context"
