"""The records of the training loop: Prompt → Completion → Group → PackedBatch → LearnBatch.

Dimensions: G samples per group, T tokens of a sequence, C response tokens, N packed tokens, S
packed samples. A sample is a response or an episode. It consists of one token sequence, or of
several if the chat template rewrites an episode's history. Index t describes token t: ``logprobs[t]
= log π(token_t | token_<t)``. Four policies are distinguished: ``behavior`` sampled a token,
``proximal`` is the learner at the start of the batch, ``policy`` is being differentiated,
``reference`` is frozen. Records hold numpy arrays before packing and torch tensors afterwards.
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
    """A task's prompt as text and token ids, with the data that its grader needs."""

    prompt_id: str
    text: str
    token_ids: IntArray
    """[T] token ids of ``text``."""
    task: str
    """Name of the task, which selects the grader."""
    reference: Any = None
    """Gold answer or row for the grader; opaque to all other code."""
    part: str | None = None
    """Category whose metrics are reported separately, such as the prompt's task in a mixture; None
    if there are no categories."""
    question: str | None = None
    """The question without a chat template, for display; None to display ``text``."""
    episode: Episode | None = None
    """Row and seed from which an environment starts; None if the task has no environment."""
    scale: float = 1.0
    """Factor for the rewards, greedy rewards and step values of the responses. Only packing applies
    it; all other code, including metrics, uses unscaled rewards."""


class Episode(NamedTuple):
    """The start of an environment. All episodes of a group begin with the same row and seed."""

    row: Mapping[str, Any]
    seed: int
    messages: tuple[Mapping[str, str], ...]
    """The environment's first messages, which the prompt contains."""
    system: str | None = None
    """The recipe's system message, which comes first in the prompt; None if it has none."""
    wall_seconds: float = 0.0
    """Time limit of a call of the environment, or of an agent's work between requests: an engine
    may have no further token or completion for this time, and has not failed."""

    @property
    def opening(self) -> list[Mapping[str, str]]:
        """All messages before the first turn."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]


class Turn(NamedTuple):
    """One turn of an episode: an assistant's message, and the environment's answer to it."""

    start: int
    """Index of the turn's first sampled token in the response."""
    end: int
    """Index after the turn's last sampled token."""
    text: str
    """The assistant's message, without the end token."""
    messages: tuple[Mapping[str, str], ...]
    """The environment's messages, as the policy sees them in its next turn."""
    reward: float | None
    """The environment's reward for this turn; None if it gave none."""
    metrics: Mapping[str, float]
    """The environment's metrics for this turn."""
    error: str | None
    """Why the environment failed in this turn; None if it did not. A turn without tokens is an
    environment that failed before the first turn."""
    seconds: float = 0.0
    """Wall-clock time of the environment's call."""


class SequenceStart(NamedTuple):
    """The beginning of a token sequence of an episode that does not follow the group's prompt."""

    start: int
    """Index in the response of the sequence's first token."""
    prompt: IntArray
    """[T] token ids before it, which are only context."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The messages in the prompt of an agent's conversation; empty for other sequences."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings with which an engine samples a response."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy. Training on greedy samples is rejected."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this cumulative probability; 1 allows all tokens."""
    top_k: int | None = None
    """Sample from this number of most likely tokens; None allows all tokens."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the probability of the most likely token, at
    the sampling temperature; 0 allows all tokens."""
    repetition_penalty: float = 1.0
    """Factor by which the logits of tokens that occur in the prompt or in the response so far are
    divided if they are positive, and multiplied if they are negative; 1 changes nothing."""
    max_tokens: int = 128
    """Maximum number of tokens of a response."""
    min_tokens: int = 0
    """Minimum number of tokens before end ids and stop strings can end a response."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response."""
    seed: int = 0
    """The run's seed; the draws are hashed from (seed, stream, group, sample, position)."""
    think_tokens: int | None = None
    """Number of tokens after which the engine ends the thinking; None if there is no budget."""
    think_end: str = ""
    """Text with which a response ends its thinking by itself."""
    think_phrase: str = ""
    """Text that the engine inserts if the budget is used up before `think_end`."""
    turn_temperatures: tuple[float, ...] = ()
    """Sampling temperatures of the turns of an episode, of which the last one holds for all further
    turns; empty if all turns have ``temperature``."""

    def temperature_of(self, turn: int) -> float:
        """Return the sampling temperature of an episode's turn, counted from 0."""
        own = self.turn_temperatures
        return own[min(turn, len(own) - 1)] if own else self.temperature


