"""The critic: the value of the context before each action token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from burnish.model.logprobs import token_values
from burnish.model.transformer import Transformer
from burnish.types import PackedBatch


class Critic(nn.Module):
    """``values[t]`` = V(token_<t) = w · h + b, where h is the hidden state that predicts token t.

    The hidden states come from a body of its own, which starts from the policy's weights, or from
    the policy's body. w and b start at 0, and so do all values.
    """

    def __init__(self, policy: Transformer, *, shared: bool) -> None:
        super().__init__()
        self.body = None if shared else _body(policy)
        """None if the critic reads the policy's hidden states."""
        self.weight = nn.Parameter(torch.zeros_like(policy.norm.weight))
        self.bias = nn.Parameter(torch.zeros_like(policy.norm.weight[:1]))

    def score(self, policy: Any, batch: PackedBatch, lower: Tensor | None = None) -> Tensor:
        """The value before each action token, [N]; 0 in other slots.

        ``policy`` is a transformer. ``lower`` as in `Transformer.score`: the layers that do not
        learn are the policy's.
        """
        hidden = (policy if self.body is None else self.body).hidden(batch, lower)
        return self.values(hidden, batch)

    def values(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """As `score`, from the hidden states [N, d] after the final norm."""
        actions = batch.is_action.nonzero().squeeze(1)
        found = token_values(self.weight, self.bias, hidden, batch.predecessor, actions)
        return found.new_zeros(len(batch.tokens)).index_copy(0, actions, found)


def _body(policy: Transformer) -> Transformer:
    """A copy that shares the weights that never change; it has no head for tokens."""
    frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
    body = copy.deepcopy(policy, frozen)
    body.head = None
    return body
