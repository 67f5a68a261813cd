"""The learner: scores batches without gradient, takes gradient steps, hands out weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.learner import alarm
from burnish.learner.objective import Metrics, Program, at, describe_kl, mismatch
from burnish.learner.optim import Optimizer, Policy, copy_weights
from burnish.learner.ranks import Alone, Ranks
from burnish.model import lora
from burnish.model.transformer import Transformer
from burnish.model.value import Critic
from burnish.progress import each
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import Pack, cut, take, take_streams, train_batches
from burnish.schema.recipe import TrainConfig
from burnish.types import LearnBatch, Measured, PackedBatch, Scores, Weights


class State(NamedTuple):
    """The changes of a learner since it was made: tensors, and values that JSON can hold.

    Names begin with the model that they belong to: "policy." or "critic.".
    """

    tensors: Mapping[str, Tensor]
    numbers: dict[str, Any]


@dataclass
class _Rollout:
    """The memory of a rollout between its scores and its last gradient step."""

    batch: PackedBatch
    version: int
    """The policy's version before the first step."""
    lower: Tensor | None
    """[N, d] hidden states below the layers that learn; None if all layers learn."""
    logprobs: Tensor | None
    """[N] of the policy before the first step; None if the learner has not scored all of them."""
    others: dict[str, tuple[Pack, Tensor]]
    """Policies that the policy is compared with: some responses and their log-probabilities [n]."""


