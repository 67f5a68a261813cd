"""What the learner learns: the protocol of a policy, and the language model as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from burnish.model.attention import Attend, packed
from burnish.model.checkpoint import hf_state
from burnish.model.logprobs import CHUNK, token_logprobs
from burnish.model.transformer import Transformer
from burnish.types import Measured, PackedBatch


class Policy(Protocol):
    """An ``nn.Module`` that can score a packed batch."""

    lower_layers: int
    """How many of the first layers do not learn; 0 if all weights learn."""

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Log-probability and entropy of each action token, [N]; 0 in other slots.

        ``lower``: the hidden states below the layers that learn, if they are known.
        """

    def lower(self, batch: PackedBatch) -> Tensor:
        """[N, d] hidden states below the layers that learn; copies of a policy share them."""

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
        self.lower_layers = 0 if layers is None else max(0, model.config.n_layers - layers)
        if layers is not None:
            model.requires_grad_(False)
            model.layers[self.lower_layers :].requires_grad_(True)
            model.norm.requires_grad_(True)

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Log-probability and entropy of each action token, [N]; 0 in other slots."""
        attend = self._attend(batch)
        if lower is None:
            lower = self._lower(batch, attend)
        x = self.model.run_layers(
            lower,
            batch.positions,
            attend,
            which=slice(self.lower_layers, None),
            recompute=self.recompute,
        )
        actions = batch.is_action.nonzero().squeeze(1)
        measured = token_logprobs(
            self.model,
            self.model.norm(x),
            batch.tokens,
            batch.predecessor,
            actions,
            batch.temperature,
            chunk=self.chunk,
        )
        zeros = measured.logprobs.new_zeros(len(batch.tokens))
        return Measured(*(zeros.index_copy(0, actions, x) for x in measured))

    @torch.no_grad()
    def lower(self, batch: PackedBatch) -> Tensor:
        """[N, d] hidden states below the layers that learn."""
        return self._lower(batch, self._attend(batch))

    def _lower(self, batch: PackedBatch, attend: Attend) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.lower_layers):
            x: Tensor = self.model.embed(batch.tokens)
            return self.model.run_layers(x, batch.positions, attend, which=slice(self.lower_layers))

    def _attend(self, batch: PackedBatch) -> Attend:
        dtype, width = self.model.embed.weight.dtype, self.model.config.head_width
        return packed(batch.segment_offsets, batch.segment_is_prompt, dtype, width)

    def exchange(self) -> dict[str, Tensor]:
        """Views of the weights under Hugging Face's names, without gradient."""
        return hf_state(self.model)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Rounded to the target's precision."""
    torch._foreach_copy_(list(target.parameters()), list(source.parameters()))
