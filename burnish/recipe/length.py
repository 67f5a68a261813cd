"""The sections of a recipe about length: think budgets, and penalties as a part of the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.pieces.objective import BY_NAME
from burnish.pieces.piece import Piece
from burnish.sections import Section, named

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe

Overlong = Literal["keep", "mask", "drop"]
"""Responses that were cut at the length limit: keep learns from them; mask takes them out of the
loss; drop takes them out of their group's statistics, too."""


class ThinkConfig(Section):
    """The engine ends the thinking of a response whose budget is spent: forced endings."""

    tokens: int = Field(ge=1, description="sampled tokens after which thinking is ended")
    end: str = Field("</think>", min_length=1, description="a response with it thinks no more")
    phrase: str = Field("</think> <answer>", description="put into a response without the end")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end not in self.phrase:
            raise ValueError(
                f"needs a phrase that holds its end, got phrase = {self.phrase!r} and end = "
                f"{self.end!r}; set rollout.think.end to the part of the phrase that ends thinking"
            )
        return self


class LengthPiece(Piece):
    reads_correct: ClassVar[bool] = False
    """Whether it reads which responses are correct."""
    makes_negative: ClassVar[bool] = True
    """Whether a reward of 0 becomes negative."""


class NoPenalty(LengthPiece):
    name: Literal["none"] = "none"
    makes_negative: ClassVar[bool] = False
    written: ClassVar[str] = "none"


Coefficient = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class OverlongPenalty(LengthPiece):
    name: Literal["overlong"] = "overlong"
    written: ClassVar[str] = (
        "{coefficient:g} clip((|y_i| − (l_i − {buffer})) / {buffer}, 0, 1),  l_i = max_tokens − "
        "inserted tokens"
    )
    buffer: int = Field(ge=1, description="tokens before the limit; left out: a fifth of it")
    coefficient: Coefficient = 1.0


class TargetPenalty(LengthPiece):
    name: Literal["target"] = "target"
    written: ClassVar[str] = "{coefficient:g} | {tokens} − |y_i| |"
    tokens: int = Field(ge=1, description="the length that costs nothing")
    coefficient: Coefficient = 3e-4


class AtMostPenalty(LengthPiece):
    name: Literal["at_most"] = "at_most"
    makes_negative: ClassVar[bool] = False
    written: ClassVar[str] = "r_i (1 − clip({coefficient:g} ({tokens} − |y_i|) + {delta:g}, 0, 1))"
    tokens: int = Field(ge=1, description="the length at which a reward is worth delta of itself")
    coefficient: Coefficient = 3e-4
    delta: float = Field(0.5, ge=0, le=1)


class AmongCorrectPenalty(LengthPiece):
    name: Literal["among_correct"] = "among_correct"
    makes_negative: ClassVar[bool] = False
    reads_correct: ClassVar[bool] = True
    written: ClassVar[str] = (
        "{coefficient:g} [i is right] σ((|y_i| − mean) / std over right answers)"
    )
    coefficient: float = Field(0.2, gt=0, lt=1)


class SolveRatePenalty(LengthPiece):
    name: Literal["solve_rate"] = "solve_rate"
    reads_correct: ClassVar[bool] = True
    written: ClassVar[str] = "{coefficient:g} max(p_g, 1/G) |y_i| / max_tokens,  p_g = share right"
    coefficient: Coefficient = 0.2


Penalty = OverlongPenalty | TargetPenalty | AtMostPenalty | AmongCorrectPenalty | SolveRatePenalty
AnyPenalty = Annotated[NoPenalty | Penalty, BY_NAME, named("none")]


def check(recipe: Recipe) -> None:
    """Raises if a budget or a penalty has no room within the length limit."""
    think, most = recipe.rollout.think, recipe.rollout.max_tokens
    if think is not None:
        lowest = min(most, recipe.validation.max_tokens or most)
        if think.tokens >= lowest:
            raise ValueError(
                f"rollout.think.tokens = {think.tokens} leaves no room for an answer within "
                f"max_tokens = {lowest}; use a smaller budget or more tokens"
            )
    for setting in ("buffer", "tokens"):
        value = getattr(recipe.length, setting, 0)
        if value > most:
            raise ValueError(
                f"length.{setting} = {value} is above rollout.max_tokens = {most}, which no "
                f"response exceeds; use {most} or less"
            )
    advantage = recipe.objective.advantage
    if recipe.length.name != "none" and not advantage.reads_rewards | (
        "length" in advantage.graded
    ):
        remedy = "remove [length]"
        if advantage.name == "gdpo":
            remedy = "add objective.advantage.parts.length = 1, or remove [length]"
        raise ValueError(
            f"length.name = '{recipe.length.name}' has no effect with objective.advantage = "
            f"'{advantage.name}', which does not read it; {remedy}"
        )
    if recipe.length.makes_negative and not advantage.takes_negative:
        raise ValueError(
            f"length.name = '{recipe.length.name}' makes rewards negative, and objective.advantage "
            f"= '{advantage.name}' needs rewards of at least 0; use 'at_most' or 'among_correct', "
            "or another advantage"
        )
    if "length" in advantage.graded and recipe.length.name == "none":
        raise ValueError(
            "objective.advantage.parts.length reads a length penalty, and length.name = 'none' "
            "makes none; choose one, or remove the part"
        )
    if recipe.length.name == "solve_rate" and recipe.rollout.group_size < 2:
        raise ValueError(
            "length.name = 'solve_rate' reads the share of right answers in a group, and "
            f"rollout.group_size = {recipe.rollout.group_size} has none to speak of; use 2 or more"
        )


def describe(recipe: Recipe) -> list[tuple[str, str]]:
    """Lines of a plan; none if the recipe leaves lengths alone."""
    lines, think, overlong = list[tuple[str, str]](), recipe.rollout.think, recipe.rollout.overlong
    if recipe.length.name != "none":
        lines.append(("length", f"r_i ← r_i − {recipe.length.formula()}"))
    if overlong != "keep":
        more = " and their group's statistics" * (overlong == "drop")
        cut = f"responses cut at {recipe.rollout.max_tokens} tokens"
        lines.append(("overlong", f"{cut} leave the loss{more}"))
    if think is not None:
        told = f"after {think.tokens} tokens without {think.end!r}, {think.phrase!r} is put in"
        lines.append(("thinking", told))
    return lines
