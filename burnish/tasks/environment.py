"""The task of multi-turn episodes: prompts are the first messages of environments, and an episode
earns the rewards that its environment gives.

A user's environment decides what a row means; a row is any JSON object. The rewards of an episode's
turns are added. If the environment gives none, the recipe's reward grades the last turn's text. A
judge grades the last turn, too, and the environment then must not give rewards.
With tools and without an environment, rows have prompts, as in the task "files".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from burnish.calls import CallFormatName
from burnish.environments import guess, prompts
from burnish.environments.pool import EnvironmentLimits, EnvironmentPool
from burnish.environments.protocol import TOOL_CALLS, TOOL_ERRORS
from burnish.environments.sandbox import PythonSource
from burnish.environments.search import SearchSource
from burnish.environments.tools import ToolSettings, ToolSource
from burnish.errors import DataError
from burnish.graders.judge import Judge
from burnish.graders.pool import Grader, GraderLimits, make_grader
from burnish.model.conversation import ConversationFormat, default_call_format
from burnish.model.tokenizer import Tokenizer
from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.costs import Room
from burnish.recipe.tasks import EnvironmentTask
from burnish.tasks.judged import named_rubric
from burnish.tasks.rows import (
    HELD_OUT_SEED,
    DataRow,
    Rows,
    check_prompt,
    check_trainable,
    load_rows,
    shuffled,
    tell_split,
)
from burnish.tasks.text import TODAY, check_system, plain_text
from burnish.types import Completion, Episode, Finish, Grade, Prompt, Status

GAMES = {"guess": f"{guess.__file__}:Guess"}
"""Environments that burnish has, by the name that a recipe gives."""
PROMPTS = f"{prompts.__file__}:Prompts"
"""Environment of a recipe without one."""
CORRECT = "correct"
"""Metric of an environment that tells whether the episode is correct: at least 0.5 in the last turn
that has it."""


class EpisodeTask:
    """Resets environments for prompts, and grades episodes by their turns."""

    def __init__(
        self,
        config: EnvironmentTask,
        *,
        train: Rows,
        held_out: Rows,
        tokenizer: Tokenizer,
        environments: EnvironmentPool,
        grader: Grader | None,
        seed: int,
    ) -> None:
        """``grader`` grades episodes whose environment gives no reward; None if the recipe has no
        reward. The ``environments`` have started."""
        self.config, self.environments, self.grader = config, environments, grader
        self.conversation = conversation_of(config, environments, tokenizer)
        self._tokenizer, self._train, self._seed = tokenizer, train, seed
        self._nothing = np.array([self.conversation.end_id], np.int32)
        own = partial(environment_seed, HELD_OUT_SEED, Purpose.HELD_OUT_ENVIRONMENT)
        self.validation = [
            self._write(f"validation/{number}", row, own(number), is_checked=True)
            for number, row in enumerate(held_out)
        ]

    def prompt(self, number: int) -> Prompt:
        place = shuffled(number, len(self._train), seed=self._seed)
        seed = environment_seed(self._seed, Purpose.ENVIRONMENT, number)
        return self._write(f"train/{place}", self._train[place], seed)

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        rewards = [episode_reward(completion) for _, completion in pairs]
        if self.config.judge is not None:
            self._check_unrewarded(rewards)
        ungraded = [
            (completion.turns[-1].text, _with_messages(prompt, completion, dict(prompt.reference)))
            for (prompt, completion), reward in zip(pairs, rewards, strict=True)
            if reward is None and not episode_error(completion)
        ]
        graded = iter(self.grader.grade(ungraded) if self.grader is not None and ungraded else ())
        return [
            self._grade(completion, reward, graded)
            for (_, completion), reward in zip(pairs, rewards, strict=True)
        ]

    def _check_unrewarded(self, rewards: Sequence[float | None]) -> None:
        """Raise a DataError if the environment gives rewards beside the judge."""
        given = next((reward for reward in rewards if reward is not None), None)
        if given is not None:
            raise DataError(
                f"task.judge grades the last message of an episode, and {_name(self.config)} gave "
                f"an episode the reward {given:g} itself, so that one of the two would be ignored; "
                "return no reward from step, or remove task.judge and task.rubric"
            )

    def _grade(
        self, completion: Completion, reward: float | None, graded: Iterator[Grade]
    ) -> Grade:
        error, parts = (
            episode_error(completion),
            _parts(completion, with_tools=bool(self.config.tools)),
        )
        if error is not None:
            return Grade(math.nan, parts, Status.ERROR, error)
        correct = None if CORRECT not in parts else parts[CORRECT] >= 0.5
        if reward is not None:
            return Grade(reward, parts, correct=correct)
        if completion.finish is Finish.LENGTH and self.grader is None:
            # The environment never saw the end of the episode.
            return Grade(0.0, parts, correct=correct)
        if self.grader is not None:
            grade = next(graded)
            return replace(grade, parts=parts | grade.parts)
        message = (
            "the environment gave no reward; return a reward from step, or set task.reward to a "
            "function that grades the last message, or, with a reward model, task.reward = 'none'"
        )
        return Grade(math.nan, parts, Status.ERROR, message)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return response.strip()

    def close(self) -> None:
        self.environments.close()
        if self.grader is not None:
            self.grader.close()

    def _write(self, name: str, row: DataRow, seed: int, *, is_checked: bool = False) -> Prompt:
        """Reset an environment with a row, and encode its first messages as a prompt.

        If the environment fails, the prompt is an end token, and all of its episodes fail in the
        same way and are counted; with ``is_checked``, a DataError is raised.
        """
        fields = row["row"]
        (found,) = self.environments.reset([(name, fields, seed)])
        self.environments.end([name])
        if found.error is not None and is_checked:
            raise DataError(f"{row.where}: {_name(self.config)}: {found.error}")
        first, seconds = tuple(found.messages), self.config.wall_seconds
        episode = Episode(fields, seed, first, self.config.system, wall_seconds=seconds)
        messages = episode.opening if found.messages else []
        asked = plain_text(messages) if messages else ""
        reference = dict(fields)
        if self.config.judge is not None:
            given = fields.get("rubric", self.config.rubric)
            reference |= {"asked": asked, "rubric": named_rubric(given, row.where)}
        ids = self.conversation.open(messages) if messages else self._nothing
        return Prompt(
            f"{self.config.name}/{name}",
            self._tokenizer.decode(ids),
            ids,
            self.config.name,
            reference,
            question=asked,
            episode=episode,
        )


def make_environment(
    config: EnvironmentTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
) -> EpisodeTask:
    """Build a task from rows and the user's environment, and start the processes of both.

    ``seed``: for the choice of held-out rows, the order of training rows, and the environments of
    training prompts. ``room`` is not used: prompts of environments are not known in advance, and
    the stream skips those that are too long.
    """
    check_system(tokenizer, config.system)
    train, held_out = load_starts(config, seed)
    check_trainable(train, held_out)
    tell_split(train, held_out, config.validation_rows)
    grader: Grader | None = None
    if config.judge is not None:
        grader = Judge(config.judge)
    elif config.reward is not None:
        grader = make_grader(config.reward, reward_limits(config))
    return EpisodeTask(
        config,
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        environments=start_environments(config, tokenizer),
        grader=grader,
        seed=seed,
    )


def load_starts(config: EnvironmentTask, seed: int) -> tuple[Rows, Rows]:
    """Read and check the rows from which environments start; return training and validation
    rows."""
    check = check_start if config.environment is not None else check_prompt_start
    loaded = load_rows(config, seed=seed, check=check)
    if config.judge is not None:
        for row in chain(*loaded):
            named_rubric(row["row"].get("rubric", config.rubric), row.where)
    return loaded


def try_environment(config: EnvironmentTask, row: DataRow, *, must_replay: bool = False) -> None:
    """Load the environment and reset it once with a row. Raise a DataError if it can't be loaded or
    fails or, with ``must_replay``, if it is not deterministic."""
    with closing(open_environments(config)) as environments:
        (found,) = environments.reset([("trial", row["row"], 0)])
        if must_replay and not environments.deterministic:
            raise DataError(
                "objective.advantage = 'vine' replays episodes up to a turn, which needs "
                f"deterministic = True in {_name(config)} and in all tools; set it if row, seed "
                "and actions determine all observations, or use objective.advantage = 'turn_mean'"
            )
    if found.error is not None:
        raise DataError(f"{row.where}: {_name(config)}: {found.error}")


def open_environments(
    config: EnvironmentTask, calls: CallFormatName | None = None
) -> EnvironmentPool:
    """Return the environments of a task; they start with the first episode. ``calls`` is the format
    of the model's calls; None if it is not known yet."""
    limits = EnvironmentLimits(
        cpu_seconds=config.cpu_seconds,
        # An interrupted call that takes all of wall_seconds leaves time for its error.
        wall_seconds=config.wall_seconds + (config.tool_seconds if config.tools else 0.0),
        memory_bytes=config.memory_mb * 2**20,
    )
    given = config.environment
    spec = PROMPTS if given is None else GAMES.get(given, given)
    if not config.tools:
        return EnvironmentPool(spec, limits)
    tools = ToolSettings(
        tuple(_tool_source(config, tool) for tool in config.tools),
        calls or "hermes",
        call_seconds=config.tool_seconds,
        step_seconds=config.wall_seconds,
    )
    return EnvironmentPool(spec, limits, tools)


