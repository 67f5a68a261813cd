"""Advantages: how much better than expected a response or a token was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from burnish.pieces.piece import Function, Piece, name_of, rl

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch, Scores


class Advantage(Piece):
    """How much better than expected a response or a token was.

    It has the name of its function in ``rl.advantages``, and its settings are keywords there.
    """

    group: ClassVar[int] = 2
    """The smallest group that it takes, whatever its settings."""
    over_time: ClassVar[bool] = False
    """Whether it takes a reward per token, [N], and not one per response, [S]."""
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ()
    """The forward passes before the first gradient step that `from_scores` takes."""
    takes_penalty: ClassVar[bool] = True
    """Whether a KL in the reward, which may make it negative, has a place in it."""

    @property
    def smallest_group(self) -> int:
        return self.group

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the grade's parts that it reads, as columns of ``PackedBatch.parts``."""
        return ()

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(rl("advantages", self.name), **self.settings)

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """The advantage of every action, [N]; 0 in other slots."""
        per_response = self.estimator(rewards, batch.group_ids)
        return rl("sequences", "to_tokens")(per_response, batch.is_action, batch.sequence_ids)

    def from_scores(self, rewards: Tensor, batch: PackedBatch, scores: Scores) -> Tensor:
        """The same, if ``scores`` has the passes that this advantage reads."""
        return self.per_token(rewards, batch)


class Raw(Advantage):
    name: Literal["raw"] = "raw"
    written: ClassVar[str] = "A_i = r_i"
    group: ClassVar[int] = 1


class GroupMean(Advantage):
    name: Literal["group_mean"] = "group_mean"
    written: ClassVar[str] = "A_i = r_i − mean_g(r)"


class GroupZscore(Advantage):
    name: Literal["group_zscore"] = "group_zscore"
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / (std_g(r) + {eps:g})"
    eps: float = Field(1e-6, gt=0, description="added to the std")


class LeaveOneOut(Advantage):
    name: Literal["leave_one_out"] = "leave_one_out"
    written: ClassVar[str] = "A_i = r_i − mean of the other r of the group"


class BestOfGroup(Advantage):
    name: Literal["best_of_group"] = "best_of_group"
    group: ClassVar[int] = 1
    centered: bool = Field(False, description="subtract the group's mean")

    def formula(self) -> str:
        return f"A_i = {'(r_i − mean_g(r))' if self.centered else 'r_i'} [r_i = max_g(r)]"


class BatchStd(Advantage):
    name: Literal["batch_std"] = "batch_std"
    of: Literal["advantages", "rewards"] = Field("advantages", description="which have the std")
    eps: float = Field(1e-6, gt=0, description="added to the std")

    def formula(self) -> str:
        of = "r − mean_g(r)" if self.of == "advantages" else "r"
        return f"A_i = (r_i − mean_g(r)) / (std of {of} over the batch + {self.eps:g})"


class PassAtK(Advantage):
    name: Literal["pass_at_k"] = "pass_at_k"
    written: ClassVar[str] = (
        "A_i = (E[M | i is drawn] − E[M]) / (std[M] + {eps:g}),  M = best of {k} responses of the "
        "group, drawn"
    )
    k: int = Field(ge=1, description="responses of which the best counts; below the group size")
    eps: float = Field(1e-6, gt=0, description="added to the std")

    @property
    def smallest_group(self) -> int:
        return self.k + 1


class MaxRL(Advantage):
    name: Literal["maxrl"] = "maxrl"
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / mean_g(r)"
    takes_penalty: ClassVar[bool] = False


Weight = Annotated[float, Field(allow_inf_nan=False)]


