"""Advantages: how much better than expected a response or a token was."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, field_validator

from burnish.pieces.piece import Function, Piece, name_of, rl

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.schema.recipe import Recipe
    from burnish.types import PackedBatch, Scores

STEP = 16
"""Tokens that a line or a sentence is taken to have if its continuations are counted."""


CRITIC = "critic"
"""The recipe's critic as a source of values."""


class Advantage(Piece):
    """How much better than expected a response or a token was.

    It has the name of its function in ``rl.advantages``, and its settings are keywords there.
    """

    group: ClassVar[int] = 2
    """The smallest group that it takes, whatever its settings."""
    over_time: ClassVar[bool] = False
    """Whether it takes a reward per token, [N], and not one per response, [S]."""
    judges_groups: ClassVar[bool] = True
    """Whether a group's advantages follow from the group alone, so that a group is dead if all of
    them are 0. False: the other groups, a critic or a teacher decide, and no group is dead."""
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ()
    """The forward passes before the first gradient step that `from_scores` takes."""
    takes_negative: ClassVar[bool] = True
    """Whether it takes negative rewards, which a length penalty may make."""
    takes_penalty: ClassVar[bool] = True
    """Whether a KL in the reward, which may make it negative, has a place in it."""

    reads_scale: ClassVar[bool] = True
    """Whether a factor of a group's rewards changes its advantages by more than eps does."""

    @property
    def smallest_group(self) -> int:
        return self.group

    @property
    def reads_rewards(self) -> bool:
        """Whether it reads the reward of a response, of which a length penalty is a part."""
        return True

    @property
    def is_scaled(self) -> bool:
        """Whether ``task.scales`` changes its advantages."""
        return self.reads_scale

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the grade's parts that it reads, as columns of ``PackedBatch.parts``."""
        return ()

    @property
    def reads_critic(self) -> bool:
        """Whether it needs the values of the recipe's critic."""
        return False

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(rl("advantages", self.name), **self.settings)

    def check(self, recipe: Recipe) -> None:
        """Raises where the recipe does not go with it."""

    def continued(self, length: int) -> int:
        """Tokens that are sampled, beside a response of ``length`` tokens, to value its steps."""
        return 0

    def given(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
        """The tensors that the estimator takes, if it gives an advantage per response."""
        return rewards, batch.group_ids

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """The advantage of every action, [N]; 0 in other slots."""
        return _on_tokens(self.estimator(*self.given(rewards, batch)), batch)

    def is_dead(self, batch: PackedBatch) -> bool:
        """Whether a group, which is the whole batch, teaches nothing: all its advantages are 0,
        whatever other groups there are."""
        assert self.judges_groups, "a group alone does not say"
        rewards = batch.rewards
        if self.over_time:
            rewards = rl("sequences", "on_last_action")(
                rewards, batch.is_action, batch.sequence_ids
            )
        return not bool(self.per_token(rewards, batch).any())

    def from_scores(self, rewards: Tensor, batch: PackedBatch, scores: Scores) -> Tensor:
        """The same, if ``scores`` has the passes that this advantage reads."""
        return self.per_token(rewards, batch)


def _on_tokens(per_response: Tensor, batch: PackedBatch) -> Tensor:
    """The values of responses [S] on their actions, [N]; 0 in other slots."""
    return rl("sequences", "to_tokens")(per_response, batch.is_action, batch.sequence_ids)


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
    reads_scale: ClassVar[bool] = False
    eps: float = Field(1e-6, gt=0, description="added to the std")


class LeaveOneOut(Advantage):
    name: Literal["leave_one_out"] = "leave_one_out"
    written: ClassVar[str] = "A_i = r_i − mean of the other r of the group"


class BestOfGroup(Advantage):
    name: Literal["best_of_group"] = "best_of_group"
    group: ClassVar[int] = 1
    centered: bool = Field(False, description="subtract the group's mean")

    @property
    def smallest_group(self) -> int:
        return 2 if self.centered else 1

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
        "A_i = (E[M | i is drawn] − E[M]) / (std[M] + {eps:g}),  M = best reward of {k} responses "
        "drawn from the group"
    )
    reads_scale: ClassVar[bool] = False
    k: int = Field(ge=1, description="responses of which the best counts; below the group size")
    eps: float = Field(1e-6, gt=0, description="added to the std")

    @property
    def smallest_group(self) -> int:
        return self.k + 1


