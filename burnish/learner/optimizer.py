"""AdamW over fp32 master weights, whatever the precision of the forward and backward passes.

For P trainable parameters, the optimizer holds 16 P bytes: masters, gradients and two moments. In
fp32 the policy's own parameters are the masters. In bf16 and fp16 the policy is a copy of them in
that precision (2 P bytes more), which is rewritten after each step. Its gradients are added to the
fp32 gradients as soon as the backward pass has computed them. Frozen weights are held once, in the
policy's precision. With ``train.offload``, the moments (8 P bytes) are in main memory, and on the
GPU only while their weights are updated.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from burnish.learner.offload import pinned_zeros, slices, staged
from burnish.learner.ranks import Ranks, SingleProcess, local
from burnish.model.protocol import Module
from burnish.recipe.recipe import TrainConfig

Model = TypeVar("Model", bound=Module)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions that need a copy. A run resolves 'auto' before it creates a learner; otherwise the
learner treats 'auto' as fp32."""
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Number of consecutive steps without overflow after which the loss scale doubles."""


def rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of gradient step ``step``, counted from 0.

    It rises over the first ``warmup_steps`` to the full rate. Then it stays constant, or falls
    linearly or along half a cosine to ``final_share`` of the full rate at step ``decay_steps``, and
    stays there.
    """
    full = train.learning_rate
    if step < train.warmup_steps:
        return full * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return full
    assert train.decay_steps is not None, "Recipe.decay_steps sets it"
    falling = max(1, train.decay_steps - train.warmup_steps)
    fallen = min(1.0, (step - train.warmup_steps) / falling)
    if train.schedule == "cosine":
        fallen = (1 - math.cos(math.pi * fallen)) / 2
    return full * (1 - (1 - train.final_share) * fallen)


def is_decayed(name: str) -> bool:
    """Return whether weight decay applies to a parameter of this name: to all parameters, also
    embeddings, heads and adapters, except norms and biases."""
    *modules, kind = name.split(".")
    return kind != "bias" and not any(module.endswith("norm") for module in modules)


