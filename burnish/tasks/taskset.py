"""The tasks of a verifiers taskset: an episode is one task, played by the taskset's harness.

The rows are the taskset's tasks, which another process describes. Some of them are held out, by
their contents. The agents' processes load the taskset again, once for all episodes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from burnish.environments import taskset_agent
from burnish.environments.agent import AgentSettings
from burnish.environments.pool import EnvironmentPool
from burnish.environments.taskset import TasksetSource
from burnish.environments.taskset_rows import LOAD_SECONDS, describe_tasks
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.costs import Room
from burnish.recipe.tasks import VerifiersTask
from burnish.tasks.agent import AgentEpisodes, agent_limits
from burnish.tasks.data.lines import ScriptRows
from burnish.tasks.rows import DataRow, Rows, check_trainable, split, tell_split

AGENT = f"{taskset_agent.__file__}:make_agent"
"""The agent that plays tasks of a taskset."""


def make_taskset(
    config: VerifiersTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
) -> AgentEpisodes:
    """Build a task from a taskset, and start the processes that play its tasks. ``room`` is not
    used, because the prompts of a harness are not known in advance."""
    train, held_out = load_task_rows(config, seed)
    check_trainable(train, held_out)
    tell_split(train, held_out, config.validation_rows)
    return AgentEpisodes(
        config,
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        agents=open_taskset(config).start(),
        seed=seed,
    )


def load_task_rows(config: VerifiersTask, seed: int) -> tuple[Rows, Rows]:
    """Return a row for each task of the taskset: training and validation rows. Raise a DataError if
    the taskset can't be loaded, and a MissingExtra error if verifiers is not installed."""
    source = ScriptRows(describe_tasks(source_of(config)), config.taskset)
    rows = Rows(source, _check_row)
    kept, held_out = split(rows.hash_prompts(), config.validation_rows, seed=seed)
    return rows.select(kept), rows.select(held_out)


def open_taskset(config: VerifiersTask) -> EnvironmentPool:
    """Return the processes that play tasks; they start with the first episode."""
    limits = replace(agent_limits(config), start_seconds=LOAD_SECONDS)
    return EnvironmentPool(AGENT, limits, AgentSettings(given=asdict(source_of(config))))


def source_of(config: VerifiersTask) -> TasksetSource:
    """Return the taskset that a recipe names."""
    file = config.taskset_file
    return TasksetSource(
        taskset=config.taskset if file is None else str(Path(file).resolve()),
        env=config.env,
        tasks=config.tasks,
        role=config.role,
        runs_commands=config.commands == "allow",
    )


def _check_row(row: Any, where: str) -> DataRow:
    """Return a task's description as the field "row"; it is held out by the task's contents."""
    return DataRow({"row": dict(row)}, where, row["key"])
