"""A learned reward: a transformer's body and a head of one row, as in Hugging Face's layout of
sequence classification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.errors import ModelError
from burnish.model import checkpoint
from burnish.model.transformer import FAMILIES, ModelConfig, Transformer
from burnish.types import Measured, PackedBatch


class RewardModel(nn.Module):
    """The reward of a response is w · h, with h the hidden state at its last token.

    The last token is the last one that is not the pad token, as in transformers; if the pad token
    is the end token, that is the token before the end. w starts at 0, and so do all rewards.
    """

    def __init__(self, body: Transformer, pad: int | None) -> None:
        """``pad`` is None if no token is skipped. The body's head for tokens is dropped."""
        super().__init__()
        body.head, body.config = None, replace(body.config, tied=True)
        self.body, self.pad = body, pad
        self.weight = nn.Parameter(torch.zeros_like(body.norm.weight[None]))

    @property
    def config(self) -> ModelConfig:
        return self.body.config

    @property
    def lower_layers(self) -> int:
        return self.body.lower_layers

    def learn(self, layers: int | None = None, *, recompute: bool = False) -> RewardModel:
        """As `Transformer.learn`; the head always learns."""
        self.body.learn(layers, recompute=recompute)
        return self

    def lower(self, batch: PackedBatch) -> Tensor:
        return self.body.lower(batch)

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """The reward of each response in its last slot, [N], and 0 in other slots; no entropy."""
        hidden = self.body.hidden(batch, lower)[self._read(batch)]
        rewards = (hidden @ self.weight[0]).to(torch.promote_types(hidden.dtype, torch.float32))
        zeros = rewards.new_zeros(len(batch.tokens))
        return Measured(zeros.index_copy(0, ends(batch), rewards), zeros)

    def _read(self, batch: PackedBatch) -> Tensor:
        """[S] the slot of each response's last token; a response of pad tokens alone has the
        prompt's."""
        first = batch.segment_offsets[:-1][~batch.segment_is_prompt]
        is_text = ~batch.in_prompt
        if self.pad is not None:
            is_text = is_text & (batch.tokens != self.pad)
        slots = is_text.nonzero().squeeze(1)
        before = batch.predecessor[first]
        return before.scatter_reduce(0, batch.sequence_ids[slots], slots, "amax")

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """As `Transformer.exchange`."""
        return self.body.exchange(learned=learned) | {"score.weight": self.weight.detach()}

    def save(self, directory: Path | str, *, source: Path | str) -> None:
        """Writes a directory that transformers loads as a model for sequence classification."""
        kind = FAMILIES[self.config.family].replace("CausalLM", "SequenceClassification")
        labels = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        more = {"architectures": [kind], "pad_token_id": self.pad, **labels}
        checkpoint.save(self, directory, source=source, more=more)


def ends(batch: PackedBatch) -> Tensor:
    """[S] the last slot of each response."""
    return batch.segment_offsets[1:][~batch.segment_is_prompt] - 1


def load(directory: Path | str, *, dtype: torch.dtype = torch.float32) -> RewardModel:
    """The reward model in a directory of Hugging Face's layout, on the CPU."""
    config: dict[str, Any] = checkpoint.read_json(Path(directory) / "config.json")
    state = checkpoint.read_state(Path(directory))
    head = state.pop("score.weight", None)
    if head is None or len(head) != 1:
        raise ModelError(
            f"{directory} is no reward model: it has no score.weight of one row; train one with "
            "`burnish reward`, and write it with `burnish export`"
        )
    state.pop("lm_head.weight", None)
    body = Transformer(replace(ModelConfig.from_hf(config), tied=True)).to(dtype)
    checkpoint.load_hf_state(body, state)
    model = RewardModel(body, config.get("pad_token_id"))
    model.weight.data.copy_(head)
    return model