class Optimizer(Generic[Model]):
    """AdamW for one model: its fp32 master weights, moments, learning-rate schedule and loss scale.

    For each gradient step call `backward` (once or more), `gradient_norm` and `step`; to skip a
    step, call `drop_gradients` instead of `step`.
    """

    def __init__(self, policy: Model, train: TrainConfig, ranks: Ranks | None = None) -> None:
        """Place ``policy`` (a policy, reward model or critic) on its ranks, and create master
        weights and moments for it. The masters start from its weights, so these must be in fp32 or
        better. ``ranks`` are the processes that learn together; None if this is the only one."""
        self.train, self.ranks = train, ranks or SingleProcess()
        policy = self.ranks.place(policy, train.precision)
        self.is_scaled = train.precision == "fp16"
        self.scale = FIRST_SCALE if self.is_scaled else 1.0
        """Loss scale of fp16. An overflow halves it; `GROWTH_INTERVAL` steps without one double
        it."""
        self.good_steps = 0
        self.masters = self.policy = policy
        if train.precision in PRECISIONS and not self.ranks.casts:
            self.masters = policy.to(torch.float32)
            self.policy = copy.deepcopy(policy).to(PRECISIONS[train.precision])
            both = zip(self.policy.parameters(), self.masters.parameters(), strict=True)
            for low, master in both:
                if master.requires_grad:
                    low.register_post_accumulate_grad_hook(partial(_fold, master))  # type: ignore[no-untyped-call]
                else:
                    master.data = low.data
        learning = {n: p for n, p in self.masters.named_parameters() if p.requires_grad}
        self._learning = list(learning.values())
        """The masters of the trainable weights."""
        kinds: dict[float, list[Tensor]] = {}
        for name, p in learning.items():
            kinds.setdefault(train.weight_decay * is_decayed(name), []).append(p)
        self.adamw = torch.optim.AdamW(
            [{"params": some, "weight_decay": decay} for decay, some in kinds.items()],
            train.learning_rate,
            train.betas,
            train.eps,
            fused=True,
        )
        # Allocated here and not at the first step, so that memory is known and state is complete.
        create = pinned_zeros if train.offload else torch.zeros_like
        for p in self._learning:
            moments = {name: create(p) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[p] = {"step": torch.zeros((), device=p.device), **moments}

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss and add its gradients to the masters' gradients. In fp16
        the loss, and so the gradients, are multiplied by the loss scale."""
        scaled = loss * self.scale if self.is_scaled else loss
        scaled.backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self) -> float:
        """Return the L2 norm of the accumulated gradients over all parameters and ranks, divided by
        the loss scale.

        Call it exactly once before each `step`: it may sum partial gradients over the ranks in
        place.
        """
        named = self.masters.named_parameters()
        return (
            self.ranks.norm((name, p.grad) for name, p in named if p.grad is not None) / self.scale
        )

    def step(self, number: int, norm: float) -> float:
        """Clip the accumulated gradients, whose norm is ``norm``, to ``train.clip_norm``; take
        AdamW step ``number`` (counted from 0) with them, delete them, and update the low-precision
        copy. Return the learning rate.

        Without gradients no weight changes.
        """
        shrink = min(1.0, self.train.clip_norm / norm if norm else 1.0) / self.scale
        gradients = [local(p.grad) for p in self._learning if p.grad is not None]
        if shrink != 1 and gradients:
            torch._foreach_mul_(gradients, shrink)
        learning_rate = rate(self.train, number)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self._step_offloaded() if self.train.offload else self.adamw.step()
        self.good_steps += self.is_scaled
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
        self.drop_gradients()
        self._refresh()
        return learning_rate

    @torch.no_grad()
    def _step_offloaded(self) -> None:
        """Take an AdamW step, slice by slice: copy its moments to its device, update weights and
        moments, and copy the moments back. The results are those of a step of all parameters."""
        parts = [
            (group, p, part)
            for group in self.adamw.param_groups
            for p in group["params"]
            if p.grad is not None
            for part in slices(p.numel())
        ]
        moments = [
            tuple(self.adamw.state[p][name].view(-1)[part] for name in ("exp_avg", "exp_avg_sq"))
            for _, p, part in parts
        ]
        device = self._learning[0].device if self._learning else torch.device("cpu")
        for (group, p, part), (first, second) in zip(parts, staged(moments, device), strict=True):
            beta1, beta2 = group["betas"]
            step = self.adamw.state[p]["step"]  # counted once per parameter
            step = step if part.stop == p.numel() else step.clone()
            adamw(
                [p.view(-1)[part]], [p.grad.reshape(-1)[part]], [first], [second], [], [step],
                fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip

    def shrink_scale(self) -> bool:
        """Halve the loss scale and return True; if it is already 1, keep it and return False."""
        self.good_steps = 0
        is_above = self.scale > 1
        self.scale /= 2 if is_above else 1
        return is_above

    def drop_gradients(self) -> None:
        """Delete the accumulated gradients, of the masters and of the low-precision copy."""
        for p in (*self._learning, *self.policy.parameters()):
            p.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return two dicts: views of the trainable masters, their moments and step counters, by
        name; and the loss scale with its counter."""
        tensors = {}
        for name, p in self.masters.named_parameters():
            if p.requires_grad:
                tensors[f"master.{name}"] = p.detach()
                tensors |= {f"{key}.{name}": value for key, value in self.adamw.state[p].items()}
        return tensors, {"loss_scale": self.scale, "good_steps": self.good_steps}

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        """Load the loss scale and its counter, and update the low-precision copy from the masters.
        Call it after the tensors of `state` have been overwritten."""
        self.scale, self.good_steps = numbers["loss_scale"], numbers["good_steps"]
        self._refresh()

    def _refresh(self) -> None:
        if self.policy is not self.masters:
            copy_weights(self.masters, self.policy)


@torch.no_grad()
def copy_weights(source: Module, target: Module) -> None:
    """Overwrite the weights of ``target`` that are trainable in ``source`` with the source's
    values, rounded to the target's precision. Frozen weights are not copied. Both models have the
    same parameters, and at least one is trainable."""
    both = zip(target.parameters(), source.parameters(), strict=True)
    learned = (map(local, pair) for pair in both if pair[1].requires_grad)
    to, of = zip(*learned, strict=True)
    torch._foreach_copy_(to, of)


def _fold(master: Tensor, low: Tensor) -> None:
    """Add a finished low-precision gradient to its master's gradient, and free it."""
    assert low.grad is not None, "the hook runs after the gradient has been accumulated"
    if master.grad is None:
        master.grad = low.grad.to(master.dtype)
    else:
        master.grad.add_(low.grad)
    low.grad = None
