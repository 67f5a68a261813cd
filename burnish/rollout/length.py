"""Length penalties on graded groups, and the treatment of responses that were truncated at the
length limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from burnish.errors import ConfigError
from burnish.graders.length import PENALTIES, GradedResponses
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.length import AnyPenalty, Overlong, ThinkConfig
from burnish.rollout.greedy_baseline import has_greedy
from burnish.types import Completion, Finish, Group

PART = "length"
"""Name of the grade's part that holds the length penalty."""
Shape = Callable[[Group], Group]
"""Returns a graded group with changed rewards."""


def unshaped(group: Group) -> Group:
    """Return the group unchanged."""
    return group


def length_penalty(config: AnyPenalty, overlong: Overlong, max_tokens: int) -> Shape:
    """Return a function that adds a recipe's length penalty to the rewards of a graded group, and
    stores it as the part `PART` of each grade.

    A grade that is an error is not changed and not included in the group's statistics. A greedy
    baseline gets the same penalty, but is not included in the statistics either.
    """
    name, settings = config.name, config.settings
    if name == "none":
        return unshaped

    def shape(group: Group) -> Group:
        good = np.array([not grade.is_error for grade in group.grades])
        if not good.any():
            return group
        lengths = np.array([c.sampled.sum() for c in group.completions], dtype=np.float64)
        sizes = np.array([len(c.token_ids) for c in group.completions], dtype=np.float64)
        counted = [is_counted(c, overlong) for c in group.completions]
        if has_greedy(group):
            counted[-1] = False
        rewards = group.rewards.astype(np.float64)
        given = (rewards, group.correct, lengths, sizes - lengths, np.array(counted))
        change = np.zeros(len(good))
        change[good] = PENALTIES[name](
            GradedResponses(*(each[good] for each in given)),
            limit=max_tokens,
            **settings,
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
    """Return whether a response was truncated at the length limit."""
    return completion.finish is Finish.LENGTH


def is_counted(completion: Completion, overlong: Overlong) -> bool:
    """Return whether a response is included in its group's statistics: all are, except truncated
    responses if ``overlong`` is "drop"."""
    return not (overlong == "drop" and is_cut(completion))


def mask_cut(groups: Sequence[Group]) -> list[Group]:
    """Return copies of the groups in which truncated responses are excluded from the loss
    (``in_loss`` is False), but not from their group's statistics. A group in which all responses
    are truncated is left out."""
    kept = [
        replace(g, completions=tuple(replace(c, in_loss=not is_cut(c)) for c in g.completions))
        for g in groups
    ]
    return [group for group in kept if any(c.in_loss for c in group.completions)]


def check_phrase(think: ThinkConfig, max_tokens: int, tokenizer: Tokenizer) -> None:
    """Raise a ConfigError if ``think.phrase``, which is inserted when a think budget is used up,
    does not contain the marker ``think.end`` after the tokenizer has encoded and decoded it, or if
    budget and phrase leave no room for an answer within ``max_tokens``."""
    ids = tokenizer.encode(think.phrase, add_special=False)
    read = tokenizer.decode(ids)
    if think.end not in read:
        raise ConfigError(
            f"rollout.think.phrase = {think.phrase!r} reads {read!r} after this model's tokenizer, "
            f"without the end {think.end!r}; choose a phrase that the tokenizer knows"
        )
    if think.tokens + len(ids) >= max_tokens:
        raise ConfigError(
            f"rollout.think.tokens = {think.tokens} and the {len(ids)} tokens of the phrase leave "
            f"no room for an answer within max_tokens = {max_tokens}; use a smaller budget"
        )
