"""The records that flow round the circle: Prompt → Completion → Group → PackedBatch → LearnBatch.

Legend: G samples per group, T tokens of one sequence, C response tokens, N packed tokens, S packed
sequences. Index t describes token t: ``logprobs[t] = log π(token_t | token_<t)``. Four policies,
four names: ``behavior`` sampled it, ``proximal`` is the learner at the start of the batch,
``policy`` is being differentiated, ``reference`` is frozen. Records are numpy before packing, torch
from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    text: str
    token_ids: IntArray
    """[T]"""
    task: str
    """Names the grader."""
    reference: Any = None
    """The gold answer or row for the grader; opaque to everything else."""
    part: str | None = None
    """The part of a mixture, or another kind that metrics tell apart; None if there are none."""
    asked: str | None = None
    """The question as a page shows it, without a chat template; None if the text is shown."""
    scale: float = 1.0
    """Factor of the rewards, greedy rewards and step values of its responses. Only packing applies
    it; all other code, metrics among it, sees unscaled rewards."""


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0
    """0 is greedy; training on greedy samples is refused."""
    top_p: float = 1.0
    """The likeliest tokens that have this share of the chances together; 1 is all."""
    top_k: int | None = None
    """So many of the likeliest tokens; None is all."""
    max_tokens: int = 128
    min_tokens: int = 0
    """End ids and stop strings are held back before this many tokens."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    """The run's seed; the draws are hashed from (seed, stream, group, sample, position)."""
    think_tokens: int | None = None
    """Tokens after which the engine ends the thinking; None if there is no budget."""
    think_end: str = ""
    """The text that says that a response has ended its thinking by itself."""
    think_phrase: str = ""
    """The text that the engine puts into a response whose budget is spent before `think_end`."""


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


ENDINGS = {"ended": Finish.STOP, "truncated": Finish.LENGTH, "aborted": Finish.ABORT}
"""How responses end, by the names of the metrics that count them."""


@dataclass(frozen=True)
class Completion:
    request_id: str
    sample_index: int
    token_ids: IntArray
    """[C] all that was sampled, the end token included, and all that the system put there."""
    logprobs: FloatArray
    """[C] of the model at the sampling temperature, before any mask or truncation."""
    versions: IntArray
    """[C] the weights that sampled each token."""
    sampled: BoolArray
    """[C] false for tokens that the system put there."""
    params: SamplingParams
    finish: Finish
    stop: str | int | None
    """Which stop string or end id ended it; None if there was none."""
    text: str
    """Cut after the stop string, without the end token."""
    in_loss: bool = True
    """False if the response counts in its group's statistics and nothing is learned from it."""
    branches: tuple[Branch, ...] | None = None
    """Responses that go on from this one's steps, until they are graded; None if the recipe values
    no steps."""
    values: FloatArray | None = None
    """[C] the value before each token that begins a step, NaN before others; None if the recipe
    values no steps."""
    continued: int = 0
    """Tokens that were sampled to value its steps."""


@dataclass(frozen=True)
class Branch:
    start: int
    """The first token of a step."""
    completions: tuple[Completion, ...]
    """Whole responses, whose tokens before ``start`` are those of the response that they value."""


class Status(StrEnum):
    SCORED = "scored"
    UNPARSED = "unparsed"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Grade:
    reward: float
    """NaN where the status is error, so that nothing can take it for a score."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward: format, answer, length, …"""
    status: Status = Status.SCORED
    message: str | None = None
    """The grader's message about an error; None if there was none."""
    cost: dict[str, float] = field(default_factory=dict)
    """Calls, tokens and retries of a judge; empty if none was asked."""
    correct: bool | None = None
    """Whether the task counts the response as correct, before length penalties and whatever a
    reward model says; None if the task does not say."""

    @property
    def is_error(self) -> bool:
        return self.status is Status.ERROR