class Learner:
    """Runs a program of forward passes and gradient steps.

    Beside the optimizer's memory (see ``optim``) it holds one frozen copy of the policy, in compute
    precision, for each of: the reference (a program that needs its pass), the initial model and the
    policy one rollout before (``train.log_kl``). A reference that is never refreshed is the initial
    model, and then they share one copy. Copies share the weights that never change, and the
    reference of a policy with an adapter is the model without it, so it takes no memory.
    ``teacher`` is a frozen model of its own, in compute precision; None if the program needs no
    such pass.

    A critic has an optimizer of its own, and steps and skips steps together with the policy.
    """

    def __init__(
        self,
        policy: Policy,
        program: Program,
        train: TrainConfig,
        teacher: Policy | None = None,
        critic: Optimizer[Critic] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``critic`` is None if the program reads no values; it was made from this policy.
        ``ranks`` are the processes that learn together; None if this is the only one."""
        self.program = program
        self.train = train
        self.ranks: Ranks = ranks or Alone()
        self.optimizer = Optimizer(policy, train, self.ranks)
        self.policy = self.optimizer.policy
        self.critic = None if critic is None else critic.policy
        self.optimizers: dict[str, Optimizer[Any]] = {"policy": self.optimizer}
        if critic is not None:
            self.optimizers["critic"] = critic
        self.moves_policy = True
        """Whether the policy learns from this rollout, and not the critic alone."""
        self.version = 0
        self.incarnation = 0
        self.skipped_in_a_row = 0
        self.refreshed = False
        self.teacher = teacher
        self._rollout: _Rollout | None = None
        has_reference = "reference" in program.passes(1)
        base = lora.without(self._frozen()) if has_reference or train.log_kl else None
        self.reference = base if has_reference else None
        self.initial = base if train.log_kl else None
        if train.log_kl and not lora.starts_at_base(self.policy):
            self.initial = self._frozen()
        self.previous = self._frozen() if train.log_kl else None

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def begin(self, number: int) -> None:
        """Begins rollout ``number``, counted from 0: it may be time to refresh the reference, and
        the policy may have to wait for its critic."""
        if self.program.refresh is not None and number % self.program.refresh == 0:
            self._refresh_reference()
        self.moves_policy = self.program.moves_policy(number)

    def score(self, batch: PackedBatch, parts: Sequence[Pack] | None = None) -> Scores:
        """Runs the forward passes that the program and ``train.log_kl`` need before the first step.

        ``parts`` are the train batches of the rollout, by default of ``train.batch`` responses.
        """
        parts = train_batches(batch, self.train.batch) if parts is None else parts
        packs = self._packs(parts)
        lower = self._lower(packs)
        passes: dict[str, Any] = {
            "proximal": partial(self._logprobs, self.policy),
            "reference": partial(self._logprobs, cast(Policy, self.reference)),
            "teacher": partial(self._logprobs, cast(Policy, self.teacher)),
            "values": self._values,
        }
        needed = self.program.passes(self.train.epochs * len(parts))
        size = len(batch.tokens)
        scores = Scores(**{name: passes[name](packs, size, lower) for name in needed})
        others = self._others(batch, packs, lower, scores)
        if scores.teacher is not None:
            others["teacher"] = Pack.whole(batch), scores.teacher
        self._rollout = _Rollout(batch, self.version, lower, scores.proximal, others)
        return scores

    def step(self, learn: LearnBatch) -> Metrics:
        """Takes a gradient step on a train batch; skips and counts a step that is not finite."""
        with self.ranks.gathered(self.policy, self.critic):
            measured, values, summed = self._accumulate(learn)
        self._remember(measured.logprobs)
        norms = {name: o.gradient_norm() for name, o in self.optimizers.items()}
        loss = summed.item()
        metrics = self.program.metrics(measured, learn)
        if values is not None:
            metrics |= self.program.value_metrics(values, learn)
            metrics["train/critic_grad_norm"] = norms["critic"]
        gap = mismatch(measured.logprobs, learn.batch, self.version)
        alarm.check(measured.logprobs, learn.batch, self.version, gap, self.train)
        metrics |= gap
        metrics |= self._drift(measured.logprobs, learn)
        metrics |= {"train/loss": loss, "train/grad_norm": norms["policy"], "train/skipped": 0.0}
        if self.optimizer.is_scaled:
            metrics["train/loss_scale"] = self.optimizer.scale
        loss, norm = loss + metrics.get("train/value_loss", 0.0), sum(norms.values())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(loss, norm)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return finite | {"train/skipped": 1.0}
        steps = {name: o.step(self.version, norms[name]) for name, o in self.optimizers.items()}
        metrics["train/learning_rate"] = steps["policy"]
        self.version += 1
        self.skipped_in_a_row = 0
        return metrics

    def finish(self) -> tuple[Metrics, Tensor | None]:
        """Ends the rollout that was scored last and forgets its forward passes.

        Returns the KL of the policy that sampled it to the teacher, if there is one, and with
        ``train.log_kl`` to the initial model and to the policy one rollout before; and the
        log-probabilities [N] of the policy before the first step (None if the learner did not score
        all of them).
        """
        rollout, self._rollout = self._rollout, None
        assert rollout is not None, "score comes before finish"
        own = rollout.batch.behavior_logprobs if rollout.logprobs is None else rollout.logprobs
        metrics: Metrics = {}
        for name, (part, logprobs) in rollout.others.items():
            metrics |= describe_kl(name, own[part.slots], logprobs, part.batch)
        return metrics, rollout.logprobs

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] of the policy as it is, without gradient."""
        packs = self._packs(train_batches(batch, self.train.batch))
        return self._logprobs(self.policy, packs, len(batch.tokens))

    def held_out_drift(self, batch: PackedBatch) -> Metrics:
        """KL of the policy as it is to the initial model, on responses that it sampled but does not
        learn from. There are no metrics without ``train.log_kl``, nor before the first step, when
        the KL is 0."""
        if self.initial is None or not self.version:
            return {}
        packs = self._packs(train_batches(batch, self.train.batch))
        lower, size = self._lower(packs), len(batch.tokens)
        both = self.policy, self.initial
        ours, initial = (self._logprobs(policy, packs, size, lower) for policy in both)
        return describe_kl("held_out", ours, initial, batch)

    def weights(self) -> Weights:
        """The policy's weights that learn, in compute precision. Those that an adapter changes are
        merged with its masters in fp32, and rounded once."""
        tensors = self.ranks.exchange(self.policy, self.train.precision)
        masters = self.optimizer.masters
        adapter = lora.adapter_of(masters)
        if adapter is not None and isinstance(masters, Transformer):
            tensors = {**tensors, **lora.merged(masters, adapter)}
        is_partial = not all(p.requires_grad for p in self.policy.parameters())
        return Weights(self.version, self.incarnation, tensors, is_partial)

    def state(self) -> State:
        """The state from which `load_state` goes on bit for bit. Its tensors are views of the
        learner's own: write them at once.

        The initial model is not part of the state; a learner is made from that model again.
        """
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for model, optimizer in self.optimizers.items():
            found, numbers[model] = optimizer.state()
            tensors |= {f"{model}.{name}": tensor for name, tensor in found.items()}
        learns = {name for name, p in self.policy.named_parameters() if p.requires_grad}
        reference = self.reference if self.refreshed else None
        for kind, policy in {"previous": self.previous, "reference": reference}.items():
            named = () if policy is None else policy.named_parameters()
            tensors |= {f"policy.{kind}.{name}": p.detach() for name, p in named if name in learns}
        names = ("version", "skipped_in_a_row", "refreshed")
        return State(tensors, numbers | {name: getattr(self, name) for name in names})

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Takes over the state of a learner that was made from the same model and recipe."""
        if state.numbers["refreshed"]:
            self._refresh_reference()
        self.ranks.fill(self.state().tensors, state.tensors)
        for name, optimizer in self.optimizers.items():
            optimizer.load_numbers(state.numbers[name])
        self.version = state.numbers["version"]
        self.skipped_in_a_row = state.numbers["skipped_in_a_row"]

    def _accumulate(self, learn: LearnBatch) -> tuple[Measured, Tensor | None, Tensor]:
        """Adds up the gradients over the packs -> log-probabilities and entropies, the critic's
        values (None without a critic), and the loss. A GPU is not waited for."""
        saved = None if self._rollout is None else self._rollout.lower
        parts = []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in each(self._cut(learn.batch)):
            part = take_streams(learn, pack)
            lower = None if part.slots is None else at(part.slots, saved)
            measured, values = self._measure(pack.batch, lower)
            per_token = self.program.token_loss(measured, part)
            if values is not None:
                per_token = per_token + self.program.value_loss(values, part)
            part_loss = weighted_sum(per_token, part.loss_weight)
            # A graph that the loss does not need is let go before the backward pass.
            measured = Measured(*(x.detach() for x in measured))
            if part_loss.requires_grad:  # unless a critic with a body of its own learns alone
                self.optimizer.backward(part_loss)
            loss += part_loss.detach()
            if self.critic is not None and values is None:
                values = self.critic.score(self.policy, pack.batch, lower)
                value_loss = weighted_sum(self.program.value_loss(values, part), part.loss_weight)
                self.optimizers["critic"].backward(value_loss)
            streams = measured if values is None else (*measured, values.detach())
            parts.append((pack.slots, torch.stack(streams, 1)))
        logprobs, entropy, *more = self._join(parts, len(learn.batch.tokens)).unbind(1)
        return Measured(logprobs, entropy), more[0] if more else None, self.ranks.join(loss)

    def _measure(self, batch: PackedBatch, lower: Tensor | None) -> tuple[Measured, Tensor | None]:
        """Log-probabilities and entropies, with gradient if the policy learns; and the values of a
        critic that reads the policy's hidden states (None if it does not)."""
        with torch.set_grad_enabled(self.moves_policy):
            if self.critic is None or self.critic.body is not None:
                return self.policy.score(batch, lower), None
            policy = cast(Transformer, self.policy)  # the sorting model has no critic
            measured, hidden = policy.read(batch, lower)
        return measured, self.critic.values(hidden, batch)

    @torch.no_grad()
    def _values(self, packs: list[Pack], size: int, lower: Tensor | None) -> Tensor:
        """[N] of the critic as it is."""
        assert self.critic is not None, "the program reads values"
        score = partial(self.critic.score, self.policy)
        scored = [(p.slots, score(p.batch, at(p.slots, lower))) for p in each(packs)]
        return self._join(scored, size)

    def _remember(self, logprobs: Tensor) -> None:
        """The first step, if it runs over the whole rollout, has scored the policy before it."""
        rollout = self._rollout
        if rollout is not None and rollout.version == self.version:
            is_whole = len(logprobs) == len(rollout.batch.tokens)
            rollout.logprobs = logprobs if is_whole else rollout.logprobs

    def _drift(self, logprobs: Tensor, learn: LearnBatch) -> Metrics:
        """The mean gap between the log-probabilities of two policies: in a rollout's first step
        those of its older tokens' sampler and of the learner (staleness), and in later steps those
        of the learner before the first step and now (update)."""
        batch, rollout = learn.batch, self._rollout
        if rollout is None or learn.slots is None:
            return {}
        name, action, other = "update", batch.is_action, at(learn.slots, rollout.logprobs)
        if rollout.version == self.version:
            older = action & (batch.versions < self.version)
            name, action, other = "staleness", older, batch.behavior_logprobs
        if other is None or not action.any():
            return {}
        return {f"drift/{name}": (logprobs - other)[action].abs().mean().item()}

    def _others(
        self, batch: PackedBatch, packs: list[Pack], lower: Tensor | None, scores: Scores
    ) -> dict[str, tuple[Pack, Tensor]]:
        """The policies to compare with, see `_Rollout`; the policy as it is becomes the next
        call's "previous"."""
        if self.initial is None or self.previous is None:
            return {}
        whole = part = Pack.whole(batch)
        if self.train.log_kl_responses is not None:
            some = min(self.train.log_kl_responses, len(batch.rewards))
            part = take(batch, torch.arange(some, device=batch.tokens.device))
            packs = self._packs(train_batches(part.batch, self.train.batch))
            lower = at(part.slots, lower)
        size = len(part.slots)
        others = {"previous": (part, self._logprobs(self.previous, packs, size, lower))}
        if scores.reference is not None and self.reference is self.initial:
            others["initial"] = whole, scores.reference
        else:
            others["initial"] = part, self._logprobs(self.initial, packs, size, lower)
        copy_weights(self.policy, self.previous)
        return others

    def _refresh_reference(self) -> None:
        """From now on the reference is the policy as it is."""
        self.reference, self.refreshed = self._frozen(), True

    @torch.no_grad()
    def _lower(self, packs: list[Pack]) -> Tensor | None:
        """[N, d] hidden states below the layers that learn; None if all layers learn."""
        if not self.policy.lower_layers:
            return None
        size = 1 + max(int(pack.slots.max()) for pack in packs)
        return self._join([(p.slots, self.policy.lower(p.batch)) for p in each(packs)], size)

    def _cut(self, batch: PackedBatch) -> list[Pack]:
        tokens, sequences = self.train.micro_tokens, self.train.micro_sequences
        return self.ranks.divide(batch, partial(cut, tokens=tokens, sequences=sequences))

    def _packs(self, parts: Sequence[Pack]) -> list[Pack]:
        """The packs that training will use, so that the numerics are the same."""
        return [
            Pack(pack.batch, whole.slots[pack.slots])
            for whole in parts
            for pack in self._cut(whole.batch)
        ]

    def _skip(self, loss: float, norm: float) -> None:
        for optimizer in self.optimizers.values():
            optimizer.drop_gradients()
        if math.isfinite(loss) and max(o.shrink_scale() for o in self.optimizers.values()):
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
        frozen: Policy = self.ranks.frozen(self.policy, self.train.precision)
        return frozen

    @torch.no_grad()
    def _logprobs(
        self, policy: Policy, packs: list[Pack], size: int, lower: Tensor | None = None
    ) -> Tensor:
        """[N], where N is ``size``; ``lower`` as in `_Rollout`. A policy that has no frozen layers
        does not share them."""
        lower = lower if policy.lower_layers else None
        scored = ((p.slots, policy.score(p.batch, at(p.slots, lower))) for p in each(packs))
        with self.ranks.gathered(policy):
            parts = [(slots, measured.logprobs) for slots, measured in scored]
        return self._join(parts, size)

    def _join(self, parts: list[tuple[Tensor, Tensor]], size: int) -> Tensor:
        """[N, …] from (slots [n], values [n, …]) of packs; the ranks have every slot between them.

        A prompt may be in several packs, with the same values.
        """
        slots, values = (torch.cat(column) for column in zip(*parts, strict=True))
        own = values.new_zeros(size, *values.shape[1:]).index_copy(0, slots, values)
        return self.ranks.join(own)
