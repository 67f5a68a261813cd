"""The learner: scores batches without gradient, takes gradient steps, hands out weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.errors import BurnishError, RunError
from burnish.learner.objective import Metrics, Program, at, describe_kl, mismatch
from burnish.learner.optim import Optimizer, Policy, copy_weights
from burnish.progress import Report, unheard
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import Pack, cut, take, take_streams, train_batches
from burnish.schema import TrainConfig
from burnish.types import LearnBatch, Measured, PackedBatch, Scores, Weights


class Finished(NamedTuple):
    """The log of a rollout whose gradient steps have been taken."""

    metrics: Metrics
    """KL of the policy that sampled the rollout to the initial model and to the policy one rollout
    before; empty unless ``train.log_kl``."""
    logprobs: Tensor | None
    """[N] of the policy before the first step; None if the learner did not score all of them."""


class State(NamedTuple):
    """The changes of a learner since it was made: tensors, and values that JSON can hold.

    Names begin with the model that they belong to: "policy." today, "critic." once there is one.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


@dataclass
class _Passes:
    """Forward passes without gradient over a batch."""

    packs: list[Pack]
    """The packs that training will use, so that the numerics are the same."""
    report: Report
    """Counts the packs that are done, from 0 in each pass."""
    lower: Tensor | None = None
    """[N, d] hidden states below the layers that learn; None if all layers learn."""

    def logprobs(self, policy: Policy) -> Tensor:
        """[N]"""
        return self.joined(lambda p: policy.score(p.batch, at(p.slots, self.lower)).logprobs)

    @torch.no_grad()
    def joined(self, values: Callable[[Pack], Tensor]) -> Tensor:
        """[N, …] from the values of each pack."""
        parts = []
        for done, pack in enumerate(self.packs, 1):
            parts.append((pack.slots, values(pack)))
            self.report(done, len(self.packs))
        return _join(parts)


@dataclass
class _Rollout:
    """The memory of a rollout between its scores and its last gradient step."""

    batch: PackedBatch
    lower: Tensor | None
    """[N, d] hidden states below the layers that learn; None if all layers learn."""
    logprobs: Tensor
    """[N] of the policy before the first step; the sampler's until the learner has its own."""
    drift: Callable[[Tensor], Metrics]
    is_new: bool = True
    """No gradient step was taken yet."""