class Gdpo(Advantage):
    """Each part of the reward is normalised on its own; ``parts`` has their weights by name."""

    name: Literal["gdpo"] = "gdpo"
    takes_penalty: ClassVar[bool] = False
    parts: dict[str, Weight] = Field(min_length=1, description="the grade's parts, with weights")
    eps: float = Field(1e-6, gt=0, description="added to each std")

    def formula(self) -> str:
        told = " + ".join(f"{weight:g} z_g({part})" for part, weight in self.parts.items())
        return f"A_i = a_i / (std of a over the batch + {self.eps:g}),  a = {told}"

    @property
    def graded(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        how: dict[str, Any] = {"weights": list(self.parts.values()), "eps": self.eps}
        found = rl("advantages", "gdpo")(batch.parts, batch.group_ids, **how)
        return rl("sequences", "to_tokens")(found, batch.is_action, batch.sequence_ids)


class Opo(Advantage):
    name: Literal["opo"] = "opo"
    written: ClassVar[str] = "A_i = r_i − Σ_g |y_j| r_j / Σ_g |y_j|"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        mask, ids = batch.is_action, batch.sequence_ids
        lengths = rl("sequences", "sequence_lengths")(mask, ids)
        found = self.estimator(rewards, batch.group_ids, lengths)
        return rl("sequences", "to_tokens")(found, mask, ids)


class ReinforcePlusPlus(Advantage):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    written: ClassVar[str] = "A_t = whiten over the batch of R_t,  R_t = r_t + {gamma:g} R_(t+1)"
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        return self.estimator(rewards, batch.is_action, sequence_ids=batch.sequence_ids)


class ReinforcePlusPlusBaseline(Advantage):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    written: ClassVar[str] = "A_(i,t) = whiten over the batch of r_i − mean_g(r)"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        groups, mask, ids = batch.group_ids, batch.is_action, batch.sequence_ids
        return self.estimator(rewards, groups, mask, sequence_ids=ids)


class Gae(Advantage):
    """Generalised advantage estimation over the values of a source.

    The source is a function of a script from a packed batch to values [N], ``values[t]`` before
    token t. A critic will be a source with a name.
    """

    name: Literal["gae"] = "gae"
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    values: Function = Field(description="the source of the values, a function from Python")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="1: returns minus values; 0: one step ahead")

    def formula(self) -> str:
        delta = f"δ_t = r_t + {self.gamma:g} V_(t+1) − V_t,  V = {name_of(self.values)}(batch)"
        return f"A_t = δ_t + {self.gamma * self.lam:g} A_(t+1),  {delta}"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        mask, ids = batch.is_action, batch.sequence_ids
        gae, values = rl("advantages", "gae"), self.values(batch)
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, sequence_ids=ids)[0]


class Teacher(Advantage):
    name: Literal["teacher"] = "teacher"
    group: ClassVar[int] = 1
    takes_penalty: ClassVar[bool] = False
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ("proximal", "teacher")
    reward: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The weight of the reward above its group's mean; 0 if the teacher alone is learned from."""

    @property
    def smallest_group(self) -> int:
        return 2 if self.reward else 1

    def formula(self) -> str:
        reward = f" + {self.reward:g} (r_i − mean_g(r))" if self.reward else ""
        return f"A_t = log π_teacher − log π_prox{reward}"

    def from_scores(self, rewards: Tensor, batch: PackedBatch, scores: Scores) -> Tensor:
        mask, ids = batch.is_action, batch.sequence_ids
        found = rl("advantages", "teacher")(scores.proximal, scores.teacher, mask)
        if self.reward:
            above = rl("advantages", "group_mean")(rewards, batch.group_ids)
            found = found + self.reward * rl("sequences", "to_tokens")(above, mask, ids)
        return found


class OwnAdvantage(Advantage):
    """A function of a script: rewards [S] and group ids [S] to advantages [S]."""

    name: Literal["own"] = "own"
    group: ClassVar[int] = 1
    function: Function = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"A_i = {name_of(self.function)}(r, groups)"

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(self.function)


PerGroup = Raw | GroupMean | GroupZscore | LeaveOneOut | BestOfGroup | PassAtK | MaxRL | Opo
PerResponse = PerGroup | BatchStd | Gdpo | OwnAdvantage
AnyAdvantage = PerResponse | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae | Teacher