class Finish(StrEnum):
    """Why a response ended: an end token or stop string, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Limit(StrEnum):
    """The limit that truncated an episode: the maximum length of its response, the number of turns,
    the model's context, or the time of its environment."""

    TOKENS = "tokens"
    TURNS = "turns"
    CONTEXT = "context"
    TIME = "time"


ENDINGS = {"ended": Finish.STOP, "truncated": Finish.LENGTH, "aborted": Finish.ABORT}
"""Reasons for the end of a response, by the names of the metrics that count them."""


@dataclass(frozen=True)
class Completion:
    """One response to a prompt: its tokens, their log-probabilities, and how it ended."""

    request_id: str
    sample_index: int
    token_ids: IntArray
    """[C] sampled tokens, including the end token, and inserted tokens."""
    logprobs: FloatArray
    """[C] log-probabilities of the model at the sampling temperature, before a repetition penalty,
    masks and truncation (top-p, top-k, min-p)."""
    versions: IntArray
    """[C] version of the weights that sampled each token."""
    sampled: BoolArray
    """[C] false for inserted tokens, which the policy did not sample."""
    params: SamplingParams
    finish: Finish
    stop: str | int | None
    """Stop string or end id that ended the response; None if there was none."""
    text: str
    """Decoded text up to and including the stop string, without the end token."""
    in_loss: bool = True
    """False if the response counts in its group's statistics but is excluded from the loss."""
    branches: tuple[Branch, ...] | None = None
    """Continuations from this response's steps, which grading replaces by ``values``; None if the
    recipe does not estimate step values."""
    values: FloatArray | None = None
    """[C] estimated value before each token that begins a step, NaN before other tokens; None if
    the recipe does not estimate step values."""
    continued: int = 0
    """Number of additional tokens that were sampled to estimate step values or a greedy reward."""
    continuations: int = 0
    """Number of continuations that were sampled to estimate step values."""
    continuation_errors: tuple[str, ...] = ()
    """Messages of the continuations without a grade, which no step value includes."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode with an environment; empty for other responses."""
    limit: Limit | None = None
    """The limit that truncated an episode; None if none did, and for other responses."""
    sequences: tuple[SequenceStart, ...] = ()
    """The token sequences of an episode with prompts of their own, in ascending order. Tokens
    before the first of them follow the group's prompt; all do if there is none. Each sampled token
    belongs to the sequence in which it was sampled."""
    first_messages: tuple[Mapping[str, str], ...] | None = None
    """The environment's first messages, if they differ from those in the group's prompt; None if
    they do not, and for other responses."""


@dataclass(frozen=True)
class Branch:
    """Continuations of a response from one of its steps."""

    start: int
    """Index of the step's first token."""
    completions: tuple[Completion, ...]
    """Complete responses that share the tokens before ``start`` with the original response."""


