"""The section of a recipe that says which groups a step learns from, and which prompts are asked
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from burnish.sections import Section
from burnish.strategy import FreeLoop

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe


class SelectionConfig(Section):
    """A group is dead if nothing can be learned from it. A prompt's solve rate is the share of
    correct responses in its last group."""

    dead_groups: Literal["keep", "drop", "dynamic", "active"] = "keep"
    """drop: the batch gets smaller. dynamic: further prompts are asked, round by round, until the
    batch is full (DAPO). active: the same, each as soon as a group is found dead (OLMo 3). The free
    loop has no rounds: dynamic and active are the same there."""
    dead_by: Literal["advantage", "correct"] = "advantage"
    """advantage: a group is dead if the estimator gives all its responses an advantage of 0.
    correct: if none or all of its responses are correct, before length penalties (DAPO)."""
    max_asked: int = Field(10, ge=2, description="groups asked per group of a rollout, at most")
    on_bound: Literal["stop", "learn"] = Field("stop", description="if max_asked did not suffice")

    leave_at: float | None = Field(None, gt=0, le=1)
    """A prompt that was solved at this rate leaves for the rest of the run (ScaleRL); None: none
    leaves."""
    target: float | None = Field(None, ge=0, le=1)
    """The further a prompt's solve rate is from it, the less often it is asked; None: all are asked
    alike."""
    floor: float = Field(0.1, gt=0, lt=1, description="least chance to be asked, with a target")

    @property
    def remembers(self) -> bool:
        """Whether prompts are chosen by their solve rates."""
        return self.leave_at is not None or self.target is not None

    @property
    def fills(self) -> bool:
        """Whether other prompts are asked in the place of dead groups."""
        return self.dead_groups in ("dynamic", "active")


def check(recipe: Recipe) -> None:
    """Raises where a selection can't work."""
    dead, by = recipe.selection.dead_groups, recipe.selection.dead_by
    if dead != "keep" and by == "correct" and recipe.rollout.group_size < 2:
        raise ValueError(
            "selection.dead_by = 'correct' needs rollout.group_size of at least 2, got 1: none or "
            "all responses of such a group are correct; use selection.dead_groups = 'keep'"
        )
    if dead != "keep" and by == "advantage" and not recipe.objective.judges_groups:
        name = recipe.objective.advantage.name
        cause = f"objective.advantage = '{name}'"
        if recipe.objective.advantage.judges_groups:
            cause = "objective.kl.where = 'reward'"
        raise ValueError(
            f"selection.dead_groups = '{dead}' has no effect with {cause}, which can learn from "
            "a group whose rewards are all equal; use 'keep', or selection.dead_by = 'correct'"
        )
    if (unsaid := _says_nothing(recipe)) and (reader := _reads_correct(recipe)):
        raise ValueError(
            f"{reader} reads which responses are correct, and {unsaid}.reward = 'none' does not "
            "say it; leave it out, or give the task a reward"
        )


def _reads_correct(recipe: Recipe) -> str | None:
    """A setting that reads whether responses are correct; None if there is none."""
    chosen = recipe.selection
    readers = {
        "selection.dead_by = 'correct'": chosen.dead_by == "correct",
        "selection.leave_at": chosen.leave_at is not None,
        "selection.target": chosen.target is not None,
        f"length.name = '{recipe.length.name}'": recipe.length.reads_correct,
    }
    return next((name for name, reads in readers.items() if reads), None)


def _says_nothing(recipe: Recipe) -> str | None:
    """A task whose grades don't say which responses are correct; None if there is none."""
    tasks = recipe.tasks.items()
    return next((path for path, t in tasks if getattr(t, "reward", None) == "none"), None)


def endless(recipe: Recipe) -> list[str]:
    """The settings because of which prompts never come again, so that none has a history."""
    tasks = recipe.tasks.items()
    return [f"{path}.train_prompts" for path, t in tasks if getattr(t, "train_prompts", 1) is None]


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan; it is empty if every group is learned from and every prompt asked."""
    chosen, lines = recipe.selection, list[tuple[str, str]]()
    groups = recipe.prompts_per_rollout
    asked = groups * chosen.max_asked
    if chosen.dead_groups != "keep":
        why = {
            "advantage": "all its advantages are 0",
            "correct": "none or all of its responses are correct, before length penalties",
        }
        lines.append(("a group is dead if", why[chosen.dead_by]))
    if chosen.dead_groups == "drop":
        lines.append(("dead groups", "leave the batch, which gets smaller"))
    elif chosen.fills:
        in_rounds = chosen.dead_groups == "dynamic" and not isinstance(recipe.loop, FreeLoop)
        when = "in further rounds" if in_rounds else "as groups turn out dead"
        told = f"further prompts are asked, {when}, until {groups} groups teach something"
        end = "the run stops" if chosen.on_bound == "stop" else "the step learns from what it has"
        bound = f"{asked:,} groups ({asked * recipe.rollout.group_size:,} responses) per step"
        lines += [("dead groups", told), ("asked at most", f"{bound}; if they are too few, {end}")]
    if chosen.leave_at is not None:
        told = f"are not asked again once {chosen.leave_at:.0%} of a group's responses are right"
        lines.append(("solved prompts", told))
    if chosen.target is not None:
        far = f"|s − {chosen.target:g}| / {max(chosen.target, 1 - chosen.target):g}"
        told = f"a prompt of solve rate s is asked with chance max({chosen.floor:g}, 1 − {far})"
        lines.append(("curriculum", told))
    return [("selection", lines)] if lines else []