def _tool_source(config: EnvironmentTask, tool: str) -> ToolSource:
    """Return a tool of the recipe with its settings."""
    if tool == "python":
        return PythonSource(config.memory_mb * 2**20, is_isolated=config.sandbox == "on")
    if tool.startswith("search:"):
        return SearchSource(str(Path(tool.removeprefix("search:")).resolve()))
    return tool


def reward_limits(config: EnvironmentTask) -> GraderLimits:
    """Return the limits of the reward's workers."""
    return GraderLimits(
        cpu_seconds=config.cpu_seconds,
        wall_seconds=config.wall_seconds,
        memory_bytes=config.memory_mb * 2**20,
    )


def _name(config: EnvironmentTask) -> str:
    """Return the setting that an error of an environment names."""
    return config.environment or "task.tools"


def start_environments(config: EnvironmentTask, tokenizer: Tokenizer) -> EnvironmentPool:
    """Start the environments of a task whose tools the model calls in the recipe's format, or in
    the tokenizer's own."""
    calls = config.tool_format
    if config.tools and calls is None:
        calls = default_call_format(tokenizer, now=TODAY)
    return open_environments(config, calls).start()


def conversation_of(
    config: EnvironmentTask, environments: EnvironmentPool, tokenizer: Tokenizer
) -> ConversationFormat:
    """Return the format in which a model reads an episode's messages. The ``environments`` have
    started."""
    return ConversationFormat(tokenizer, environments.schemas, calls=config.tool_format, now=TODAY)