class Status(StrEnum):
    """Outcome of grading a response: it was graded, it has no answer that can be parsed, comparing
    its answer timed out, or grading failed. A response with ``ERROR`` has no reward."""

    SCORED = "scored"
    UNPARSED = "unparsed"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Grade:
    """A grader's result for one response."""

    reward: float
    """NaN if the status is error, so that it can't be mistaken for a score."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the reward: format, answer, length, …"""
    status: Status = Status.SCORED
    message: str | None = None
    """Explanation of a status other than scored, such as the grader's error; None if there is no
    explanation."""
    cost: dict[str, float] = field(default_factory=dict)
    """Calls, tokens and retries of a judge; empty if no judge was called."""
    correct: bool | None = None
    """Whether the task counts the response as correct, independent of length penalties and reward
    models; None if the task does not define correctness."""
    turn_weight: float = 1.0
    """Weight of the rewards of an episode's turns in ``reward``: the weight of the task's reward if
    a reward model grades, too. Only packing applies it; all other code uses unweighted turns."""

    @property
    def is_error(self) -> bool:
        """Whether grading failed, so that the reward is NaN."""
        return self.status is Status.ERROR


@dataclass(frozen=True)
class Group:
    """The responses that were sampled from one prompt, with their grades."""

    index: int
    """Number of the group in the run, counted from 0. A group that is sampled again keeps its
    number and therefore its random draws."""
    prompt: Prompt
    completions: tuple[Completion, ...]
    grades: tuple[Grade, ...]

    @property
    def graded(self) -> list[tuple[Completion, Grade]]:
        """Each response with its grade."""
        return list(zip(self.completions, self.grades, strict=True))

    @property
    def rewards(self) -> FloatArray:
        """[G] rewards after length penalties, not scaled by ``Prompt.scale``."""
        return np.array([grade.reward for grade in self.grades], dtype=np.float32)

    @property
    def correct(self) -> BoolArray:
        """[G] whether the task counts each response as correct; false if it does not define
        correctness."""
        return np.array([grade.correct is True for grade in self.grades], dtype=np.bool_)

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that sampled a token of the responses."""
        return min(int(c.versions.min()) for c in self.completions if c.versions.size)


@dataclass(frozen=True)
class PackedBatch:
    """Groups as packed tensors. The tokens of all groups are concatenated: for each group its
    prompt, response 1, response 2, …, and then the sequences with prompts of their own, each as
    prompt and response.

    A slot is an index 0 … N − 1 of a token. A segment is a prompt or the response of a sequence
    that follows it. A sample is one or several sequences, whose slots are in the order of sampling;
    each sampled token is an action in exactly one of them. Groups contain samples: rewards,
    advantages and reductions belong to samples.
    """

    tokens: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64: position of each token in its text; a response continues after its prompt."""
    predecessor: Tensor
    """[N] int64: slot of the preceding token, whose hidden state predicts this token. For a
    response's first token it is the prompt's last; a prompt's first token has its own slot."""
    sample_ids: Tensor
    """[N] int64 in [0, S): number of the token's sample; a prompt's tokens have the number of the
    first sample that follows it."""
    in_prompt: Tensor
    """[N] bool: whether the token belongs to a prompt."""
    is_action: Tensor
    """[N] bool: true if the policy sampled this token in a response that is in the loss."""
    behavior_logprobs: Tensor
    """[N] float: log-probability of each action when it was sampled; 0 for all other tokens."""
    temperature: Tensor
    """[N] float: sampling temperature of the token's response, or of the turn of an episode; 1 for
    tokens of prompts."""
    versions: Tensor
    """[N] int64: version of the weights that sampled each token; undefined for other tokens."""
    segment_offsets: Tensor
    """[segments + 1] int64: first slot of each segment, and N"""
    segment_samples: Tensor
    """[segments] int64: number of each segment's sample, as in ``sample_ids``"""
    segment_is_prompt: Tensor
    """[segments] bool"""
    group_ids: Tensor
    """[S] int64 in [0, groups), ascending: number of each sample's group within the batch."""
    lengths: Tensor
    """[S] int64: number of sampled tokens of each sample, including samples that are not in the
    loss."""
    rewards: Tensor
    """[S] float, scaled by ``Prompt.scale``"""
    parts: Tensor
    """[S, K] float, scaled: the K parts of the grades that the objective uses, in the order of
    `LossProgram.graded`; K is 0 if the objective uses no parts."""
    values: Tensor | None = None
    """[N] float, scaled: estimated value before each token that begins a step, NaN before other
    tokens; None if the recipe does not estimate step values."""
    turn_rewards: Tensor | None = None
    """[N] float, scaled: reward of the turn that ends with this token, NaN for all other tokens.
    The rewards of a sample's turns add up to the sample's reward. Samples that are not in the loss
    have them, too. None if no sample of the batch is an episode."""

    @property
    def last_segments(self) -> Tensor:
        """[S] number of the segment with which each sample ends."""
        numbers = (~self.segment_is_prompt).nonzero().squeeze(1)
        last = numbers.new_zeros(len(self.rewards))
        return last.scatter_reduce(0, self.segment_samples[numbers], numbers, "amax")

    def to(self, device: Any) -> PackedBatch:
        """Return a batch with all tensors on the device."""
        moved: dict[str, Any] = {k: v if v is None else v.to(device) for k, v in vars(self).items()}
        return PackedBatch(**moved)


