"""The learner: scores batches without gradient, takes gradient steps, hands out weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from burnish.config import ObjectiveConfig
from burnish.errors import BurnishError
from burnish.learner.objective import Metrics, token_loss
from burnish.rl.reduce import weighted_sum
from burnish.types import LearnBatch, PackedBatch, Weights


class Scores(NamedTuple):
    """Forward passes without gradient, each [N]."""

    proximal: Tensor
    reference: Tensor | None


class Policy(Protocol):
    """An ``nn.Module`` that can score a packed batch."""

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every action in its slot, 0 elsewhere: [N], [N]."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def requires_grad_(self, requires_grad: bool) -> Self: ...


class Learner:
    def __init__(self, policy: Policy, objective: ObjectiveConfig, *, learning_rate: float) -> None:
        self.policy = policy
        self.objective = objective
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
        self.version = 0
        self.reference: Policy | None = None
        if objective.kl != "none":
            self.refresh_reference()

    def refresh_reference(self) -> None:
        """From now on the reference is the policy as it is."""
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> Scores:
        """What advantages and loss need of the policy as it is before the first step."""
        if self.objective.proximal == "behavior":
            proximal = batch.behavior_logprobs
        else:
            proximal = self.policy.score(batch)[0]
        reference = None if self.reference is None else self.reference.score(batch)[0]
        return Scores(proximal, reference)

    def step(self, learn: LearnBatch) -> Metrics:
        """One gradient step on one train batch."""
        logprobs, entropy = self.policy.score(learn.batch)
        per_token, metrics = token_loss(self.objective, logprobs, entropy, learn)
        loss = weighted_sum(per_token, learn.loss_weight)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm(
            [p.grad for p in self.policy.parameters() if p.grad is not None]
        )
        if not (loss.isfinite() and norm.isfinite()):
            raise BurnishError(
                f"the gradient step after version {self.version} is not finite (loss "
                f"{loss.item():g}, gradient norm {norm.item():g}); lower train.learning_rate or "
                "look at the rewards in the run's log"
            )
        metrics |= mismatch(logprobs.detach(), learn.batch, self.version)
        self.optimizer.step()
        self.version += 1
        return metrics | {"train/loss": loss.item(), "train/grad_norm": norm.item()}

    def weights(self) -> Weights:
        tensors = {name: value.clone() for name, value in self.policy.state_dict().items()}
        return Weights(self.version, 0, tensors)


def mismatch(logprobs: Tensor, batch: PackedBatch, version: int) -> Metrics:
    """The gap between sampler and learner, on tokens that this very version sampled."""
    same = batch.is_action & (batch.versions == version)
    if not same.any():
        return {}
    gap = (logprobs - batch.behavior_logprobs)[same].abs()
    return {"mismatch/logprob_mean": gap.mean().item(), "mismatch/logprob_max": gap.max().item()}
