"""The protocols between learners, objectives and loops.

A ``Learner`` computes with packed batches. `burnish.learner.learner.LocalLearner` (one process) and
`burnish.learner.mesh.mesh_learner.MeshLearner` (several ranks) implement it. If the learner is a
remote actor, whole steps run there: groups go in, a ``Step`` comes out. A loop that overlaps
generation and learning therefore sees a ``StepRunner``, and the recorder sees a ``Checkpointable``.
`burnish.actors.remote_learner.RemoteLearner` implements both, and its actor holds a ``Learner``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from burnish.recipe.critic import CriticConfig
from burnish.rollout.packing import Pack
from burnish.types import (
    FloatArray,
    Group,
    LearnBatch,
    Measured,
    PackedBatch,
    ResponseRewards,
    Scores,
    Weights,
)

Metrics = dict[str, float]
Pass = Literal["proximal", "reference", "teacher", "values"]
"""Name of a forward pass without gradient over a rollout, and of the field of ``Scores`` that holds
the result."""
Output = TypeVar("Output", bound=Measured | ResponseRewards)
"""The output of the model that is trained: ``Measured`` of a policy, or ``ResponseRewards`` of a
reward model."""
Output_contra = TypeVar("Output_contra", bound=Measured | ResponseRewards, contravariant=True)


class LearnerState(NamedTuple):
    """The part of a learner that training changes, for a checkpoint: tensors (weights, optimizer
    moments), and counters that JSON can hold.

    The names of tensors begin with the model that they belong to: "policy." or "critic.".
    """

    tensors: Mapping[str, Tensor]
    numbers: dict[str, Any]


class Step(NamedTuple):
    """The result of one training step."""

    number: int
    """Number of steps that are done, including this one."""
    metrics: Metrics
    groups: Sequence[Group] = ()
    """The groups that the step learned from."""
    advantages: Sequence[float] = ()
    """One number per response, in the order of the groups: its advantage, averaged over its
    tokens."""
    learner_logprobs: list[FloatArray] | None = None
    """The learner's log-probabilities before its first gradient step, [C] per response; None if it
    did not score all responses."""
    failed: Sequence[Group] = ()
    """The responses that were not graded, by group. They are recorded, and not learned from."""


class Program(Protocol):
    """The functions of an objective that a loop calls: they turn a scored rollout into advantages
    and train batches."""

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the parts of a grade (``Grade.parts``) that the objective reads. Give them to
        `burnish.rollout.packing.pack`, so that ``PackedBatch.parts`` has a column for each."""

    def advantages(self, batch: PackedBatch, scores: Scores) -> Tensor:
        """Estimate the advantage of each action token of a rollout, [N]. ``scores`` is the result
        of `Learner.score`."""

    def batches(
        self, batch: PackedBatch, advantages: Tensor, scores: Scores, parts: Sequence[Pack]
    ) -> list[LearnBatch]:
        """Build one train batch, for one gradient step, from each part of a rollout. Loss weights
        are normalised over each part alone.

        ``batch`` is the rollout, ``advantages`` [N] and ``scores`` belong to it, and ``parts``
        divide it (see `burnish.rollout.packing.train_batches`).
        """


class LossProgram(Program, Protocol[Output_contra]):
    """A program with the functions that a learner calls before and during a gradient step."""

    @property
    def refresh(self) -> int | None:
        """Interval, in rollouts, at which the current policy replaces the reference; None if the
        reference never changes."""

    @property
    def ema(self) -> float | None:
        """Decay of the reference if it is a moving average of the policy; None if it is not."""

    @property
    def critic(self) -> CriticConfig | None:
        """The settings of the critic; None if the objective reads no critic."""

    def passes(self, steps: int) -> list[Pass]:
        """Names of the forward passes that are needed before the first gradient step on a rollout
        that is trained on for ``steps`` gradient steps."""

    def token_loss(self, measured: Output_contra, learn: LearnBatch) -> Tensor:
        """Compute the loss of each slot, [N], before it is multiplied by the loss weights.
        ``measured`` is the model's output, with gradient."""

    def metrics(self, measured: Output_contra, learn: LearnBatch) -> Metrics:
        """Compute metrics of a train batch. ``measured`` is the model's output, without
        gradient."""

    def adapt(self, metrics: Metrics) -> None:
        """Change coefficients of the loss, given the metrics of a gradient step. The learner calls
        it after each step that changed the policy; it may do nothing."""

    def state(self) -> dict[str, Any]:
        """Numbers that `adapt` may have changed, for a checkpoint; empty if `adapt` does
        nothing."""

    def load_state(self, numbers: dict[str, Any]) -> None:
        """Continue from ``numbers``, the result of `state`."""

    def held_out_metrics(self, measured: Output_contra, batch: PackedBatch) -> Metrics:
        """Compute metrics of the held-out rows of a supervised run, named ``validation/…``, from
        the model's output ``measured`` on the batch of these rows."""

    def policy_logprobs(self, measured: Output_contra) -> Tensor | None:
        """The log-probabilities [N] in the output of a policy; None if the model is a reward
        model."""


