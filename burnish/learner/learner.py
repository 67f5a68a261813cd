"""The learner of one process: it scores batches, takes gradient steps and provides weights.

The learners of a mesh's ranks are of the same class; `Ranks` hides the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import torch
from torch import Tensor

from burnish.console.progress import each
from burnish.errors import BurnishError
from burnish.learner.average import MovingAverage
from burnish.learner.mismatch import check_mismatch
from burnish.learner.optimizer import Optimizer, copy_weights
from burnish.learner.program import at, critic_loss, critic_metrics, describe_kl, mismatch
from burnish.learner.protocol import LearnerState, LossProgram, Metrics, Output
from burnish.learner.ranks import Ranks, SingleProcess
from burnish.model import lora
from burnish.model.critic import Critic
from burnish.model.protocol import HiddenStates, Probed, Trainable
from burnish.recipe.recipe import TrainConfig
from burnish.rl.reduce import weighted_sum
from burnish.rollout.packing import Pack, cut, take, take_streams, train_batches
from burnish.types import LearnBatch, PackedBatch, Scores, Weights


@dataclass
class _Rollout:
    """Data of a rollout that the learner keeps from `LocalLearner.score` to the last gradient
    step."""

    batch: PackedBatch
    version: int
    """The policy's version before the first gradient step."""
    lower: Tensor | None
    """[N, d] hidden states below the trainable layers; None if all layers are trainable."""
    logprobs: Tensor | None
    """[N] log-probabilities of the policy before the first step; None if the learner has not scored
    all of them."""
    others: dict[str, tuple[Pack, Tensor]]
    """Other policies for the KL metrics, by name ("initial", "previous", "teacher"): the responses
    to compare on, and the other policy's log-probabilities [n] of them."""


