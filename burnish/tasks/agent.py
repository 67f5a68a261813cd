"""The task of agents: an episode is one run of a user's function, which returns the reward.

A row is any JSON object, which the function receives. burnish does not know an agent's messages in
advance, so a prompt has no tokens of its own: each conversation of an episode has its own prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

import numpy as np

from burnish.environments.agent import AgentSettings
from burnish.environments.pool import EnvironmentLimits, EnvironmentPool
from burnish.model.tokenizer import Tokenizer
from burnish.randomness import Purpose
from burnish.recipe.costs import Room
from burnish.recipe.tasks import AgentsTask, AgentTask
from burnish.tasks.environment import (
    CORRECT,
    check_start,
    environment_seed,
    episode_error,
    episode_reward,
    metrics_of,
)
from burnish.tasks.rows import (
    HELD_OUT_SEED,
    DataRow,
    Rows,
    check_trainable,
    load_rows,
    shuffled,
    tell_split,
)
from burnish.tasks.text import plain_text
from burnish.types import Completion, Episode, Finish, Grade, Prompt, Status

LONGEST_SECONDS = 86_400.0
"""Wall time of an episode, with all waiting, after which its process is ended."""


class AgentEpisodes:
    """Rows as the starts of agents, and the grades of their episodes."""

    def __init__(
        self,
        config: AgentsTask,
        *,
        train: Rows,
        held_out: Rows,
        tokenizer: Tokenizer,
        agents: EnvironmentPool,
        seed: int,
    ) -> None:
        """``agents``: the processes of the agents, which have started."""
        self.config, self.agents = config, agents
        self.closing = ExitStack()
        """Further parts of the run that end with the task, such as the server of the agents."""
        self._train, self._seed = train, seed
        self._nothing = np.array(tokenizer.end_ids[:1], np.int32)
        own = partial(environment_seed, HELD_OUT_SEED, Purpose.HELD_OUT_ENVIRONMENT)
        self.validation = [
            self._write(f"validation/{number}", row, own(number))
            for number, row in enumerate(held_out)
        ]

    def prompt(self, number: int) -> Prompt:
        place = shuffled(number, len(self._train), seed=self._seed)
        seed = environment_seed(self._seed, Purpose.ENVIRONMENT, number)
        return self._write(f"train/{place}", self._train[place], seed)

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return [_grade(completion) for _, completion in pairs]

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return response.strip()

    def close(self) -> None:
        self.closing.close()
        self.agents.close()

    def _write(self, name: str, row: DataRow, seed: int) -> Prompt:
        fields = row["row"]
        return Prompt(
            f"{self.config.name}/{name}",
            "",
            self._nothing,
            self.config.name,
            fields,
            question=_question(fields),
            episode=Episode(fields, seed, (), wall_seconds=self.config.wall_seconds),
        )


def _question(fields: dict[str, object]) -> str:
    """Return the text of a row for display: its "prompt" if it has one, or else the row as JSON."""
    prompt = fields.get("prompt", fields.get("question"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(m, dict) and "content" in m for m in prompt):
        return plain_text(prompt)
    return json.dumps(fields, ensure_ascii=False, default=str)


def _grade(completion: Completion) -> Grade:
    error, reward = episode_error(completion), episode_reward(completion)
    parts = metrics_of(completion)
    if error is not None:
        return Grade(math.nan, parts, Status.ERROR, error)
    correct = None if CORRECT not in parts else parts[CORRECT] >= 0.5
    if reward is None and completion.finish is Finish.LENGTH:
        reward = 0.0  # a limit refused a request, and the agent could not go on
    if reward is None:
        return Grade(math.nan, parts, Status.ERROR, "the agent returned no reward")
    return Grade(reward, parts, correct=correct)


def make_agents(
    config: AgentTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
) -> AgentEpisodes:
    """Build a task from rows and the user's function, and start the processes of agents. ``room``
    is not used, because the prompts of agents are not known in advance."""
    return make_episodes(config, open_agents(config), tokenizer=tokenizer, seed=seed)


def make_episodes(
    config: AgentsTask, agents: EnvironmentPool, *, tokenizer: Tokenizer, seed: int
) -> AgentEpisodes:
    """Build a task from the rows of ``config``, and start its ``agents``."""
    train, held_out = load_agent_rows(config, seed)
    check_trainable(train, held_out)
    tell_split(train, held_out, config.validation_rows)
    return AgentEpisodes(
        config,
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        agents=agents.start(),
        seed=seed,
    )


def load_agent_rows(config: AgentsTask, seed: int) -> tuple[Rows, Rows]:
    """Read the rows that agents begin with; return training and validation rows."""
    return load_rows(config, seed=seed, check=check_start)


def open_agents(config: AgentTask) -> EnvironmentPool:
    """Return the processes of a task's agents; they start with the first episode."""
    return EnvironmentPool(config.agent, agent_limits(config), AgentSettings())


def agent_limits(config: AgentsTask) -> EnvironmentLimits:
    """Return the limits of an episode's process. `AgentEngine` enforces task.wall_seconds, because
    the time for which an agent waits for answers does not count."""
    return EnvironmentLimits(
        cpu_seconds=config.cpu_seconds,
        wall_seconds=LONGEST_SECONDS,
        memory_bytes=config.memory_mb * 2**20,
    )


def try_agent(config: AgentTask) -> None:
    """Load the file of the agent once. Raise a DataError if it can't be loaded."""
    with closing(open_agents(config)) as agents:
        agents.start()