class Measured(NamedTuple):
    """Log-probability of each token, and entropy of its distribution, under one policy: two tensors
    of the same shape, in nats, at the sampling temperature."""

    logprobs: Tensor
    entropy: Tensor


class ResponseRewards(NamedTuple):
    """Rewards that a reward model gives to the responses of a batch."""

    rewards: Tensor
    """[N]: the reward of each response in the response's last slot; 0 in all other slots."""


class Scores(NamedTuple):
    """Per-token tensors [N] from the forward passes before the first gradient step on a batch."""

    proximal: Tensor | None = None
    """Log-probabilities under the proximal policy; None if the objective does not need them."""
    reference: Tensor | None = None
    """Log-probabilities under the reference policy; None if the objective does not need them."""
    teacher: Tensor | None = None
    """Log-probabilities under the teacher; None if the objective does not need them."""
    values: Tensor | None = None
    """The critic's value V(token_<t) before each action; None if there is no critic."""


@dataclass(frozen=True)
class LearnBatch:
    """A train batch: the batch of one gradient step, with the per-token tensors of the loss, all
    [N]."""

    batch: PackedBatch
    advantages: Tensor
    loss_weight: Tensor
    """Normalization of the loss: loss = Σ loss_weight × objective over the whole train batch."""
    proximal_logprobs: Tensor | None = None
    """Log-probabilities under the proximal policy; None if it is the policy itself, as in a single
    gradient step per rollout."""
    reference_logprobs: Tensor | None = None
    """Log-probabilities under the reference policy; None if the objective has no KL term."""
    importance: Tensor | None = None
    """Importance weights that correct for the difference between behavior and proximal policy,
    without gradient; None if the objective has none."""
    returns: Tensor | None = None
    """Targets of the critic; None if there is no critic."""
    old_values: Tensor | None = None
    """The critic's values before the first gradient step; None if there is no critic."""
    slots: Tensor | None = None
    """int64: slots of this batch's tokens in the rollout. They select the values of this batch from
    tensors that were computed for the whole rollout. None if the batch is not part of a rollout."""


class Weights(NamedTuple):
    """A model's weights, as the learner sends them to engines."""

    version: int
    """Number of optimizer steps taken since the initial model, which has version 0."""
    incarnation: int
    """Number of times that the run was restarted from a checkpoint."""
    tensors: Mapping[str, Tensor]
    """Tensors by name. If the learner's weights are sharded, each access gathers a tensor from all
    ranks, so read them before the next optimizer step changes them."""
    is_partial: bool = False
    """Whether the mapping contains only some tensors: the others have not changed since the model
    was loaded."""


class Rates(NamedTuple):
    """Speed of a device's matrix products, in 10⁹ operations per second."""

    device: str
    precision: str
    """Precision of the products; fp32 if the device has no instructions for the requested one."""
    decode_gflops: float
    """Speed with few rows, as in sampling."""
    learn_gflops: float
    """Speed with many rows, as in scoring and training."""
