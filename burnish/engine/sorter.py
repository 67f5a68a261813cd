"""The sorting model as a generator: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from burnish.draws import uniforms
from burnish.model.sorter import Sorter
from burnish.progress import Report, unheard
from burnish.types import Completion, Finish, IntArray, Prompt, SamplingParams, Weights


class SorterEngine:
    def __init__(self, model: Sorter) -> None:
        self.model = model
        self.version = 0

    def load(self, weights: Weights) -> None:
        self.model.load_state_dict(weights.tensors)
        self.version = weights.version

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        first_group: int,
        samples: int,
        params: SamplingParams,
        stream: int,
        report: Report = unheard,
    ) -> list[tuple[Completion, ...]]:
        """``samples`` responses to each prompt; temperature 0 takes the likeliest numbers."""
        tokens = torch.from_numpy(np.stack([p.token_ids for p in prompts])).long()
        greedy = params.temperature == 0
        logits = self.model(tokens) / (1.0 if greedy else params.temperature)
        logprobs = torch.log_softmax(logits, -1)[:, None].expand(
            -1, samples, -1, -1
        )  # [P, G, R, V]
        if greedy:
            chosen = logprobs.argmax(-1)
        else:
            groups = first_group + np.arange(len(prompts))[:, None, None]
            draws = uniforms(
                params.seed,
                stream,
                groups,
                np.arange(samples)[:, None],
                np.arange(self.model.length),
            )
            chosen = invert(logprobs, torch.from_numpy(draws))
        picked = logprobs.gather(-1, chosen[..., None]).squeeze(-1)
        report(len(prompts) * samples, tokens=chosen.numel())
        return [
            tuple(
                self._completion(prompt, i, ids, lps, params)
                for i, (ids, lps) in enumerate(zip(rows, values, strict=True))
            )
            for prompt, rows, values in zip(
                prompts, chosen.numpy().astype(np.int32), picked.numpy(), strict=True
            )
        ]

    def _completion(
        self,
        prompt: Prompt,
        sample: int,
        ids: IntArray,
        logprobs: np.ndarray,
        params: SamplingParams,
    ) -> Completion:
        return Completion(
            request_id=prompt.prompt_id,
            sample_index=sample,
            token_ids=ids,
            logprobs=logprobs.astype(np.float32),
            versions=np.full(len(ids), self.version, dtype=np.int32),
            sampled=np.ones(len(ids), dtype=np.bool_),
            params=params,
            finish=Finish.STOP,  # a response has as many numbers as its prompt, and is whole
            stop=None,
            text="".join(spell(ids)),
        )


def spell(ids: IntArray) -> list[str]:
    """The numbers as texts that, put together, read as a prompt does: "0 2 4"."""
    return [f" {number}" if place else str(number) for place, number in enumerate(ids)]


def invert(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes the draw: [..., V], [...] → [...].

    In float64; a token of probability 0 never is that token.
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    below = draws * cumulative[..., -1]
    last = (logprobs.isfinite() * torch.arange(logprobs.shape[-1])).amax(-1)
    return torch.minimum((cumulative <= below[..., None]).sum(-1), last)
