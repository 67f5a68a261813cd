"""Advantages: how much better than expected a response or a token was."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, field_validator

from burnish.recipe.objective.piece import Function, Piece, arxiv, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch, Scores

STEP = 16
"""Assumed tokens of a line or a sentence, to estimate the number of continuations."""
CRITIC = "critic"
"""Value of ``Gae.values`` that selects the recipe's critic."""


class Advantage(Piece):
    """Base class of the advantages that a recipe can select: how much better than expected a
    response or a token was.

    A subclass implements ``per_response``, or ``per_token`` if tokens of a response differ.
    """

    group: ClassVar[int] = 2
    """The smallest group size that it accepts, whatever its settings."""
    over_time: ClassVar[bool] = False
    """Whether it takes one reward per token, [N], instead of one per response, [S]."""
    by_turn: ClassVar[bool] = False
    """Whether the reward of an episode's turn is on the last token of that turn, instead of the
    whole reward on the episode's last token."""
    judges_groups: ClassVar[bool] = True
    """Whether a group's own rewards decide if all its advantages are 0, so that the group is dead.
    False if other groups, a critic or a teacher matter; then no group is dead."""
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ()
    """The forward passes before the first gradient step that ``from_scores`` needs."""
    takes_negative: ClassVar[bool] = True
    """Whether it accepts negative rewards, which a length penalty can cause."""
    takes_penalty: ClassVar[bool] = True
    """Whether it can be combined with a KL in the reward, which may make rewards negative."""
    reads_scale: ClassVar[bool] = True
    """Whether multiplying a group's rewards by a factor changes its advantages, apart from the
    small effect of eps."""

    @property
    def smallest_group(self) -> int:
        """The smallest group size that it accepts with its settings."""
        return self.group

    @property
    def reads_rewards(self) -> bool:
        """Whether it reads the reward of a response, which includes a length penalty."""
        return True

    @property
    def is_scaled(self) -> bool:
        """Whether ``task.scales`` changes its advantages."""
        return self.reads_scale

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the grade's parts that it reads: the columns of ``PackedBatch.parts``."""
        return ()

    @property
    def reads_critic(self) -> bool:
        """Whether it needs the values of the recipe's critic."""
        return False

    def continued(self, length: int) -> int:
        """Return the number of tokens that are sampled to value the steps of a response of
        ``length`` tokens."""
        return 0

    @property
    def reads_turns(self) -> bool:
        """Whether turns have advantages of their own, so that it needs multi-turn episodes."""
        return False

    def rewards_of(self, batch: PackedBatch) -> Tensor:
        """Return the rewards that `per_token` takes: one per response, [S], or one per token, [N],
        if the advantage is ``over_time``."""
        from burnish.rl.sequences import on_last_action

        if not self.over_time:
            return batch.rewards
        if self.by_turn and batch.turn_rewards is not None:
            return batch.turn_rewards.nan_to_num(0.0)
        return on_last_action(batch.rewards, batch.is_action, batch.sample_ids)

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """Return the advantage of every response, [S], from the rewards of the responses, [S]."""
        raise NotImplementedError(f"{self.name} has an advantage per token")

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """Return the advantage of every action, [N]; other slots are 0.

        ``rewards`` has one reward per response, [S], or per token, [N], if the advantage is
        ``over_time``.
        """
        return _on_tokens(self.per_response(rewards, batch), batch)

    def is_dead(self, batch: PackedBatch) -> bool:
        """Return whether all advantages of a group are 0, whatever the other groups are.

        ``batch`` holds this group only. Call it only if ``judges_groups`` is true.
        """
        assert self.judges_groups, "a group alone does not decide"
        return not bool(self.per_token(self.rewards_of(batch), batch).any())

    def from_scores(self, rewards: Tensor, batch: PackedBatch, scores: Scores) -> Tensor:
        """Return the advantage of every action, [N], given ``rewards`` as in `per_token` and
        ``scores``, the log-probabilities of the forward passes in ``reads``."""
        return self.per_token(rewards, batch)


