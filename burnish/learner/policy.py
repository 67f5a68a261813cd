"""What the learner learns: the protocol of a policy, and the language model as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from burnish.model.attention import packed
from burnish.model.checkpoint import hf_state
from burnish.model.logprobs import CHUNK, token_logprobs
from burnish.model.transformer import Transformer
from burnish.types import Measured, PackedBatch


class Policy(Protocol):
    """An ``nn.Module`` that can score a packed batch."""

    def score(
        self,
        batch: PackedBatch,
        states: Tensor | None = None,
        reference: tuple[Self, Tensor] | None = None,
    ) -> Measured:
        """Of every action in its slot, 0 elsewhere: [N] each; none of it is the reference's.

        ``states``: this policy's own, where they are known; a reference comes with its own.
        """

    def states(self, batch: PackedBatch) -> Tensor:
        """[N, …]: what a slot's distribution is made of, short of the vocabulary's width."""

    def exchange(self) -> dict[str, Tensor]:
        """Views of the weights under the names that generators know, without gradient."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def requires_grad_(self, requires_grad: bool) -> Self: ...

    def to(self, dtype: torch.dtype) -> Self: ...


class LanguagePolicy(nn.Module):
    """A transformer over packs: a group's prompt runs once, the head on actions' contexts alone."""

    def __init__(
        self,
        model: Transformer,
        *,
        recompute: bool = False,
        layers: int | None = None,
        chunk: int = CHUNK,
    ) -> None:
        """``recompute``: activations of a layer are made again in the backward pass, not kept.

        ``layers``: only the last so many and the final norm learn; None if all weights do. At most
        ``chunk`` rows of logits exist at a time.
        """
        super().__init__()
        self.model = model
        self.recompute = recompute
        self.chunk = chunk
        self.trunk = 0 if layers is None else max(0, model.config.n_layers - layers)
        """How many of the first layers stay as they are, and the embedding and the head too."""
        if layers is not None:
            model.requires_grad_(False)
            model.layers[self.trunk :].requires_grad_(True)
            model.norm.requires_grad_(True)

    def score(
        self,
        batch: PackedBatch,
        states: Tensor | None = None,
        reference: tuple[LanguagePolicy, Tensor] | None = None,
    ) -> Measured:
        """Of every action in its slot, 0 elsewhere: [N] each."""
        actions = batch.is_action.nonzero().squeeze(1)
        measured = token_logprobs(
            self.model,
            self.states(batch) if states is None else states,
            batch.tokens,
            batch.predecessor,
            actions,
            batch.temperature,
            chunk=self.chunk,
            reference=None if reference is None else (reference[0].model, reference[1]),
        )
        zeros = measured.logprobs.new_zeros(len(batch.tokens))
        return Measured(*(zeros.index_copy(0, actions, x) for x in measured if x is not None))

    def states(self, batch: PackedBatch) -> Tensor:
        """[N, d]: what the head reads."""
        dtype, width = self.model.embed.weight.dtype, self.model.config.head_width
        attend = packed(batch.segment_offsets, batch.segment_is_prompt, dtype, width)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.trunk):
            x = self.model.embed(batch.tokens)
            x = self.model.run_layers(x, batch.positions, attend, which=slice(self.trunk))
        x = self.model.run_layers(
            x, batch.positions, attend, which=slice(self.trunk, None), recompute=self.recompute
        )
        hidden: Tensor = self.model.norm(x)
        return hidden

    def exchange(self) -> dict[str, Tensor]:
        """Views of the weights under Hugging Face's names, without gradient."""
        return hf_state(self.model)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Rounded to the target's precision."""
    torch._foreach_copy_(list(target.parameters()), list(source.parameters()))
