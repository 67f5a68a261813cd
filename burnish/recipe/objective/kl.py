"""Additions to the loss: a KL penalty to a reference, and an importance correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from burnish.recipe.base import LIST, as_table
from burnish.recipe.objective.piece import Piece, arxiv

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch


class Absent(Piece):
    """The recipe has no piece of this kind."""

    name: Literal["none"] = "none"
    written: ClassVar[str] = "none"
    where: ClassVar[None] = None
    refresh: ClassVar[None] = None
    ema: ClassVar[None] = None


class KL(Piece):
    """A KL penalty, in the loss or in the reward, that keeps the policy close to a reference."""

    paper: ClassVar[str] = f"Schulman 2020; {arxiv('2506.09477')}"
    name: Literal["k1", "k2", "k3"]
    coefficient: float = Field(0.01, gt=0, allow_inf_nan=False, description="weight of the KL")
    where: Literal["loss", "reward"] = Field(
        "loss", description="whether the KL is added to the loss or subtracted from the reward"
    )
    refresh: int | None = Field(
        None, ge=1, description="steps after which the policy becomes the reference; None: never"
    )

    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a reference that is a moving average of the policy; None: no average",
    )

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if None not in (self.refresh, self.ema):
            raise ValueError(
                "has a reference that is refreshed or a moving average, got refresh = "
                f"{self.refresh} and ema = {self.ema:g}; remove one"
            )
        return self

    @property
    def moves(self) -> bool:
        """Whether the reference changes during a run."""
        return self.refresh is not None or self.ema is not None

    def formula(self) -> str:
        values = {"k1": "x", "k2": "½ x²", "k3": "exp(−x) + x − 1"}
        return f"{self.name} = {values[self.name]},  x = log π − log π_ref"

    def per_token(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """Return the estimate of the KL for each token, [N], from the policy's ``logprobs`` and the
        ``reference``'s log-probabilities, [N] each."""
        from burnish.rl.kl import k1, k2, k3

        estimators = {"k1": k1, "k2": k2, "k3": k3}
        return estimators[self.name](logprobs, reference)


class Importance(Piece):
    """A weight per token that corrects the difference between sampler and learner."""

    ordered: ClassVar[tuple[str, str] | None] = ("low", "high")
    papers: ClassVar[dict[str, str]] = {
        "truncate": "truncated importance sampling",
        "mask": f"IcePop, {arxiv('2510.18855')}",
        "reject": "[seq-mask-tis](https://github.com/NVIDIA-NeMo/RL/pull/1899)",
    }
    name: Literal["truncate", "mask", "reject"]
    level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="ratio of a token, of a response (product), or geometric mean over a response",
    )
    low: float = Field(0.0, ge=0, allow_inf_nan=False, description="smallest ratio")
    high: float = Field(2.0, gt=0, description="largest ratio; inf: unbounded")

    @property
    def weighs(self) -> bool:
        """Whether it weights tokens by the ratio, instead of only rejecting some of them."""
        return self.name != "reject"

    def formula(self) -> str:
        over = {"token": "", "sequence": "product over the response of "}
        mean = over.get(self.level, "geometric mean over the response of ")
        u = f"u_t = {mean}π_prox / π_behavior"
        if self.name == "truncate":
            return f"v_t = clip(u_t, {self.low:g}, {self.high:g}),  {u}"
        inside = "u_t" if self.weighs else "1"
        return f"v_t = {inside} if {self.low:g} ≤ u_t ≤ {self.high:g}, else 0,  {u}"

    def weights(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        """Return the importance weight of each token, [N], without gradient. ``proximal`` has the
        log-probabilities under the proximal policy, [N]."""
        from burnish.rl.ratios import accepted, keep_between, truncate

        bounds = {"truncate": truncate, "mask": keep_between, "reject": accepted}
        ratio = self._ratio(proximal, batch)
        return bounds[self.name](ratio, low=self.low, high=self.high)

    def is_outside(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        """Return whether the ratio of each token is outside of the bounds, [N] bool. ``proximal``
        has the log-probabilities under the proximal policy, [N]."""
        ratio = self._ratio(proximal, batch)
        return (ratio < self.low) | (ratio > self.high)

    def _ratio(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.ratios import importance_ratio

        behavior, mask, ids = batch.behavior_logprobs, batch.is_action, batch.sample_ids
        return importance_ratio(proximal, behavior, mask, level=self.level, sequence_ids=ids)


def as_corrections(given: Any) -> Any:
    """Expand the short forms of an importance correction: a bare name, a table without a name
    (which means "none"), or a list of names and tables.

    A list of one piece becomes that piece. Raise a ValueError for an empty list.
    """
    if not isinstance(given, list | tuple):
        table = as_table(given)
        return {"name": "none", **table} if isinstance(table, Mapping) else table
    if not given:
        raise ValueError("is an empty list; use 'none', or a list of pieces")
    pieces = [as_table(piece) for piece in given]
    return pieces if len(pieces) > 1 else pieces[0]


def kind_of_correction(given: Any) -> Any:
    """Return the tag of an importance correction: its name, or "list"."""
    if isinstance(given, list | tuple):
        return LIST
    return given.get("name") if isinstance(given, Mapping) else getattr(given, "name", given)


def check_corrections(pieces: tuple[Importance, ...]) -> tuple[Importance, ...]:
    """Raise a ValueError if a list has a piece twice, or two pieces that weight by the ratio; its
    product would then contain the ratio twice. Return the list."""
    texts = [f"'{piece.name}' per {piece.level}" for piece in pieces]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ValueError(f"has {twice} twice; remove one")
    weighing = [piece for piece in pieces if piece.weighs]
    if len(weighing) > 1:
        taken = {piece.level for piece in pieces if not piece.weighs}
        free = next((piece for piece in reversed(weighing) if piece.level not in taken), None)
        remedy = "remove one of them"
        if free is not None:
            remedy += f", or use name = 'reject', whose weight is 0 or 1, for '{free.name}' per "
            remedy += free.level
        both = " and ".join(f"'{piece.name}' per {piece.level}" for piece in weighing)
        raise ValueError(f"weights each token by the ratio more than once, by {both}; {remedy}")
    return pieces


OneCorrection = Annotated[Importance, BeforeValidator(as_table)]
AnyImportance = Annotated[
    Annotated[Absent, Tag("none")]
    | Annotated[Importance, Tag("truncate")]
    | Annotated[Importance, Tag("mask")]
    | Annotated[Importance, Tag("reject")]
    | Annotated[tuple[OneCorrection, ...], AfterValidator(check_corrections), Tag(LIST)],
    Discriminator(kind_of_correction),
    BeforeValidator(as_corrections),
]
"""No importance correction, one piece, or a list of at least two, whose weights are multiplied."""