class Checkpointable(Protocol):
    """A learner as the recorder sees it: state that is saved in and loaded from checkpoints."""

    incarnation: int
    """Number of times that the run was restarted from a checkpoint; it is sent with the weights."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that were applied."""

    def state(self) -> LearnerState:
        """The state from which `load_state` continues bit for bit. Its tensors may be views of the
        learner's tensors: save them before the next step. The learner of a mesh returns only the
        numbers, because each rank writes its own tensors to files."""

    def load_state(self, state: LearnerState) -> None:
        """Continue from a saved state. Call it on a new learner that was created from the same
        model and recipe as the saved one."""


class Learner(Checkpointable, Protocol):
    """Scores batches without gradient, takes gradient steps and provides the new weights."""

    @property
    def program(self) -> Program: ...

    @property
    def device(self) -> torch.device:
        """The device to which batches must be moved."""

    def begin(self, number: int) -> None:
        """Begin rollout ``number``, counted from 0. Call it before `score`.

        It replaces the reference by the current policy if that is due (`LossProgram.refresh`). It
        also decides whether the policy learns from this rollout, or only the critic, because the
        critic is still warming up.
        """

    def score(self, batch: PackedBatch, parts: Sequence[Pack] | None = None) -> Scores:
        """Run the forward passes without gradient that are needed before the first gradient step
        of a rollout, and keep the rollout until `finish`.

        ``parts`` divide the rollout ``batch`` into train batches; None to split it into train
        batches of about ``train.batch`` responses.
        """

    def step(self, learn: LearnBatch) -> Metrics:
        """Take a gradient step on a train batch; return its metrics.

        A step whose loss or gradient is not finite changes no weights and has ``train/skipped`` =
        1. Raises a BurnishError after ``train.max_skipped`` such steps in a row, not counting those
        in which fp16 lowers its loss scale, and a MismatchError if sampler and learner disagree by
        more than the recipe allows.
        """

    def finish(self) -> tuple[Metrics, Tensor | None]:
        """End the rollout that was scored last. Call it once, after the rollout's last step.

        Returns its KL metrics, and the policy's log-probabilities [N] before the first gradient
        step (None if the learner did not score all of them).
        """

    def held_out_drift(self, batch: PackedBatch) -> Metrics:
        """Return metrics of the KL of the current policy to the initial model, on responses that
        the policy does not learn from; no metrics without ``train.log_kl``."""

    def held_out_metrics(self, batch: PackedBatch) -> Metrics:
        """Run the model over the held-out rows of a supervised run, without gradient; return
        metrics."""

    def weights(self) -> Weights:
        """The trainable weights, in compute precision, to be loaded into engines. Weights of a mesh
        are gathered when they are read: read them before the next step."""

    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens under the current weights. Comparing them
        with an engine's probe shows whether the engine has the same weights."""


class StepRunner(Protocol):
    """Runs whole training steps, here or in an actor, and publishes the new weights."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that were applied."""

    def learn(self, number: int, groups: list[Group]) -> Step:
        """Run training step ``number``, counted from 1, on these groups: score them, take all
        gradient steps, and return the result. The engines keep their weights until `publish`."""

    def publish(self) -> None:
        """Make the engines sample with the current weights from now on."""