def _on_tokens(per_response: Tensor, batch: PackedBatch) -> Tensor:
    """Assign the value of each response, [S], to all its actions; return [N], 0 in other slots."""
    from burnish.rl.sequences import to_tokens

    return to_tokens(per_response, batch.is_action, batch.sample_ids)


def _turn_ends(batch: PackedBatch) -> Tensor:
    """Return whether each token is the last one of a turn, [N]."""
    assert batch.turn_rewards is not None, "episodes have turns"
    return batch.turn_rewards.isfinite()


class Raw(Advantage):
    name: Literal["raw"] = "raw"
    written: ClassVar[str] = "A_i = r_i"
    paper: ClassVar[str] = "REINFORCE, Williams 1992"
    group: ClassVar[int] = 1

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import raw

        return raw(rewards, batch.group_ids)


class GroupMean(Advantage):
    name: Literal["group_mean"] = "group_mean"
    written: ClassVar[str] = "A_i = r_i − mean_g(r)"
    paper: ClassVar[str] = f"Dr. GRPO, {arxiv('2503.20783')}"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import group_mean

        return group_mean(rewards, batch.group_ids)


class GroupZscore(Advantage):
    name: Literal["group_zscore"] = "group_zscore"
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / (std_g(r) + {eps:g})"
    paper: ClassVar[str] = f"GRPO, {arxiv('2402.03300')}"
    reads_scale: ClassVar[bool] = False
    eps: float = Field(1e-6, gt=0, description="added to the std")

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import group_zscore

        return group_zscore(rewards, batch.group_ids, eps=self.eps)


class LeaveOneOut(Advantage):
    name: Literal["leave_one_out"] = "leave_one_out"
    written: ClassVar[str] = "A_i = r_i − mean of the other r of the group"
    paper: ClassVar[str] = f"RLOO, {arxiv('2402.14740')}"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import leave_one_out

        return leave_one_out(rewards, batch.group_ids)


class BestOfGroup(Advantage):
    name: Literal["best_of_group"] = "best_of_group"
    paper: ClassVar[str] = 'a lecture\'s "max" delta'
    group: ClassVar[int] = 1
    centered: bool = Field(False, description="whether to subtract the group's mean")

    @property
    def smallest_group(self) -> int:
        return 2 if self.centered else 1

    def formula(self) -> str:
        return f"A_i = {'(r_i − mean_g(r))' if self.centered else 'r_i'} [r_i = max_g(r)]"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import best_of_group

        return best_of_group(rewards, batch.group_ids, centered=self.centered)


class BatchStd(Advantage):
    name: Literal["batch_std"] = "batch_std"
    paper: ClassVar[str] = f"ScaleRL, {arxiv('2510.13786')}"
    of: Literal["advantages", "rewards"] = Field(
        "advantages", description="the numbers whose std is taken"
    )
    eps: float = Field(1e-6, gt=0, description="added to the std")

    def formula(self) -> str:
        of = "r − mean_g(r)" if self.of == "advantages" else "r"
        return f"A_i = (r_i − mean_g(r)) / (std of {of} over the batch + {self.eps:g})"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import batch_std

        return batch_std(rewards, batch.group_ids, of=self.of, eps=self.eps)


class PassAtK(Advantage):
    name: Literal["pass_at_k"] = "pass_at_k"
    written: ClassVar[str] = (
        "A_i = (E[M | i is drawn] − E[M]) / (std[M] + {eps:g}),  M = best reward of {k} responses "
        "drawn from the group"
    )
    paper: ClassVar[str] = f"pass@k training, {arxiv('2508.10751')}"
    reads_scale: ClassVar[bool] = False
    k: int = Field(ge=1, description="responses of which the best counts; below the group size")
    eps: float = Field(1e-6, gt=0, description="added to the std")

    @property
    def smallest_group(self) -> int:
        return self.k + 1

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import pass_at_k

        return pass_at_k(rewards, batch.group_ids, k=self.k, eps=self.eps)