class Learner:
    """Runs a program of forward passes and gradient steps.

    Beside the optimizer's memory (see ``optim``) it holds one frozen copy of the policy, in compute
    precision, for each of: the reference (a program that needs its pass), the initial model and the
    policy one rollout before (``train.log_kl``). A reference that is never refreshed is the initial
    model, and then they share one copy.
    """

    def __init__(self, policy: Policy, program: Program, train: TrainConfig) -> None:
        self.program = program
        self.train = train
        self.optimizer = Optimizer(policy, train)
        self.policy = self.optimizer.policy
        self.version = 0
        self.incarnation = 0
        self.skipped_in_a_row = 0
        self.refreshed = False
        self._rollout: _Rollout | None = None
        has_reference = "reference" in program.passes(1)
        initial = self._frozen() if has_reference or train.log_kl else None
        self.reference = initial if has_reference else None
        self.initial = initial if train.log_kl else None
        self.previous = self._frozen() if train.log_kl else None

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def begin(self, number: int) -> None:
        """Begins rollout ``number``, counted from 0: it may be time to refresh the reference."""
        if self.program.refresh is not None and number % self.program.refresh == 0:
            self._refresh_reference()

    def score(
        self, batch: PackedBatch, parts: Sequence[Pack] | None = None, report: Report = unheard
    ) -> Scores:
        """Runs the forward passes that the program and ``train.log_kl`` need before the first step.

        ``parts`` are the train batches of the rollout, by default of ``train.batch`` responses.
        ``report`` counts the packs that are done, from 0 in each pass.
        """
        parts = train_batches(batch, self.train.batch) if parts is None else parts
        passes = self._passes(parts, report)
        policies: dict[str, Any] = {"proximal": self.policy, "reference": self.reference}
        needed = self.program.passes(self.train.epochs * len(parts))
        scores = Scores(**{name: passes.logprobs(policies[name]) for name in needed})
        known = batch.behavior_logprobs if scores.proximal is None else scores.proximal
        drift = self._drift(batch, passes, scores)
        self._rollout = _Rollout(batch, passes.lower, known, drift)
        return scores

    def step(self, learn: LearnBatch, report: Report = unheard) -> Metrics:
        """Takes a gradient step on a train batch; a step that is not finite is skipped and counted.

        ``report`` counts the packs that are done.
        """
        measured, loss = self._accumulate(learn, report)
        self._keep_first(measured.logprobs)
        norm = self.optimizer.gradient_norm()
        metrics = self.program.metrics(measured, learn)
        metrics |= mismatch(measured.logprobs, learn.batch, self.version)
        metrics |= {"train/loss": loss, "train/grad_norm": norm, "train/skipped": 0.0}
        if self.optimizer.scale.moves:
            metrics["train/loss_scale"] = self.optimizer.scale.value
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(loss, norm)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return finite | {"train/skipped": 1.0}
        metrics["train/learning_rate"] = self.optimizer.step(self.version, norm)
        self.version += 1
        self.skipped_in_a_row = 0
        return metrics

    def finish(self) -> Finished:
        """Ends the rollout that was scored last and forgets its forward passes."""
        rollout, self._rollout = self._rollout, None
        assert rollout is not None, "score comes before finish"
        is_own = rollout.logprobs is not rollout.batch.behavior_logprobs
        return Finished(rollout.drift(rollout.logprobs), rollout.logprobs if is_own else None)

    def logprobs(self, batch: PackedBatch, report: Report = unheard) -> Tensor:
        """[N] of the policy as it is, without gradient."""
        passes = self._passes(train_batches(batch, self.train.batch), report)
        return passes.logprobs(self.policy)

    def held_out_drift(self, batch: PackedBatch, report: Report = unheard) -> Metrics:
        """KL of the policy as it is to the initial model, on responses that it sampled but does not
        learn from. There are no metrics without ``train.log_kl``, nor before the first step, when
        the KL is 0."""
        if self.initial is None or not self.version:
            return {}
        passes = self._passes(train_batches(batch, self.train.batch), report)
        ours, initial = passes.logprobs(self.policy), passes.logprobs(self.initial)
        return describe_kl("held_out", ours, initial, batch)

    def weights(self) -> Weights:
        """A copy of the policy's weights, in compute precision."""
        tensors = {name: view.clone() for name, view in self.policy.exchange().items()}
        return Weights(self.version, self.incarnation, tensors)

    def state(self) -> State:
        """The state from which `load_state` goes on bit for bit. Its tensors are views of the
        learner's own: write them at once.

        The initial model is not part of the state; a learner is made from that model again.
        """
        tensors, numbers = self.optimizer.state()
        learns = {name for name, p in self.policy.named_parameters() if p.requires_grad}
        reference = self.reference if self.refreshed else None
        for kind, policy in {"previous": self.previous, "reference": reference}.items():
            named = () if policy is None else policy.named_parameters()
            tensors |= {f"{kind}.{name}": p.detach() for name, p in named if name in learns}
        names = ("version", "skipped_in_a_row", "refreshed")
        return State(
            {f"policy.{name}": tensor for name, tensor in tensors.items()},
            {"policy": numbers} | {name: getattr(self, name) for name in names},
        )

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Takes over the state of a learner that was made from the same model and recipe."""
        if state.numbers["refreshed"]:
            self._refresh_reference()
        views = self.state().tensors
        ours, given = ({(name, t.shape) for name, t in of.items()} for of in (views, state.tensors))
        if ours != given:
            raise RunError(
                f"the checkpoint does not fit its recipe and model: {min(ours ^ given)[0]} is "
                "missing in one of them or has another shape; resume with the recipe and the model "
                "of the run"
            )
        for name, view in views.items():
            view.copy_(state.tensors[name])
        self.optimizer.load_numbers(state.numbers["policy"])
        self.version = state.numbers["version"]
        self.skipped_in_a_row = state.numbers["skipped_in_a_row"]

    def _accumulate(self, learn: LearnBatch, report: Report = unheard) -> tuple[Measured, float]:
        """Adds up the gradients over the packs -> log-probabilities and entropies, and the loss."""
        saved = None if self._rollout is None else self._rollout.lower
        parts, loss = [], 0.0
        packs = cut(learn.batch, self.train.micro_tokens)
        for done, pack in enumerate(packs, 1):
            part = take_streams(learn, pack)
            lower = None if part.slots is None else at(part.slots, saved)
            measured = self.policy.score(pack.batch, lower)
            per_token = self.program.token_loss(measured, part)
            part_loss = weighted_sum(per_token, part.loss_weight)
            # A graph that the loss does not need is let go before the backward pass.
            measured = Measured(*(x.detach() for x in measured))
            self.optimizer.backward(part_loss)
            loss += part_loss.item()
            parts.append((pack.slots, torch.stack(measured, 1)))
            report(done, len(packs))
        return Measured(*_join(parts).unbind(1)), loss

    def _keep_first(self, logprobs: Tensor) -> None:
        """The first step, if it runs over the whole rollout, has scored the policy before it."""
        rollout = self._rollout
        if rollout is None:
            return
        if rollout.is_new and len(logprobs) == len(rollout.batch.tokens):
            rollout.logprobs = logprobs
        rollout.is_new = False

    def _drift(
        self, batch: PackedBatch, passes: _Passes, scores: Scores
    ) -> Callable[[Tensor], Metrics]:
        """KL to the initial model and to the policy one rollout before, as a function of the
        policy's log-probabilities [N], which the first step may yet have to make.

        The policy as it is becomes the next call's "previous".
        """
        if self.initial is None or self.previous is None:
            return lambda logprobs: {}
        whole = part = Pack.whole(batch)
        if self.train.log_kl_responses is not None:
            some = min(self.train.log_kl_responses, len(batch.rewards))
            part = take(batch, torch.arange(some, device=batch.tokens.device))
            packs = self._packs(train_batches(part.batch, self.train.batch))
            passes = _Passes(packs, passes.report, at(part.slots, passes.lower))
        initial, scored = scores.reference, whole
        if self.reference is not self.initial or initial is None:
            initial, scored = passes.logprobs(self.initial), part
        previous = passes.logprobs(self.previous)
        copy_weights(self.policy, self.previous)

        def measure(logprobs: Tensor) -> Metrics:
            metrics = describe_kl("previous", logprobs[part.slots], previous, part.batch)
            return metrics | describe_kl("initial", logprobs[scored.slots], initial, scored.batch)

        return measure

    def _refresh_reference(self) -> None:
        """From now on the reference is the policy as it is."""
        self.reference, self.refreshed = self._frozen(), True

    def _passes(self, parts: Sequence[Pack], report: Report) -> _Passes:
        passes = _Passes(self._packs(parts), report)
        if self.policy.lower_layers:
            passes.lower = passes.joined(lambda pack: self.policy.lower(pack.batch))
        return passes

    def _packs(self, parts: Sequence[Pack]) -> list[Pack]:
        return [
            Pack(pack.batch, whole.slots[pack.slots])
            for whole in parts
            for pack in cut(whole.batch, self.train.micro_tokens)
        ]

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


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[N, …] from (slots [n], values [n, …]) of packs, which have every slot between them.

    A prompt may be in several of them, with the same values.
    """
    slots, values = (torch.cat(column) for column in zip(*parts, strict=True))
    size = int(slots.max()) + 1
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, slots, values)
