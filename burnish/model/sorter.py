"""A small model that is not autoregressive: it writes all numbers of the response at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

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

    lower_layers = 0
    """All of it learns."""

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Log-probability and entropy of each action token, [N]; 0 in other slots."""
        action = batch.is_action
        prompts = batch.tokens[batch.in_prompt].view(-1, self.length)
        group = batch.group_ids[batch.sequence_ids[action]]
        place = batch.positions[action] - self.length
        logits: Tensor = self(prompts)[group, place] / batch.temperature[action, None]
        chosen = torch.log_softmax(logits, -1).gather(-1, batch.tokens[action, None])
        zeros = logits.new_zeros(len(batch.tokens))
        return Measured(*(zeros.masked_scatter(action, x) for x in (chosen, entropy(logits))))

    def lower(self, batch: PackedBatch) -> Tensor:
        """The states below the layers that learn; nobody asks for them, since all layers learn."""
        raise AssertionError("all layers of the sorting model learn")

    @torch.no_grad()
    def probe(self) -> tuple[float, ...]:
        """Log-probabilities after a fixed prompt."""
        prompt = torch.arange(self.length, device=self.embedding.device) % len(self.embedding)
        return tuple(self(prompt[None]).log_softmax(-1).flatten().tolist())

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Views of the weights under the names that generators know, without gradient; all of them
        learn."""
        return dict(self.state_dict())