class MaxAtK(Advantage):
    name: Literal["max_at_k"] = "max_at_k"
    paper: ClassVar[str] = f"PKPO, {arxiv('2505.15201')}; with k = G, {arxiv('2503.19595')}"
    k: int = Field(ge=2, description="responses of which the best counts; up to the group size")
    eps: float | None = Field(
        None, gt=0, description="divides by the group's std + eps; None: no division"
    )

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

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import max_at_k

        return max_at_k(rewards, batch.group_ids, k=self.k, eps=self.eps)


class MaxRL(Advantage):
    name: Literal["maxrl"] = "maxrl"
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / (mean_g(r) + {eps:g})"
    paper: ClassVar[str] = f"maximum likelihood RL, {arxiv('2602.02710')}"
    takes_negative: ClassVar[bool] = False
    reads_scale: ClassVar[bool] = False
    takes_penalty: ClassVar[bool] = False
    eps: float = Field(1e-6, gt=0, description="added to the mean")

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import maxrl

        return maxrl(rewards, batch.group_ids, eps=self.eps)


class Gdpo(Advantage):
    """The parts of the grade are normalised separately within each group, and their weighted sum is
    divided by its std over the batch."""

    name: Literal["gdpo"] = "gdpo"
    paper: ClassVar[str] = f"GDPO, {arxiv('2601.05242')}"
    reads_scale: ClassVar[bool] = False
    takes_penalty: ClassVar[bool] = False
    parts: dict[str, FiniteFloat] = Field(
        {}, validate_default=True, description="weights of the grade's parts, by name"
    )
    eps: float = Field(1e-6, gt=0, description="added to each std")

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, float]) -> dict[str, float]:
        if not parts:
            raise ValueError(
                "needs a part of the grade and its weight, got none; set one, for example with "
                "--set objective.advantage.parts.answer=1"
            )
        return parts

    def formula(self) -> str:
        terms = " + ".join(f"{weight:g} z_g({part})" for part, weight in self.parts.items())
        return f"A_i = a_i / (std of a over the batch + {self.eps:g}),  a = {terms}"

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def graded(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import gdpo

        weights = list(self.parts.values())
        return gdpo(batch.parts, batch.group_ids, weights=weights, eps=self.eps)


class Opo(Advantage):
    name: Literal["opo"] = "opo"
    written: ClassVar[str] = "A_i = r_i − Σ_g |y_j| r_j / Σ_g |y_j|"
    paper: ClassVar[str] = f"OPO, {arxiv('2505.23585')}"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import opo

        return opo(rewards, batch.group_ids, batch.lengths)


class Remax(Advantage):
    """The baseline is the reward of a greedy response to the same prompt
    (`burnish.rollout.greedy_baseline`)."""

    name: Literal["remax"] = "remax"
    written: ClassVar[str] = "A_i = r_i − r(greedy response to the same prompt)"
    paper: ClassVar[str] = f"ReMax, {arxiv('2310.10505')}"
    group: ClassVar[int] = 1

    @property
    def graded(self) -> tuple[str, ...]:
        return ("greedy",)

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import remax

        return remax(rewards, batch.parts[:, 0])


class TurnMean(Advantage):
    """Episodes only. The reward of a turn counts for this turn and the turns before it. The
    baseline of a turn is the mean over the group's episodes that reached it."""

    name: Literal["turn_mean"] = "turn_mean"
    written: ClassVar[str] = (
        "A_(i,k) = R_(i,k) − mean of R_(j,k) over the episodes j of the group with a turn k,  "
        "R_k = r_k + {gamma:g} R_(k+1)"
    )
    paper: ClassVar[str] = f"GRPO with process supervision, {arxiv('2402.03300')}"
    over_time: ClassVar[bool] = True
    by_turn: ClassVar[bool] = True
    gamma: float = Field(1.0, ge=0, le=1, description="discount per turn")

    @property
    def reads_turns(self) -> bool:
        return True

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import turn_mean

        groups, mask, ids = batch.group_ids, batch.is_action, batch.sample_ids
        ends = _turn_ends(batch)
        return turn_mean(rewards, ends, mask, groups, gamma=self.gamma, sequence_ids=ids)


class ReinforcePlusPlus(Advantage):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    written: ClassVar[str] = "A_t = whiten over the batch of R_t,  R_t = r_t + {gamma:g} R_(t+1)"
    paper: ClassVar[str] = f"REINFORCE++, {arxiv('2501.03262')}"
    judges_groups: ClassVar[bool] = False
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    by_turn: ClassVar[bool] = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import reinforce_plus_plus

        mask, ids = batch.is_action, batch.sample_ids
        return reinforce_plus_plus(rewards, mask, gamma=self.gamma, sequence_ids=ids)


class ReinforcePlusPlusBaseline(Advantage):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    written: ClassVar[str] = "A_(i,t) = whiten over the batch of r_i − mean_g(r)"
    paper: ClassVar[str] = f"REINFORCE++, {arxiv('2501.03262')}"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import reinforce_plus_plus_baseline

        groups, mask, ids = batch.group_ids, batch.is_action, batch.sample_ids
        return reinforce_plus_plus_baseline(rewards, groups, mask, sequence_ids=ids)

    def is_dead(self, batch: PackedBatch) -> bool:
        """Return whether the group's rewards are all equal.

        Whitening moves such a group by the same small amount as all others, which says nothing
        about its responses, so the advantages before whitening decide.
        """
        from burnish.rl.advantages import group_mean

        return not _on_tokens(group_mean(batch.rewards, batch.group_ids), batch).any()


class Gae(Advantage):
    """Generalised advantage estimation.

    The values come from the recipe's critic, or from a function in a script that maps a packed
    batch to values [N], where ``values[t]`` is the value before token t.
    """

    name: Literal["gae"] = "gae"
    paper: ClassVar[str] = f"GAE, {arxiv('1506.02438')}"
    judges_groups: ClassVar[bool] = False
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    by_turn: ClassVar[bool] = True
    values: Function = Field(CRITIC, description="'critic', or a function from Python")
    over: Literal["tokens", "turns"] = Field(
        "tokens",
        description="what has an advantage of its own; turns: the turns of episodes, valued before "
        "their first tokens",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token, or per turn")
    lam: float = Field(1.0, ge=0, le=1, description="1: returns minus values; 0: one step ahead")
    whiten: bool = Field(
        False, description="whether to whiten to mean 0 and variance 1 over the rollout"
    )

    @property
    def reads_critic(self) -> bool:
        return bool(self.values == CRITIC)

    @property
    def reads_turns(self) -> bool:
        return self.over == "turns"

    def formula(self) -> str:
        source = "the critic's" if self.reads_critic else f"{name_of(self.values)}(batch)"
        t = "k" if self.reads_turns else "t"
        delta = f"δ_{t} = r_{t} + {self.gamma:g} V_({t}+1) − V_{t},  V = {source}"
        turn = ",  k is the turn of t" * self.reads_turns
        whitened = ",  then whitened over the rollout" * self.whiten
        return f"A_t = δ_{t} + {self.gamma * self.lam:g} A_({t}+1){whitened},  {delta}{turn}"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        return self.estimate(rewards, batch, self.values(batch))[0]

    def estimate(
        self, rewards: Tensor, batch: PackedBatch, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, [N] each; only advantages are whitened, if ``whiten`` is
        set.

        ``rewards`` and ``values`` have one entry per token, [N].
        """
        from burnish.rl.advantages import gae, turn_gae, whiten

        mask, ids = batch.is_action, batch.sample_ids
        estimate = partial(turn_gae, ends=_turn_ends(batch)) if self.reads_turns else gae
        advantages, returns = estimate(
            rewards, values, mask=mask, gamma=self.gamma, lam=self.lam, sequence_ids=ids
        )
        if self.whiten:
            advantages = whiten(advantages, mask).where(mask, advantages)
        return advantages, returns


class Vine(Advantage):
    """The advantage of a step, such as a line, is the increase in value over the step. A value is
    the mean reward of sampled continuations (`burnish.rollout.step_values`)."""

    name: Literal["vine"] = "vine"
    paper: ClassVar[str] = f"VinePPO, {arxiv('2410.01679')}"
    over_time: ClassVar[bool] = True
    steps: int | str = Field("lines", description="lines, sentences, or the tokens of a step")
    continuations: int = Field(9, ge=1, description="samples from the beginning of each step")

    @field_validator("steps", mode="before")
    @classmethod
    def _check_steps(cls, steps: Any) -> Any:
        if steps in ("lines", "sentences") or (type(steps) is int and steps >= 1):
            return steps
        raise ValueError(
            f"must be 'lines', 'sentences' or a number of tokens of at least 1, got {steps!r}"
        )

    def formula(self) -> str:
        cut = f"{self.steps} tokens" if isinstance(self.steps, int) else f"a {self.steps[:-1]}"
        value = f"V = mean reward of {self.continuations} continuations"
        ends = "V(first step) = mean r of the group's other responses,  V(end) = r_i"
        return f"A_t = V(next step) − V(step of t),  a step is {cut},  {value},  {ends}"

    def continued(self, length: int) -> int:
        size = self.steps if isinstance(self.steps, int) else STEP
        return self.continuations * sum(length - start for start in range(size, length, size))

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import vine

        assert batch.values is not None, "rollouts of such a recipe have values"
        mask, ids = batch.is_action, batch.sample_ids
        return vine(rewards, batch.values, mask, sequence_ids=ids)


class Teacher(Advantage):
    """On-policy distillation: the advantage of a token is the teacher's log-probability minus the
    policy's, plus a weighted reward if ``reward`` is set."""

    name: Literal["teacher"] = "teacher"
    paper: ClassVar[str] = (
        "on-policy distillation, "
        "[the post](https://thinkingmachines.ai/blog/on-policy-distillation), "
        f"{arxiv('2306.13649')}"
    )
    judges_groups: ClassVar[bool] = False
    group: ClassVar[int] = 1
    takes_penalty: ClassVar[bool] = False
    reads: ClassVar[tuple[Literal["proximal", "teacher"], ...]] = ("proximal", "teacher")
    reward: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the reward minus its group's mean; 0: only the teacher is learned",
    )

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
        from burnish.rl.advantages import group_mean, teacher

        assert scores.proximal is not None
        assert scores.teacher is not None
        found = teacher(scores.proximal, scores.teacher, batch.is_action)
        if self.reward:
            above = group_mean(rewards, batch.group_ids)
            found = found + self.reward * _on_tokens(above, batch)
        return found


class OwnAdvantage(Advantage):
    """A function from a script that maps rewards [S] and group ids [S] to advantages [S]."""

    name: Literal["own"] = "own"
    group: ClassVar[int] = 1
    function: Function = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"A_i = {name_of(self.function)}(r, groups)"

    def per_response(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        result: Tensor = self.function(rewards, batch.group_ids)
        return result

    def is_dead(self, batch: PackedBatch) -> bool:
        """Return whether the group's advantages are 0 even in a batch with another group.

        The function may compare groups, as whitening does. So the group is evaluated together with
        a second group of higher and unequal rewards.
        """
        own, ids = batch.rewards, batch.group_ids
        other = own.max() + 1 + own.new_tensor(range(len(own)))
        both = own.new_tensor([*own.tolist(), *other.tolist()])
        found = self.function(both, ids.new_tensor([*ids.tolist(), *(ids + 1).tolist()]))
        return not _on_tokens(found[: len(own)], batch).any()


PerGroup = Raw | GroupMean | GroupZscore | LeaveOneOut | BestOfGroup | PassAtK | MaxRL | Opo | Remax
PerResponse = PerGroup | MaxAtK | BatchStd | Gdpo | OwnAdvantage
OverTime = TurnMean | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae | Vine | Teacher
AnyAdvantage = PerResponse | OverTime
