"""The critic: a model of the value of the context before each action token."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from burnish.model.logprobs import token_values
from burnish.model.protocol import HiddenStates
from burnish.model.transformer import Transformer
from burnish.types import Measured, PackedBatch, ResponseRewards


class Critic(nn.Module):
    """``values[t]`` = V(token_<t) = w · h + b, where h is the hidden state that predicts token t.

    The hidden states come either from a separate body, which is initialised with the policy's
    weights, or from the policy's body. w and b are 0 at first, so all values are 0.
    """

    def __init__(self, policy: Transformer, *, shared: bool) -> None:
        """If ``shared``, the critic reads the policy's hidden states; otherwise its own body is a
        copy of ``policy`` that shares only the weights that are frozen in the policy."""
        super().__init__()
        self.body = None if shared else _body(policy)
        """The separate body; None if the critic reads the policy's hidden states."""
        self.weight = nn.Parameter(torch.zeros_like(policy.norm.weight))
        self.bias = nn.Parameter(torch.zeros_like(policy.norm.weight[:1]))

    def score(
        self,
        policy: HiddenStates[Measured | ResponseRewards],
        batch: PackedBatch,
        lower: Tensor | None = None,
    ) -> Tensor:
        """Compute the value of the context before each action token, [N]; 0 in other slots.

        ``policy`` provides the hidden states if the critic has no body of its own. ``lower`` [N, d]
        are the hidden states that enter the trainable layers, which are the same for policy and
        critic; None to compute them here.
        """
        hidden = (policy if self.body is None else self.body).hidden(batch, lower)
        return self.values(hidden, batch)

    def values(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Compute the result of `score` from the hidden states [N, d] after the final norm."""
        actions = batch.is_action.nonzero().squeeze(1)
        found = token_values(self.weight, self.bias, hidden, batch.predecessor, actions)
        return found.new_zeros(len(batch.tokens)).index_copy(0, actions, found)


def _body(policy: Transformer) -> Transformer:
    """Return a copy of the policy without its token head. Frozen weights are shared with the
    policy, not copied."""
    frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
    body = copy.deepcopy(policy, frozen)
    body.head = None
    return body
