"""The learner: scores batches without gradient, takes gradient steps, hands out weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish import pieces
from burnish.config import ObjectiveConfig, TrainConfig
from burnish.errors import BurnishError, RunError
from burnish.learner.objective import Metrics, describe, describe_kl, token_loss
from burnish.learner.optim import Optimizer
from burnish.learner.policy import Policy, copy_weights
from burnish.progress import Report, unheard
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import Pack, cut, take, take_streams, train_batches
from burnish.types import LearnBatch, Measured, PackedBatch, Weights


class Scores(NamedTuple):
    """Forward passes without gradient before the first step."""

    proximal: Tensor | None
    """[N]; None if nothing reads it before the step, whose own forward pass is the same."""
    reference: Tensor | None
    """[N]; None if the recipe has no KL term."""
    lower: Tensor | None = None
    """[N, d] hidden states below the layers that learn; None if all layers learn."""


class Update(NamedTuple):
    """What a gradient step leaves to be known."""

    metrics: Metrics
    logprobs: Tensor
    """[N] of the policy before the step, from the step's own forward pass."""


class State(NamedTuple):
    """All that a learner has become since it was made: tensors, and what JSON can hold."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


class Learner:
    """Executes per-token streams; what the algorithm is called, it does not know.

    Beside the optimizer's memory (see ``optim``) it holds one frozen copy of the policy, in compute
    precision, for each of: the reference (a recipe with KL), the initial model and the policy of
    the step before (``train.log_kl``). A reference that is never refreshed is the initial model,
    and then they share one copy.
    """

    def __init__(self, policy: Policy, objective: ObjectiveConfig, train: TrainConfig) -> None:
        self.objective = objective
        self.train = train
        self.optimizer = Optimizer(policy, train)
        self.policy = self.optimizer.policy
        self.version = 0
        self.incarnation = 0
        self.skipped_in_a_row = 0
        self.refreshed = False
        with_kl = objective.kl != "none"
        initial = self._frozen() if with_kl or train.log_kl else None
        self.reference = initial if with_kl else None
        self.initial = initial if train.log_kl else None
        self.previous = self._frozen() if train.log_kl else None

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def refresh_reference(self) -> None:
        """From now on the reference is the policy as it is."""
        self.reference, self.refreshed = self._frozen(), True

    def score(
        self, batch: PackedBatch, report: Report = unheard, *, batches: int | None = None
    ) -> Scores:
        """What advantages, loss and logs need of the policies before the first step.

        If one step is taken, its own forward pass is the proximal policy's, so that another is made
        only for what reads it earlier. ``report`` is told the packs that are done, of each pass
        anew. ``batches`` is the planned number of train batches (see ``train_batches``).
        """
        steps = self.train.epochs * len(train_batches(batch, self.train.batch, count=batches))
        packs = self._packs(batch, batches)
        lower, proximal, reference = self._lower(packs, report), None, None
        if self.objective.proximal == "behavior":
            proximal = batch.behavior_logprobs
        elif steps > 1 or pieces.reads_proximal_first(self.objective):
            proximal = self._logprobs(self.policy, packs, lower, report)
        if self.reference is not None:
            reference = self._logprobs(self.reference, packs, lower, report)
        return Scores(proximal, reference, lower)

    def logprobs(self, batch: PackedBatch, report: Report = unheard) -> Tensor:
        """[N] of the policy as it is, without gradient."""
        return self._logprobs(self.policy, self._packs(batch), None, report)

    def drift(
        self,
        batch: PackedBatch,
        scores: Scores,
        report: Report = unheard,
        *,
        batches: int | None = None,
    ) -> Callable[[Tensor], Metrics]:
        """KL of the policy that sampled the batch to the initial model and to the one before it,
        as a function of its log-probabilities [N], which the first step may yet have to make.

        To be called once per rollout, before the first step: the policy as it is then becomes the
        next call's "previous". No metrics unless ``train.log_kl``.
        """
        if self.initial is None or self.previous is None:
            return lambda logprobs: {}
        part, slots = Pack.whole(batch)
        if self.train.log_kl_responses is not None:
            some = min(self.train.log_kl_responses, len(batch.rewards))
            part, slots = take(batch, torch.arange(some, device=batch.tokens.device))
            batches = None
        packs = self._packs(part, batches)
        lower = None if scores.lower is None else scores.lower[slots]
        initial, whole = scores.reference, True
        if self.reference is not self.initial or initial is None:
            initial, whole = self._logprobs(self.initial, packs, lower, report), False
        previous = self._logprobs(self.previous, packs, lower, report)
        copy_weights(self.policy, self.previous)

        def measure(logprobs: Tensor) -> Metrics:
            metrics = describe_kl("previous", logprobs[slots], previous, part)
            known = (logprobs, initial, batch) if whole else (logprobs[slots], initial, part)
            return metrics | describe_kl("initial", *known)

        return measure

    def held_out_drift(self, batch: PackedBatch, report: Report = unheard) -> Metrics:
        """KL of the policy as it is to the initial model, on responses that it sampled but does not
        learn from. No metrics unless ``train.log_kl``, nor before the first step: it is 0."""
        if self.initial is None or not self.version:
            return {}
        packs = self._packs(batch)
        lower = self._lower(packs, report)
        ours, initial = (
            self._logprobs(policy, packs, lower, report) for policy in (self.policy, self.initial)
        )
        return describe_kl("held_out", ours, initial, batch)

    def step(self, learn: LearnBatch, report: Report = unheard) -> Update:
        """One gradient step on one train batch; one that is not finite is skipped and counted.

        ``report`` is told the packs that are done.
        """
        measured, loss = self._accumulate(learn, report)
        logprobs = measured.logprobs
        norm = self.optimizer.gradient_norm()
        metrics = describe(self.objective, measured, learn)
        metrics |= mismatch(logprobs, learn.batch, self.version)
        metrics |= {"train/loss": loss, "train/grad_norm": norm, "train/skipped": 0.0}
        if self.optimizer.scale.moves:
            metrics["train/loss_scale"] = self.optimizer.scale.value
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(loss, norm)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return Update(finite | {"train/skipped": 1.0}, logprobs)
        metrics["train/learning_rate"] = self.optimizer.step(self.version, norm)
        self.version += 1
        self.skipped_in_a_row = 0
        return Update(metrics, logprobs)

    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        """A copy in that precision, rounded from the masters; None: in compute precision."""
        source = self.policy if dtype is None else self.optimizer.masters
        tensors = {
            name: view.to(dtype or view.dtype, copy=True)
            for name, view in source.exchange().items()
        }
        return Weights(self.version, self.incarnation, tensors)

    def state(self) -> State:
        """What `load_state` needs to go on bit for bit. The tensors are views: write them at once.

        The initial model is not part of it; a learner is made from it again.
        """
        tensors, numbers = self.optimizer.state()
        copies = {
            "previous": self.previous,
            "reference": self.reference if self.refreshed else None,
        }
        learns = {name for name, p in self.policy.named_parameters() if p.requires_grad}
        for kind, policy in copies.items():
            named = () if policy is None else policy.named_parameters()
            tensors |= {f"{kind}.{name}": p.detach() for name, p in named if name in learns}
        names = ("version", "skipped_in_a_row", "refreshed")
        return State(tensors, numbers | {name: getattr(self, name) for name in names})

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Takes over the state of a learner that was made from the same model and recipe."""
        if state.numbers["refreshed"]:
            self.refresh_reference()
        views = self.state().tensors
        ours, given = (
            {(name, t.shape) for name, t in tensors.items()} for tensors in (views, state.tensors)
        )
        if ours != given:
            name, _ = min(ours ^ given)
            raise RunError(
                f"the checkpoint does not fit its recipe and model: {name} is missing in one of "
                "them or has another shape; resume with the recipe and the model of the run"
            )
        for name, view in views.items():
            view.copy_(state.tensors[name])
        self.optimizer.load_numbers(state.numbers)
        self.version = state.numbers["version"]
        self.skipped_in_a_row = state.numbers["skipped_in_a_row"]

    def _accumulate(self, learn: LearnBatch, report: Report = unheard) -> tuple[Measured, float]:
        """Adds up the gradients over the packs -> what was measured, and the loss."""
        parts, loss = [], 0.0
        packs = self._cut(learn.batch)
        for done, pack in enumerate(packs, 1):
            part = take_streams(learn, pack)
            measured = self.policy.score(pack.batch, part.lower)
            if not self.objective.entropy_coefficient:
                measured = measured._replace(entropy=measured.entropy.detach())
            per_token = token_loss(self.objective, measured, part)
            part_loss = weighted_sum(per_token, part.loss_weight)
            self.optimizer.backward(part_loss)
            loss += part_loss.item()
            streams = torch.stack([x.detach() for x in measured], 1)
            parts.append((pack.slots, streams))
            report(done, len(packs))
        return Measured(*_join(parts).unbind(1)), loss

    def _lower(self, packs: list[Pack], report: Report) -> Tensor | None:
        """[N, d], for all forward passes over the packs; None if all layers learn."""
        if not self.policy.lower_layers:
            return None
        return self._scored(packs, self.policy.lower, None, report)

    def _logprobs(
        self, policy: Policy, packs: list[Pack], lower: Tensor | None, report: Report
    ) -> Tensor:
        return self._scored(packs, lambda *given: policy.score(*given).logprobs, lower, report)

    @torch.no_grad()
    def _scored(
        self,
        packs: list[Pack],
        score: Callable[..., Tensor],
        lower: Tensor | None,
        report: Report,
    ) -> Tensor:
        """[N, …]; ``score`` is called with a pack and, if they are given, its lower states."""
        parts = []
        for done, (pack, slots) in enumerate(packs, 1):
            known = () if lower is None else (lower[slots],)
            parts.append((slots, score(pack, *known)))
            report(done, len(packs))
        return _join(parts)

    def _packs(self, batch: PackedBatch, batches: int | None = None) -> list[Pack]:
        """The packs that training will use, so that the numerics are its own."""
        return [
            Pack(pack.batch, whole.slots[pack.slots])
            for whole in train_batches(batch, self.train.batch, count=batches)
            for pack in self._cut(whole.batch)
        ]

    def _cut(self, batch: PackedBatch) -> list[Pack]:
        return cut(batch, sequences=self.train.micro_sequences, tokens=self.train.micro_tokens)

    def _skip(self, loss: float, norm: float) -> None:
        self.optimizer.drop_gradients()
        if math.isfinite(loss) and self.optimizer.scale.shrink():
            return  # fp16 is still looking for its loss scale: nothing is wrong yet
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.train.max_skipped:
            raise BurnishError(
                f"{self.skipped_in_a_row} gradient steps in a row after version {self.version} "
                f"were not finite (the last: loss {loss:g}, gradient norm {norm:g}); lower "
                "train.learning_rate, look at the rewards in the run's log, or raise "
                "train.max_skipped"
            )

    def _frozen(self) -> Policy:
        """A copy that shares the weights that never change."""
        shared = {id(p): p for p in self.policy.parameters() if not p.requires_grad}
        return copy.deepcopy(self.policy, shared).requires_grad_(False)


def mismatch(logprobs: Tensor, batch: PackedBatch, version: int) -> Metrics:
    """The gap between sampler and learner, on tokens that this very version sampled."""
    same = batch.is_action & (batch.versions == version)
    if not same.any():
        return {}
    gap = (logprobs - batch.behavior_logprobs)[same].abs()
    return {"mismatch/logprob_mean": gap.mean().item(), "mismatch/logprob_max": gap.max().item()}


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[N, …] from (slots [n], values [n, …]) of packs, which have every slot between them.

    A prompt may be in several of them, with the same values.
    """
    slots, values = (torch.cat(column) for column in zip(*parts, strict=True))
    size = int(slots.max()) + 1
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, slots, values)