def check_start(row: Any, where: str) -> DataRow:
    """Check the row of an environment, which may be any object; return it as the field "row"."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be an object, got {type(row).__name__}")
    return DataRow({"row": dict(row)}, where, json.dumps(row, sort_keys=True))


def check_prompt_start(row: Any, where: str) -> DataRow:
    """Check a row with a prompt, a text or chat messages; return it as the field "row"."""
    checked = check_prompt(row, where)
    return DataRow({"row": dict(checked)}, where, checked.held_out_by)


def environment_seed(seed: int, purpose: Purpose, number: int) -> int:
    """Return the seed of the environments of a prompt: a number below 2³¹."""
    return int(uniforms(seed, Stream.TASK, number, purpose, 0) * 2**31)


def episode_error(completion: Completion) -> str | None:
    """Return why an environment failed; None if it did not."""
    return completion.turns[-1].error if completion.turns else "the episode has no turn"


def episode_reward(completion: Completion) -> float | None:
    """Return the sum of the turns' rewards; None if no turn has one."""
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    return sum(rewards) if rewards else None


def _parts(completion: Completion, *, with_tools: bool) -> dict[str, float]:
    """Return the parts of an episode's grade: the last value of each of the environment's metrics;
    ``with_tools``, also the counts of an episode that called no tool."""
    none = {TOOL_CALLS: 0.0, TOOL_ERRORS: 0.0} if with_tools else dict[str, float]()
    return none | metrics_of(completion)


def metrics_of(completion: Completion) -> dict[str, float]:
    """Return the last value of each metric of an episode's turns."""
    found = dict[str, float]()
    for turn in completion.turns:
        found |= turn.metrics
    return found


def _with_messages(prompt: Prompt, completion: Completion, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of an episode with all of its messages, for the reward or the judge."""
    assert prompt.episode is not None
    messages: list[Any] = list(completion.first_messages or prompt.episode.messages)
    for turn in completion.turns:
        messages += [{"role": "assistant", "content": turn.text}, *turn.messages]
    return {**row, "messages": messages}


def row_with_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a prompt as the reward gets it, with the messages of a made-up episode."""
    prompt = row["prompt"]
    first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {**row, "messages": [*first, {"role": "assistant", "content": "42"}]}
