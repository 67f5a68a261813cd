"""The sections about response length: thinking budgets, and length penalties in the reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.recipe.base import BY_NAME, Section, named
from burnish.recipe.objective.piece import Piece, arxiv

Overlong = Literal["keep", "mask", "drop"]
"""Treatment of responses that were truncated at the length limit. "keep": the learner uses them;
"mask": they are excluded from the loss; "drop": also from their group's statistics."""


class ThinkConfig(Section):
    """Budget forcing: the engine ends the thinking of a response that has used up its budget."""

    tokens: int = Field(ge=1, description="sampled tokens after which thinking is ended")
    end: str = Field(
        "</think>", min_length=1, description="text after which a response has ended its thinking"
    )
    phrase: str = Field(
        "</think> <answer>", description="text inserted if the budget is used up before end appears"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end not in self.phrase:
            raise ValueError(
                f"needs a phrase that contains end, got phrase = {self.phrase!r} and end = "
                f"{self.end!r}; set rollout.think.end to the part of the phrase that ends thinking"
            )
        return self


class LengthPiece(Piece):
    """Base class of the length penalties that a recipe can select; ``graders/length.py`` computes
    them."""

    reads_correct: ClassVar[bool] = False
    """Whether the penalty depends on which responses are correct."""
    makes_negative: ClassVar[bool] = True
    """Whether the penalty can turn a reward of 0 negative."""


class NoPenalty(LengthPiece):
    name: Literal["none"] = "none"
    makes_negative: ClassVar[bool] = False
    written: ClassVar[str] = "none"


Coefficient = Annotated[
    float, Field(gt=0, allow_inf_nan=False, description="weight of the penalty")
]


class OverlongPenalty(LengthPiece):
    name: Literal["overlong"] = "overlong"
    paper: ClassVar[str] = f"DAPO, {arxiv('2503.14476')}"
    written: ClassVar[str] = (
        "{coefficient:g} clip((|y_i| − (l_i − {buffer})) / {buffer}, 0, 1),  l_i = max_tokens − "
        "inserted tokens"
    )
    buffer: int = Field(ge=1, description="tokens before the limit; default: a fifth of the limit")
    coefficient: Coefficient = 1.0


class TargetPenalty(LengthPiece):
    name: Literal["target"] = "target"
    paper: ClassVar[str] = f"L1-Exact, {arxiv('2503.04697')}"
    written: ClassVar[str] = "{coefficient:g} | {tokens} − |y_i| |"
    tokens: int = Field(ge=1, description="the length without a penalty")
    coefficient: Coefficient = 3e-4


class AtMostPenalty(LengthPiece):
    name: Literal["at_most"] = "at_most"
    paper: ClassVar[str] = f"L1-Max, {arxiv('2503.04697')}"
    makes_negative: ClassVar[bool] = False
    written: ClassVar[str] = "r_i (1 − clip({coefficient:g} ({tokens} − |y_i|) + {delta:g}, 0, 1))"
    tokens: int = Field(ge=1, description="the length at which a reward is multiplied by delta")
    coefficient: Coefficient = 3e-4
    delta: float = Field(0.5, ge=0, le=1, description="factor of a reward at the length `tokens`")


class AmongCorrectPenalty(LengthPiece):
    name: Literal["among_correct"] = "among_correct"
    paper: ClassVar[str] = arxiv("2502.04463")
    makes_negative: ClassVar[bool] = False
    reads_correct: ClassVar[bool] = True
    written: ClassVar[str] = (
        "{coefficient:g} [i is right] σ((|y_i| − mean) / std over right answers)"
    )
    coefficient: float = Field(0.2, gt=0, lt=1, description="weight of the penalty")


class SolveRatePenalty(LengthPiece):
    name: Literal["solve_rate"] = "solve_rate"
    paper: ClassVar[str] = f"ALP, {arxiv('2506.05256')}"
    reads_correct: ClassVar[bool] = True
    written: ClassVar[str] = "{coefficient:g} max(p_g, 1/G) |y_i| / max_tokens,  p_g = share right"
    coefficient: Coefficient = 0.2


Penalty = OverlongPenalty | TargetPenalty | AtMostPenalty | AmongCorrectPenalty | SolveRatePenalty
AnyPenalty = Annotated[NoPenalty | Penalty, BY_NAME, named("none")]
