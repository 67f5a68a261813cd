"""The reward model: a transformer's body and a head with one row, stored in Hugging Face's layout
for sequence classification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.errors import ModelError
from burnish.model import checkpoint
from burnish.model.transformer import FAMILIES, ModelConfig, Transformer
from burnish.types import PackedBatch, ResponseRewards


class RewardModel(nn.Module):
    """A model of the reward of a response: w · h, with h the hidden state at its last token.

    The last token is the last one that is not the pad token, as in transformers. If the pad token
    is the end token, the last token is the one before the end. w starts at 0, so all rewards are 0
    before training.
    """

    def __init__(self, body: Transformer, pad: int | None) -> None:
        """Use ``body`` without its token head, which is removed from it. ``pad`` is the id of the
        pad token; None if no token is skipped."""
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
        """Make the last ``layers`` layers and the final norm of the body trainable; None for the
        whole body. The reward head is always trainable. Return the model."""
        self.body.learn(layers, recompute=recompute)
        return self

    def lower(self, batch: PackedBatch) -> Tensor:
        return self.body.lower(batch)

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> ResponseRewards:
        """Compute the reward of each response; return it in the response's last slot, [N], with 0
        in the other slots. ``lower`` [N, d] are the hidden states that enter the trainable layers;
        None to compute them here."""
        hidden = self.body.hidden(batch, lower)[self._last_tokens(batch)]
        rewards = (hidden @ self.weight[0]).to(torch.promote_types(hidden.dtype, torch.float32))
        zeros = rewards.new_zeros(len(batch.tokens))
        return ResponseRewards(zeros.index_copy(0, last_slots(batch), rewards))

    def _last_tokens(self, batch: PackedBatch) -> Tensor:
        """Return the slot [S] of each sample's last token that is not padding; the last slot of its
        last prompt if its response consists of pad tokens alone."""
        first = batch.segment_offsets[:-1][batch.last_segments]
        is_text = ~batch.in_prompt
        if self.pad is not None:
            is_text = is_text & (batch.tokens != self.pad)
        slots = is_text.nonzero().squeeze(1)
        before = batch.predecessor[first]
        return before.scatter_reduce(0, batch.sample_ids[slots], slots, "amax")

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Return views of the weights, including the reward head, under Hugging Face's names,
        without gradients. With ``learned``, return only the trainable weights."""
        return self.body.exchange(learned=learned) | {"score.weight": self.weight.detach()}

    def save(self, directory: Path | str, *, source: Path | str) -> None:
        """Write the model to a directory that transformers loads as a model for sequence
        classification. ``source`` is the directory from which the tokenizer is copied."""
        kind = FAMILIES[self.config.family].replace("CausalLM", "SequenceClassification")
        labels = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        more = {"architectures": [kind], "pad_token_id": self.pad, **labels}
        checkpoint.save_model(self, directory, source=source, more=more)


def last_slots(batch: PackedBatch) -> Tensor:
    """Return the last slot [S] of each sample, where `ResponseRewards` holds its reward."""
    return batch.segment_offsets[1:][batch.last_segments] - 1


def load_reward_model(directory: Path | str, *, dtype: torch.dtype = torch.float32) -> RewardModel:
    """Load the reward model in a directory of Hugging Face's layout onto the CPU, with weights of
    type ``dtype``. Raises a ModelError if the directory has no reward head, or for the reasons of
    `burnish.model.checkpoint.load_model`."""
    config: dict[str, Any] = checkpoint.read_model_json(Path(directory) / "config.json")
    state = checkpoint.read_state(Path(directory))
    head = state.pop("score.weight", None)
    if head is None or len(head) != 1:
        raise ModelError(
            f"{directory} is not a reward model: it has no score.weight of one row; train one with "
            "`burnish reward`, and write it with `burnish export`"
        )
    state.pop("lm_head.weight", None)
    body = Transformer(replace(ModelConfig.from_hf(config), tied=True)).to(dtype)
    checkpoint.load_hf_state(body, state)
    model = RewardModel(body, config.get("pad_token_id"))
    model.weight.data.copy_(head)
    return model