class LocalLearner(Generic[Output]):
    """Trains a model with the loss that a program defines: it scores rollouts without gradient,
    takes gradient steps, and provides weights and checkpoints.

    In addition to the optimizer's memory (see `burnish.learner.optimizer`), it holds one frozen
    copy of the policy, in compute precision, for each of: the reference (if the program needs its
    pass), the initial model and the policy one rollout before (``train.log_kl``). A reference that
    never changes equals the initial model, and they share one copy. Copies share the weights that
    never change. The reference of a policy with an adapter is the model without the adapter, so it
    takes no memory, unless it is refreshed or a moving average.

    A critic has its own optimizer, and takes and skips steps together with the policy.
    """

    def __init__(
        self,
        policy: Trainable[Output],
        program: LossProgram[Output],
        train: TrainConfig,
        teacher: Trainable[Output] | None = None,
        critic: Optimizer[Critic] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``policy`` is trained in place, and its precision and placement may change.
        ``teacher`` is a frozen model in compute precision; None if the program has no teacher.
        ``critic`` is the optimizer of a critic that was created from this policy; None if the
        program reads no values. ``ranks`` are the processes that learn together; None if this is
        the only one."""
        self.program = program
        self.train = train
        self.ranks: Ranks = ranks or SingleProcess()
        self.optimizer = Optimizer(policy, train, self.ranks)
        self.policy = self.optimizer.policy
        self.critic = None if critic is None else critic.policy
        self.optimizers: dict[str, Optimizer[Any]] = {"policy": self.optimizer}
        if critic is not None:
            self.optimizers["critic"] = critic
        self.moves_policy = True
        """Whether the policy learns from this rollout; False while only the critic learns."""
        self.version = 0
        self.incarnation = 0
        self.skipped_in_a_row = 0
        self.refreshed = False
        self.teacher = teacher
        self._rollout: _Rollout | None = None
        has_reference = "reference" in program.passes(1)
        is_copied = train.log_kl or (has_reference and program.ema is None)
        base = lora.without(self._frozen()) if is_copied else None
        self.reference = base if has_reference else None
        self.average: MovingAverage | None = None
        """Moves the reference after each gradient step; None if the objective has no average."""
        if program.ema is not None:
            self.reference = self._frozen()
            masters = self.optimizer.masters
            self.average = MovingAverage(program.ema, self.reference, masters)
        self.initial = base if train.log_kl else None
        if train.log_kl and not lora.starts_at_base(self.policy):
            self.initial = self._frozen()
        self.previous = self._frozen() if train.log_kl else None

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def begin(self, number: int) -> None:
        refresh, critic = self.program.refresh, self.program.critic
        if refresh is not None and number % refresh == 0:
            self._refresh_reference()
        self.moves_policy = critic is None or number >= critic.warmup_rollouts

    def score(self, batch: PackedBatch, parts: Sequence[Pack] | None = None) -> Scores:
        parts = train_batches(batch, self.train.batch) if parts is None else parts
        packs = self._packs(parts)
        lower = self._lower(packs)
        passes: dict[str, Callable[[list[Pack], int, Tensor | None], Tensor]] = {
            "proximal": partial(self._logprobs, self.policy),
            "reference": partial(self._logprobs, self.reference),
            "teacher": partial(self._logprobs, self.teacher),
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
        with self.ranks.gathered(self.policy, self.critic):
            measured, values, summed = self._accumulate(learn)
        norms = {name: o.gradient_norm() for name, o in self.optimizers.items()}
        loss = summed.item()
        metrics = self.program.metrics(measured, learn)
        if values is not None and self.program.critic is not None:
            metrics |= critic_metrics(self.program.critic, values, learn)
            metrics["train/critic_grad_norm"] = norms["critic"]
        logprobs = self.program.policy_logprobs(measured)
        if logprobs is not None:
            metrics |= self._compare(logprobs, learn)
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
        if self.moves_policy:
            self.program.adapt(metrics)
            if self.average is not None:
                self.average.move()
        self.version += 1
        self.skipped_in_a_row = 0
        return metrics

    def finish(self) -> tuple[Metrics, Tensor | None]:
        """End the rollout that was scored last and discard its forward passes. Return KL metrics,
        and the policy's log-probabilities [N] before the first gradient step, if they are known.

        The metrics are the KL of that policy (or else of the sampler) to the teacher, if there is
        one, and with ``train.log_kl`` to the initial model and to the policy one rollout before.
        """
        rollout, self._rollout = self._rollout, None
        assert rollout is not None, "call score before finish"
        own = rollout.batch.behavior_logprobs if rollout.logprobs is None else rollout.logprobs
        metrics: Metrics = {}
        for name, (part, logprobs) in rollout.others.items():
            metrics |= describe_kl(name, own[part.slots], logprobs, part.batch)
        return metrics, rollout.logprobs

    def output(self, batch: PackedBatch) -> Output:
        """Run the current model over a batch without gradient; return its output, a record of
        tensors [N]."""
        packs = self._packs(train_batches(batch, self.train.batch))
        with torch.no_grad(), self.ranks.gathered(self.policy):
            scored = [self.policy.score(pack.batch) for pack in each(packs)]
        slots = [pack.slots for pack in packs]
        streams = [list(zip(slots, stream, strict=True)) for stream in zip(*scored, strict=True)]
        return _rebuilt(scored[0], [self._join(parts, len(batch.tokens)) for parts in streams])

    def held_out_metrics(self, batch: PackedBatch) -> Metrics:
        return self.program.held_out_metrics(self.output(batch), batch)

    def probe(self) -> tuple[float, ...]:
        assert isinstance(self.policy, Probed), "only a policy is sent to an engine"
        return self.policy.probe()

    def held_out_drift(self, batch: PackedBatch) -> Metrics:
        """Return metrics of the KL of the current policy to the initial model, on responses that it
        sampled but does not learn from. There are no metrics without ``train.log_kl``, nor before
        the first step, when the KL is 0."""
        if self.initial is None or not self.version:
            return {}
        packs = self._packs(train_batches(batch, self.train.batch))
        lower, size = self._lower(packs), len(batch.tokens)
        both = self.policy, self.initial
        ours, initial = (self._logprobs(policy, packs, size, lower) for policy in both)
        return describe_kl("held_out", ours, initial, batch)

    def weights(self) -> Weights:
        """The policy's trainable weights, in compute precision, under the names that engines read.
        For a policy with an adapter, these are the merged weights of the modules that it adapts,
        computed in fp32 from the master weights and rounded once."""
        tensors = self.ranks.exchange(self.policy, self.train.precision)
        masters = self.optimizer.masters
        adapter = lora.adapter_of(masters)
        if adapter is not None:
            tensors = {**tensors, **lora.merged(masters, adapter)}
        is_partial = not all(p.requires_grad for p in self.policy.parameters())
        return Weights(self.version, self.incarnation, tensors, is_partial)

    def state(self) -> LearnerState:
        """The optimizers' states, the trainable weights of the previous policy and of a reference
        that has changed, and the counters. The tensors are views: save them before the next step.

        The initial model is not part of the state: a resumed learner is created from it again.
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
        averages = {} if self.average is None else self.average.state()
        tensors |= {f"policy.reference.{name}": tensor for name, tensor in averages.items()}
        if adapted := self.program.state():
            numbers["program"] = adapted
        names = ("version", "skipped_in_a_row", "refreshed")
        return LearnerState(tensors, numbers | {name: getattr(self, name) for name in names})

    @torch.no_grad()
    def load_state(self, state: LearnerState) -> None:
        if state.numbers["refreshed"]:
            self._refresh_reference()
        self.ranks.fill(self.state().tensors, state.tensors)
        if self.average is not None:
            self.average.round()
        for name, optimizer in self.optimizers.items():
            optimizer.load_numbers(state.numbers[name])
        self.program.load_state(state.numbers.get("program", {}))
        self.version = state.numbers["version"]
        self.skipped_in_a_row = state.numbers["skipped_in_a_row"]

    def _accumulate(self, learn: LearnBatch) -> tuple[Output, Tensor | None, Tensor]:
        """Run forward and backward passes over all packs of a train batch and accumulate the
        gradients in the optimizers.

        Returns, without gradient: the model's output, the critic's values [N] (None without a
        critic) and the policy's loss (with a shared critic, the sum of both losses). The CPU does
        not wait for a GPU here.
        """
        saved = None if self._rollout is None else self._rollout.lower
        critic, parts = self.program.critic, []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for pack in each(self._cut(learn.batch)):
            part = take_streams(learn, pack)
            lower = None if part.slots is None else at(part.slots, saved)
            measured, values = self._measure(pack.batch, lower)
            per_token = self.program.token_loss(measured, part)
            if values is not None and critic is not None:
                per_token = per_token + critic_loss(critic, values, part)
            part_loss = weighted_sum(per_token, part.loss_weight)
            # Free the part of the graph that the loss does not need before the backward pass.
            measured = _rebuilt(measured, [x.detach() for x in measured])
            if part_loss.requires_grad:  # False while a critic with its own body learns alone
                self.optimizer.backward(part_loss)
            loss += part_loss.detach()
            if self.critic is not None and critic is not None and values is None:
                values = self.critic.score(self._hidden_states(), pack.batch, lower)
                value_loss = weighted_sum(critic_loss(critic, values, part), part.loss_weight)
                self.optimizers["critic"].backward(value_loss)
            streams = measured if values is None else (*measured, values.detach())
            parts.append((pack.slots, torch.stack(streams, 1)))
        joined = self._join(parts, len(learn.batch.tokens)).unbind(1)
        count = len(measured)
        values = joined[count] if len(joined) > count else None
        return _rebuilt(measured, joined[:count]), values, self.ranks.join(loss)

    def _measure(self, batch: PackedBatch, lower: Tensor | None) -> tuple[Output, Tensor | None]:
        """Run the forward pass of a pack; return the model's output, with gradient if the policy
        learns, and the values of a critic that shares the policy's body (None without such a
        critic)."""
        with torch.set_grad_enabled(self.moves_policy):
            if self.critic is None or self.critic.body is not None:
                return self.policy.score(batch, lower), None
            measured, hidden = self._hidden_states().read(batch, lower)
        return measured, self.critic.values(hidden, batch)

    def _hidden_states(self) -> HiddenStates[Output]:
        """Return the policy, after an assertion that it provides hidden states for a critic."""
        assert isinstance(self.policy, HiddenStates), "a critic needs a policy with hidden states"
        return self.policy

    @torch.no_grad()
    def _values(self, packs: list[Pack], size: int, lower: Tensor | None) -> Tensor:
        """Run the current critic over the packs without gradient; return its values [N]."""
        assert self.critic is not None, "the program reads values"
        score = partial(self.critic.score, self._hidden_states())
        scored = [(p.slots, score(p.batch, at(p.slots, lower))) for p in each(packs)]
        return self._join(scored, size)

    def _compare(self, logprobs: Tensor, learn: LearnBatch) -> Metrics:
        """Compare the policy's log-probabilities [N] in a step with the sampler's and with the
        policy's before the rollout's first step; return the metrics. Raises a MismatchError if the
        sampler's differ too much."""
        rollout, version = self._rollout, self.version
        if rollout is not None and rollout.version == version:
            # A first step over the whole rollout also scores the policy before that step.
            is_whole = len(logprobs) == len(rollout.batch.tokens)
            rollout.logprobs = logprobs if is_whole else rollout.logprobs
        gap = mismatch(logprobs, learn.batch, version)
        check_mismatch(logprobs, learn.batch, version, gap, self.train)
        return gap | self._drift(logprobs, learn)

    def _drift(self, logprobs: Tensor, learn: LearnBatch) -> Metrics:
        """The mean absolute difference between the log-probabilities of two policies, as a metric.
        In a rollout's first step it is ``drift/staleness``: the learner against the sampler, on
        tokens that older versions sampled. In later steps it is ``drift/update``: the learner now
        against the learner before the first step."""
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
        """Score the rollout with the initial model and with the policy one rollout before; return
        the field ``others`` of `_Rollout`, empty without ``train.log_kl``. Then copy the current
        policy's weights into ``self.previous`` for the next rollout."""
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
        """Replace the reference by a frozen copy of the current policy."""
        self.reference, self.refreshed = self._frozen(), True

    @torch.no_grad()
    def _lower(self, packs: list[Pack]) -> Tensor | None:
        """Run the frozen lower layers over the packs; return the hidden states [N, d] below the
        trainable layers. None if all layers are trainable."""
        if not self.policy.lower_layers:
            return None
        size = 1 + max(int(pack.slots.max()) for pack in packs)
        return self._join([(p.slots, self.policy.lower(p.batch)) for p in each(packs)], size)

    def _cut(self, batch: PackedBatch) -> list[Pack]:
        tokens, sequences = self.train.micro_tokens, self.train.micro_sequences
        return self.ranks.divide(batch, partial(cut, tokens=tokens, samples=sequences))

    def _packs(self, parts: Sequence[Pack]) -> list[Pack]:
        """Cut the train batches ``parts`` into this rank's packs, for passes without gradient. The
        slots of the packs are slots of the batch that was split into ``parts``.

        Gradient steps cut train batches in the same way. Their forward passes therefore have the
        same numerics as the passes without gradient, unless responses were left out of a train
        batch.
        """
        return [
            Pack(pack.batch, whole.slots[pack.slots])
            for whole in parts
            for pack in self._cut(whole.batch)
        ]

    def _skip(self, loss: float, norm: float) -> None:
        for optimizer in self.optimizers.values():
            optimizer.drop_gradients()
        if math.isfinite(loss) and max(o.shrink_scale() for o in self.optimizers.values()):
            return  # fp16 is still searching for its loss scale: this is not a failure
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.train.max_skipped:
            raise BurnishError(
                f"{self.skipped_in_a_row} gradient steps in a row after version {self.version} "
                f"were not finite (the last: loss {loss:g}, gradient norm {norm:g}); lower "
                "train.learning_rate, look at the rewards in the run's log, or raise "
                "train.max_skipped"
            )

    def _frozen(self) -> Trainable[Output]:
        return self.ranks.frozen(self.policy, self.train.precision)

    @torch.no_grad()
    def _logprobs(
        self,
        policy: Trainable[Output] | None,
        packs: list[Pack],
        size: int,
        lower: Tensor | None,
    ) -> Tensor:
        """Compute a policy's log-probabilities [N] without gradient; slots outside ``packs`` are 0.

        ``policy`` must not be None; its type allows None because callers pass optional attributes.
        ``size`` is N, the number of slots. ``lower`` [N, d] are the outputs of the frozen lower
        layers, or None if no layers are frozen; a policy without frozen layers ignores it.
        """
        assert policy is not None, "a pass names a policy that exists"
        lower = lower if policy.lower_layers else None
        parts = []
        with self.ranks.gathered(policy):
            for pack in each(packs):
                measured = policy.score(pack.batch, at(pack.slots, lower))
                logprobs = self.program.policy_logprobs(measured)
                assert logprobs is not None, "the passes of a program score policies"
                parts.append((pack.slots, logprobs))
        return self._join(parts, size)

    def _join(self, parts: list[tuple[Tensor, Tensor]], size: int) -> Tensor:
        """Write the values [n, …] of packs to their slots [n] of one tensor [N, …], where N is
        ``size``, and sum over the ranks, because each rank fills only the slots of its own packs.

        A prompt may be in several packs, with the same values.
        """
        slots, values = (torch.cat(column) for column in zip(*parts, strict=True))
        own = values.new_zeros(size, *values.shape[1:]).index_copy(0, slots, values)
        return self.ranks.join(own)


def _rebuilt(output: Output, streams: Sequence[Tensor]) -> Output:
    """Return a record of the same type as ``output`` with other streams as its fields."""
    return type(output)(*streams)
