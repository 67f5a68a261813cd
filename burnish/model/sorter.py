"""The sorting model: a small policy that predicts all numbers of a response at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from burnish.rl.losses import entropy
from burnish.types import Measured, PackedBatch


class Sorter(nn.Module):
    """A policy with a shared embedding E, one encoding matrix per prompt position and one decoding
    matrix per response position:

    h = Σ_p E[prompt_p] · Encode_p,   logits_r = (h · Decode_r) · Eᵀ
    """

    def __init__(self, numbers: int, length: int, width: int, *, seed: int) -> None:
        """``numbers`` is the size of the vocabulary, ``length`` the number of numbers in a prompt
        and in a response, and ``width`` the dimension of the embedding. ``seed`` determines the
        initial weights."""
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(width)
        self.length = length
        self.embedding = nn.Parameter(torch.randn(numbers, width, generator=random) * scale)
        self.encode = nn.Parameter(torch.randn(length, width, width, generator=random) * scale)
        self.decode = nn.Parameter(torch.randn(length, width, width, generator=random) * scale)

    def forward(self, prompts: Tensor) -> Tensor:
        """Compute the logits [B, length, numbers] of the responses to prompts [B, length]."""
        encoded = torch.einsum("bpd,pde->be", self.embedding[prompts], self.encode)
        decoded = torch.einsum("be,red->brd", encoded, self.decode)
        return decoded @ self.embedding.T

    lower_layers = 0
    """Number of frozen layers below the trainable ones: 0, because all weights are trainable."""

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Compute the log-probability and entropy of each action token, [N]; 0 in other slots.
        ``lower`` is ignored."""
        action = batch.is_action
        prompts = batch.tokens[batch.in_prompt].view(-1, self.length)
        group = batch.group_ids[batch.sample_ids[action]]
        place = batch.positions[action] - self.length
        logits: Tensor = self(prompts)[group, place] / batch.temperature[action, None]
        chosen = torch.log_softmax(logits, -1).gather(-1, batch.tokens[action, None])
        zeros = logits.new_zeros(len(batch.tokens))
        return Measured(*(zeros.masked_scatter(action, x) for x in (chosen, entropy(logits))))

    def lower(self, batch: PackedBatch) -> Tensor:
        """Never called, because ``lower_layers`` is 0."""
        raise AssertionError("the sorting model has no frozen layers")

    @torch.no_grad()
    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of all numbers at all positions after a fixed prompt.
        Comparing them shows whether two models have the same weights."""
        prompt = torch.arange(self.length, device=self.embedding.device) % len(self.embedding)
        return tuple(self(prompt[None]).log_softmax(-1).flatten().tolist())

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Return views of all weights under the names that `SorterEngine` reads. ``learned`` has no
        effect, because all weights are trainable."""
        return dict(self.state_dict())