class MaxAtK(Advantage):
    name: Literal["max_at_k"] = "max_at_k"
    k: int = Field(ge=2, description="responses of which the best counts; up to the group size")
    eps: float | None = Field(None, gt=0, description="divides by std + eps; None: no division")

    @property
    def smallest_group(self) -> int:
        return self.k

    @property
    def is_scaled(self) -> bool:
        return self.eps is None

    def formula(self) -> str:
        scale = "" if self.eps is None else f" / (std_g(r) + {self.eps:g})"
        sets = f"I: sets of {self.k} responses that hold i"
        return f"A_i = Σ_I (max_I r − max_(I without i) r) / C(G, {self.k}){scale},  {sets}"


class MaxRL(Advantage):
    name: Literal["maxrl"] = "maxrl"
    takes_negative: ClassVar[bool] = False
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / (mean_g(r) + {eps:g})"
    reads_scale: ClassVar[bool] = False
    takes_penalty: ClassVar[bool] = False
    eps: float = Field(1e-6, gt=0, description="added to the mean")


class Gdpo(Advantage):
    """Each part of the reward is normalised on its own; ``parts`` has their weights by name."""

    name: Literal["gdpo"] = "gdpo"
    reads_scale: ClassVar[bool] = False
    takes_penalty: ClassVar[bool] = False
    parts: dict[str, FiniteFloat] = Field({}, validate_default=True)
    """The weight of each part of the grade that counts, by its name."""
    eps: float = Field(1e-6, gt=0, description="added to each std")

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, float]) -> dict[str, float]:
        if not parts:
            raise ValueError(
                "needs a part of the grade and its weight, got none; set one, as --set "
                "objective.advantage.parts.answer=1 does"
            )
        return parts

    def formula(self) -> str:
        told = " + ".join(f"{weight:g} z_g({part})" for part, weight in self.parts.items())
        return f"A_i = a_i / (std of a over the batch + {self.eps:g}),  a = {told}"

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def graded(self) -> tuple[str, ...]:
        return tuple(self.parts)

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(rl("advantages", "gdpo"), weights=list(self.parts.values()), eps=self.eps)

    def given(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
        return batch.parts, batch.group_ids


class Opo(Advantage):
    name: Literal["opo"] = "opo"
    written: ClassVar[str] = "A_i = r_i − Σ_g |y_j| r_j / Σ_g |y_j|"

    def given(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
        return rewards, batch.group_ids, batch.lengths


class Remax(Advantage):
    """`burnish.rollout.greedy` samples a greedy response to each prompt, as the baseline."""

    name: Literal["remax"] = "remax"
    written: ClassVar[str] = "A_i = r_i − r(greedy response to the same prompt)"
    group: ClassVar[int] = 1

    def check(self, recipe: Recipe) -> None:
        loop, dead = recipe.loop.name, recipe.selection.dead_groups
        if loop == "free" or dead == "active":
            raise ValueError(
                "objective.advantage = 'remax' samples greedy responses to whole rounds; use "
                f"loop.name = 'lagged', got '{loop}', and no dead_groups = 'active', got '{dead}'"
            )

    @property
    def graded(self) -> tuple[str, ...]:
        return ("greedy",)

    def given(self, rewards: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
        return rewards, batch.parts[:, 0]


class ReinforcePlusPlus(Advantage):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    judges_groups: ClassVar[bool] = False
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

    def is_dead(self, batch: PackedBatch) -> bool:
        """Whitening moves a group at its mean by the same small amount as all others, which says
        nothing about its responses: the baseline decides."""
        centered = rl("advantages", "group_mean")(batch.rewards, batch.group_ids)
        return not _on_tokens(centered, batch).any()


class Gae(Advantage):
    """Generalised advantage estimation over the values of a source.

    The source is the recipe's critic, or a function of a script from a packed batch to values [N],
    ``values[t]`` before token t.
    """

    name: Literal["gae"] = "gae"
    judges_groups: ClassVar[bool] = False
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    values: Function = Field(CRITIC, description="'critic', or a function from Python")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="1: returns minus values; 0: one step ahead")
    whiten: bool = Field(False, description="mean 0 and variance 1 over the rollout's actions")

    @property
    def reads_critic(self) -> bool:
        return bool(self.values == CRITIC)

    def formula(self) -> str:
        source = "the critic's" if self.reads_critic else f"{name_of(self.values)}(batch)"
        delta = f"δ_t = r_t + {self.gamma:g} V_(t+1) − V_t,  V = {source}"
        whitened = ",  then whitened over the rollout" * self.whiten
        return f"A_t = δ_t + {self.gamma * self.lam:g} A_(t+1){whitened},  {delta}"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        return self.estimate(rewards, batch, self.values(batch))[0]

    def estimate(
        self, rewards: Tensor, batch: PackedBatch, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [N]; returns are never whitened."""
        mask, ids = batch.is_action, batch.sequence_ids
        settings = {"gamma": self.gamma, "lam": self.lam, "sequence_ids": ids}
        advantages, returns = rl("advantages", "gae")(rewards, values, mask, **settings)
        if self.whiten:
            whitened = rl("advantages", "whiten")(advantages, mask)
            advantages = whitened.where(mask, advantages)
        return advantages, returns


class Vine(Advantage):
    """Steps of a response, valued by Monte Carlo: `burnish.rollout.branches` samples and values."""

    name: Literal["vine"] = "vine"
    over_time: ClassVar[bool] = True
    steps: int | str = Field("lines", description="lines, sentences, or tokens of a step")
    continuations: int = Field(9, ge=1, description="samples from the beginning of each step")

    @field_validator("steps", mode="before")
    @classmethod
    def _check_steps(cls, steps: Any) -> Any:
        if steps in ("lines", "sentences") or (type(steps) is int and steps >= 1):
            return steps
        raise ValueError(
            f"must be 'lines', 'sentences' or a number of tokens from 1 on, got {steps!r}"
        )

    def check(self, recipe: Recipe) -> None:
        active = recipe.selection.dead_groups == "active"
        rules = {
            "needs responses that can be continued, and the sorting model gives all its numbers at "
            "once; use another advantage": recipe.task.name != "sort",
            "needs loop.name = 'lagged', got 'free': continuations are sampled with the weights of "
            "their response": recipe.loop.name != "free",
            "continues whole rounds; use selection.dead_groups = 'dynamic'": not active,
            "values steps by the task's reward alone; use [length] name = 'none', got "
            f"'{recipe.length.name}'": recipe.length.name == "none",
            "counts all responses of a group; use rollout.overlong = 'mask', got 'drop'": (
                recipe.rollout.overlong != "drop"
            ),
        }
        for told, holds in rules.items():
            if not holds:
                raise ValueError(f"objective.advantage = 'vine' {told}")

    def formula(self) -> str:
        cut = f"{self.steps} tokens" if isinstance(self.steps, int) else f"a {self.steps[:-1]}"
        value = f"V = mean reward of {self.continuations} continuations"
        ends = "V(first step) = mean r of the group's other responses,  V(end) = r_i"
        return f"A_t = V(next step) − V(step of t),  a step is {cut},  {value},  {ends}"

    def continued(self, length: int) -> int:
        size = self.steps if isinstance(self.steps, int) else STEP
        return self.continuations * sum(length - start for start in range(size, length, size))

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        assert batch.values is not None, "rollouts of such a recipe have values"
        mask, ids = batch.is_action, batch.sequence_ids
        return rl("advantages", "vine")(rewards, batch.values, mask, sequence_ids=ids)


class Teacher(Advantage):
    name: Literal["teacher"] = "teacher"
    judges_groups: ClassVar[bool] = False
    group: ClassVar[int] = 1
    takes_penalty: ClassVar[bool] = False
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ("proximal", "teacher")
    reward: float = Field(0.0, ge=0, allow_inf_nan=False)
    """The weight of the reward above its group's mean; 0 if the teacher alone is learned from."""

    @property
    def smallest_group(self) -> int:
        return 2 if self.reward else 1

    @property
    def reads_rewards(self) -> bool:
        return self.reward > 0

    @property
    def is_scaled(self) -> bool:
        return self.reward > 0

    def formula(self) -> str:
        reward = f" + {self.reward:g} (r_i − mean_g(r))" if self.reward else ""
        return f"A_t = log π_teacher − log π_prox{reward}"

    def from_scores(self, rewards: Tensor, batch: PackedBatch, scores: Scores) -> Tensor:
        mask = batch.is_action
        found = rl("advantages", "teacher")(scores.proximal, scores.teacher, mask)
        if self.reward:
            above = rl("advantages", "group_mean")(rewards, batch.group_ids)
            found = found + self.reward * _on_tokens(above, batch)
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

    def is_dead(self, batch: PackedBatch) -> bool:
        """The function may compare groups, as whitening does. So the group is put beside another
        one, of higher and unequal rewards: only if its own advantages are 0 there too is it dead.
        """
        own, ids = batch.rewards, batch.group_ids
        other = own.max() + 1 + own.new_tensor(range(len(own)))
        both = own.new_tensor([*own.tolist(), *other.tolist()])
        found = self.estimator(both, ids.new_tensor([*ids.tolist(), *(ids + 1).tolist()]))
        return not _on_tokens(found[: len(own)], batch).any()


PerGroup = Raw | GroupMean | GroupZscore | LeaveOneOut | BestOfGroup | PassAtK | MaxRL | Opo | Remax
PerResponse = PerGroup | MaxAtK | BatchStd | Gdpo | OwnAdvantage
AnyAdvantage = PerResponse | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae | Vine | Teacher
