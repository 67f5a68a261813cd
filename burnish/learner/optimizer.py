"""AdamW over fp32 master weights, whatever the precision of the forward and backward passes.

Of P parameters that learn it holds 16 P bytes: masters, gradients, two moments. In fp32 the
policy's own parameters are the masters; in bf16 and fp16 the policy is a cast copy of them (2 P
bytes more), written anew after each step, and a gradient leaves it for the fp32 sum as soon as the
backward pass has made it. Weights that do not learn are held once, in the policy's precision.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from burnish.learner.ranks import Alone, Ranks, local
from burnish.model.reward import RewardModel
from burnish.model.sorter import Sorter
from burnish.model.transformer import Transformer
from burnish.schema.recipe import TrainConfig

Policy = Transformer | Sorter | RewardModel
Model = TypeVar("Model", bound=nn.Module)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions that need a copy. A run settles 'auto' before it makes a learner; a learner that a
script makes takes it as fp32."""
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps in a row without overflow after which the loss scale doubles."""


def rate(train: TrainConfig, step: int) -> float:
    """The learning rate of gradient step ``step``, counted from 0.

    It rises over the first ``warmup_steps``, which end at the full rate, then stays, or falls to 0
    at step ``decay_steps``.
    """
    full = train.learning_rate
    if step < train.warmup_steps:
        return full * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return full
    assert train.decay_steps is not None, "Recipe.decay_steps"
    falling = max(1, train.decay_steps - train.warmup_steps)
    return full * (1 - min(1.0, (step - train.warmup_steps) / falling))


class Optimizer(Generic[Model]):
    def __init__(self, policy: Model, train: TrainConfig, ranks: Ranks | None = None) -> None:
        """The masters start as the policy's (or the critic's) weights, so hand it over in fp32 (or
        better). ``ranks`` as in `Learner`."""
        self.train, self.ranks = train, ranks or Alone()
        policy = self.ranks.place(policy, train.precision)
        self.is_scaled = train.precision == "fp16"
        self.scale = FIRST_SCALE if self.is_scaled else 1.0
        """The loss scale of fp16: a gradient too large halves it, a long run without doubles it."""
        self.good_steps = 0
        self.masters = self.policy = policy
        self._learning = [p for p in policy.parameters() if p.requires_grad]
        """The masters of the weights that learn."""
        if train.precision in PRECISIONS and not self.ranks.casts:
            self.masters = policy.to(torch.float32)
            self.policy = copy.deepcopy(policy).to(PRECISIONS[train.precision])
            both = zip(self.policy.parameters(), self.masters.parameters(), strict=True)
            for low, master in both:
                if master.requires_grad:
                    low.register_post_accumulate_grad_hook(partial(_fold, master))  # type: ignore[no-untyped-call]
                else:
                    master.data = low.data
        self.adamw = torch.optim.AdamW(
            self._learning, train.learning_rate, train.betas, weight_decay=0.0, fused=True
        )
        # Now rather than at the first step: so the memory is known and the state is whole.
        for p in self._learning:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[p] = {"step": torch.zeros((), device=p.device), **moments}

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients to the masters'."""
        scaled = loss * self.scale if self.is_scaled else loss
        scaled.backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self) -> float:
        """The norm of the gradients that were added up so far, without the loss scale."""
        named = self.masters.named_parameters()
        return (
            self.ranks.norm((name, p.grad) for name, p in named if p.grad is not None) / self.scale
        )

    def step(self, number: int, norm: float) -> float:
        """Steps along the gradients, clipped given their norm; returns the learning rate.

        Without gradients no weight changes.
        """
        shrink = min(1.0, self.train.clip_norm / norm if norm else 1.0) / self.scale
        gradients = [local(p.grad) for p in self._learning if p.grad is not None]
        if shrink != 1 and gradients:
            torch._foreach_mul_(gradients, shrink)
        learning_rate = rate(self.train, number)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.good_steps += self.is_scaled
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
        self.drop_gradients()
        self._refresh()
        return learning_rate

    def shrink_scale(self) -> bool:
        """Halves the loss scale, which stays at 1 or above; false if there was nothing to halve."""
        self.good_steps = 0
        is_above = self.scale > 1
        self.scale /= 2 if is_above else 1
        return is_above

    def drop_gradients(self) -> None:
        for p in (*self._learning, *self.policy.parameters()):
            p.grad = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Views of the masters that learn, of moments and step counters; and the loss scale."""
        tensors = {}
        for name, p in self.masters.named_parameters():
            if p.requires_grad:
                tensors[f"master.{name}"] = p.detach()
                tensors |= {f"{key}.{name}": value for key, value in self.adamw.state[p].items()}
        return tensors, {"loss_scale": self.scale, "good_steps": self.good_steps}

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        """To be called once the tensors of ``state`` have been written over."""
        self.scale, self.good_steps = numbers["loss_scale"], numbers["good_steps"]
        self._refresh()

    def _refresh(self) -> None:
        if self.policy is not self.masters:
            copy_weights(self.masters, self.policy)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """The weights that learn in the source, rounded to the target's precision."""
    both = zip(target.parameters(), source.parameters(), strict=True)
    learned = (map(local, pair) for pair in both if pair[1].requires_grad)
    to, of = zip(*learned, strict=True)
    torch._foreach_copy_(to, of)


def _fold(master: Tensor, low: Tensor) -> None:
    """Moves a finished low-precision gradient into its master's."""
    assert low.grad is not None, "a hook that runs once the gradient is there"
    if master.grad is None:
        master.grad = low.grad.to(master.dtype)
    else:
        master.grad.add_(low.grad)
    low.grad = None