@dataclass(frozen=True)
class Group:
    index: int
    """Running number of the group in the run; a reissued group keeps it, and so draws the same."""
    prompt: Prompt
    completions: tuple[Completion, ...]
    grades: tuple[Grade, ...]

    @property
    def graded(self) -> list[tuple[Completion, Grade]]:
        return list(zip(self.completions, self.grades, strict=True))

    @property
    def rewards(self) -> FloatArray:
        """[G] after length penalties and before ``Prompt.scale``."""
        return np.array([grade.reward for grade in self.grades], dtype=np.float32)

    @property
    def correct(self) -> BoolArray:
        """[G] the responses that the task counts as correct."""
        return np.array([grade.correct is True for grade in self.grades], dtype=np.bool_)

    @property
    def oldest_version(self) -> int:
        return min(int(c.versions.min()) for c in self.completions if c.versions.size)


@dataclass(frozen=True)
class PackedBatch:
    """A record of what happened: each group laid out as prompt, response 1, response 2, …"""

    tokens: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64; each response's positions go on from its prompt's end."""
    predecessor: Tensor
    """[N] int64: the slot whose hidden state predicts this token; a prompt's first names itself."""
    sequence_ids: Tensor
    """[N] int64 in [0, S); a prompt's tokens carry the id of its group's first response."""
    in_prompt: Tensor
    """[N] bool"""
    is_action: Tensor
    """[N] bool: the policy sampled this token, in a response that is learned from."""
    behavior_logprobs: Tensor
    """[N] float; 0 where nothing was sampled."""
    temperature: Tensor
    """[N] float; 1 where nothing was sampled."""
    versions: Tensor
    """[N] int64; means nothing where nothing was sampled."""
    segment_offsets: Tensor
    """[segments + 1] int64: a segment is one prompt or one response."""
    segment_is_prompt: Tensor
    """[segments] bool"""
    group_ids: Tensor
    """[S] int64 in [0, groups)"""
    lengths: Tensor
    """[S] int64: sampled tokens of each response, also of responses that are not in the loss."""
    rewards: Tensor
    """[S] float, scaled by ``Prompt.scale``"""
    parts: Tensor
    """[S, K] float, scaled: the parts of the grades that the objective reads; K is 0 if it reads
    none."""
    values: Tensor | None = None
    """[N] float, scaled: the value before each token that begins a step, NaN before others; None if
    the recipe values no steps."""

    def to(self, device: Any) -> PackedBatch:
        moved: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in vars(self).items()}
        return PackedBatch(**moved)


class Measured(NamedTuple):
    """Log-probability and entropy of tokens under a policy."""

    logprobs: Tensor
    entropy: Tensor


class Scores(NamedTuple):
    """Streams [N] from the forward passes before the first gradient step."""

    proximal: Tensor | None = None
    """None if the objective does not need this pass."""
    reference: Tensor | None = None
    """None if the objective does not need this pass."""
    teacher: Tensor | None = None
    """None if the objective does not need this pass."""
    values: Tensor | None = None
    """V(token_<t) of each action by the critic; None if there is no critic."""


@dataclass(frozen=True)
class LearnBatch:
    """A ``PackedBatch`` with the streams that the learner learns from, all [N]."""

    batch: PackedBatch
    advantages: Tensor
    loss_weight: Tensor
    """The denominator as a weight: loss = Σ loss_weight × objective over the whole train batch."""
    proximal_logprobs: Tensor | None = None
    """None if the proximal policy is the policy itself: one step, on a batch that it sampled."""
    reference_logprobs: Tensor | None = None
    """None if the objective has no KL term."""
    importance: Tensor | None = None
    """The correction for the gap between behavior and proximal, without gradient; None if the
    objective has none."""
    returns: Tensor | None = None
    """The targets of the critic; None if there is no critic."""
    old_values: Tensor | None = None
    """The critic's values before the first step; None if there is no critic."""
    slots: Tensor | None = None
    """Where the tokens stand in the rollout that was scored; None if no rollout was scored."""


class Weights(NamedTuple):
    version: int
    """0 is the initial model, +1 per optimizer step that was taken."""
    incarnation: int
    """How often the run was restarted."""
    tensors: Mapping[str, Tensor]
    """A mesh gathers each of them when it is asked for: take them before the next step."""
    is_partial: bool = False
    """Whether the tensors that are not named have not changed since the model was opened."""
