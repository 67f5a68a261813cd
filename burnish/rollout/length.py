"""Length penalties on graded groups, and responses that were cut at the length limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from burnish.errors import ConfigError
from burnish.graders.length import PENALTIES, Graded
from burnish.model.tokenizer import Tokenizer
from burnish.rollout.greedy import has_greedy
from burnish.schema.length import Overlong
from burnish.schema.recipe import Recipe
from burnish.types import Completion, Finish, Group

PART = "length"
"""The part of a grade that is its penalty."""
Shape = Callable[[Group], Group]
"""Changes the rewards of a graded group."""


def unshaped(group: Group) -> Group:
    return group


def shaping(recipe: Recipe) -> Shape:
    """The function that adds a recipe's length penalty to the grades of a group.

    A grade that is an error stays as it is and counts in no statistics. A greedy baseline pays the
    same penalty and counts in none either.
    """
    name, settings = recipe.length.name, recipe.length.settings
    if name == "none":
        return unshaped

    def shape(group: Group) -> Group:
        good = np.array([not grade.is_error for grade in group.grades])
        if not good.any():
            return group
        lengths = np.array([c.sampled.sum() for c in group.completions], dtype=np.float64)
        sizes = np.array([len(c.token_ids) for c in group.completions], dtype=np.float64)
        counted = [is_counted(c, recipe.rollout.overlong) for c in group.completions]
        if has_greedy(group):
            counted[-1] = False
        rewards = group.rewards.astype(np.float64)
        given = (rewards, group.correct, lengths, sizes - lengths, np.array(counted))
        change = np.zeros(len(good))
        change[good] = PENALTIES[name](
            Graded(*(each[good] for each in given)), limit=recipe.rollout.max_tokens, **settings
        )
        grades = tuple(
            replace(
                grade, reward=grade.reward + float(own), parts={**grade.parts, PART: float(own)}
            )
            if is_good
            else grade
            for grade, own, is_good in zip(group.grades, change, good, strict=True)
        )
        return replace(group, grades=grades)

    return shape


def is_cut(completion: Completion) -> bool:
    """Whether the response was cut at the length limit."""
    return completion.finish is Finish.LENGTH


def is_counted(completion: Completion, overlong: Overlong) -> bool:
    """Whether the response counts in its group's statistics: ``overlong`` may drop it."""
    return not (overlong == "drop" and is_cut(completion))


def mask_cut(groups: Sequence[Group]) -> list[Group]:
    """Groups whose cut responses leave the loss and stay in the statistics; a group without any
    other response is left out."""
    kept = [
        replace(g, completions=tuple(replace(c, in_loss=not is_cut(c)) for c in g.completions))
        for g in groups
    ]
    return [group for group in kept if any(c.in_loss for c in group.completions)]


def check_phrase(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raises if a think budget's phrase is no text of this tokenizer, or has no room."""
    think, most = recipe.rollout.think, recipe.rollout.max_tokens
    if think is None:
        return
    ids = tokenizer.encode(think.phrase, add_special=False)
    read = tokenizer.decode(ids)
    if think.end not in read:
        raise ConfigError(
            f"rollout.think.phrase = {think.phrase!r} reads {read!r} after this model's tokenizer, "
            f"without the end {think.end!r}; choose a phrase that the tokenizer knows"
        )
    lowest = min(most, recipe.validation.max_tokens or most)
    if think.tokens + len(ids) >= lowest:
        raise ConfigError(
            f"rollout.think.tokens = {think.tokens} and the {len(ids)} tokens of the phrase leave "
            f"no room for an answer within max_tokens = {lowest}; use a smaller budget"
        )
