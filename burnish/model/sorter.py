"""A small model that is not autoregressive: it writes all numbers of the response at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from burnish.rl.kl import full
from burnish.rl.losses import entropy
from burnish.types import Measured, PackedBatch


class Sorter(nn.Module):
    """Shared embedding, an encoding matrix per prompt position, a decoding one per response slot.

    h = Σ_p E[prompt_p] · Encode_p,   logits_r = (h · Decode_r) · Eᵀ
    """

    def __init__(self, numbers: int, length: int, width: int, *, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(width)
        self.length = length
        self.embedding = nn.Parameter(torch.randn(numbers, width, generator=random) * scale)
        self.encode = nn.Parameter(torch.randn(length, width, width, generator=random) * scale)
        self.decode = nn.Parameter(torch.randn(length, width, width, generator=random) * scale)

    def forward(self, prompts: Tensor) -> Tensor:
        """[B, length] → logits [B, length, numbers]."""
        encoded = torch.einsum("bpd,pde->be", self.embedding[prompts], self.encode)
        decoded = torch.einsum("be,red->brd", encoded, self.decode)
        return decoded @ self.embedding.T

    def score(
        self,
        batch: PackedBatch,
        states: Tensor | None = None,
        reference: tuple[Sorter, Tensor] | None = None,
    ) -> Measured:
        """Of every action in its slot, 0 elsewhere: [N] each."""
        action = batch.is_action
        logits = (self.states(batch) if states is None else states)[action]
        chosen = batch.tokens[action, None]
        found = [torch.log_softmax(logits, -1).gather(-1, chosen), entropy(logits)]
        if reference is not None:
            others = reference[1][action]
            found += [full(logits, others), torch.log_softmax(others, -1).gather(-1, chosen)]
        zeros = logits.new_zeros(len(batch.tokens))
        return Measured(*(zeros.masked_scatter(action, values) for values in found))

    def states(self, batch: PackedBatch) -> Tensor:
        """[N, V]: the logits of the actions; 0 elsewhere."""
        action = batch.is_action
        prompts = batch.tokens[batch.in_prompt].view(-1, self.length)
        group = batch.group_ids[batch.sequence_ids[action]]
        place = batch.positions[action] - self.length
        logits: Tensor = self(prompts)[group, place] / batch.temperature[action, None]
        zeros = logits.new_zeros(len(action), logits.shape[1])
        return zeros.index_copy(0, action.nonzero().squeeze(1), logits)

    def exchange(self) -> dict[str, Tensor]:
        """Views of the weights under the names that generators know, without gradient."""
        return dict(self.state_dict())
