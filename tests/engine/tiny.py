"""Tiny random models, a byte-level tokenizer, and drivers for engines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Engine, Request
from burnish.engine.settings import EngineSettings
from burnish.model.attention import causal
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.types import Completion, SamplingParams, Weights

DEVICE = os.environ.get("BURNISH_TEST_DEVICE", "cpu")
"""The engine's equalities can be run on a GPU: BURNISH_TEST_DEVICE=cuda pytest tests/engine"""
CLOSE = 1e-5 if DEVICE == "cpu" else 2e-5
"""Between log-probabilities of two ways through the same model in float32."""
WIDTH = 8 if DEVICE == "cpu" else 16
"""Of a head: the least that each device's own kernels can read."""
VOCAB = 260
END = 256


def model(seed: int = 0, **changes: Any) -> Transformer:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_layers": 2,
        "d_model": 4 * WIDTH,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 48,
        "context": 96,
        "init_std": 0.25,
    }
    return Transformer(ModelConfig(**settings | changes)).init_weights(seed).to(DEVICE)


def tokenizer(end_ids: tuple[int, ...] = (END,)) -> Tokenizer:
    """One token per byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|a|>", "<|b|>", "<|c|>"])
    return Tokenizer(backend, end_ids=end_ids)


def engine(
    seed: int = 0,
    *,
    tokens: int = 4096,
    text: bool = False,
    own: Transformer | None = None,
    **settings: Any,
) -> NativeEngine:
    """tokens: the cache's size. own: the model; None for that of the seed."""
    own = own or model(seed)
    per_token = 2 * 2 * 2 * WIDTH * 4  # k and v, layers, heads, width, bytes
    config = EngineSettings(**{"kv_bytes": tokens * per_token, "page_size": 4, **settings})
    return NativeEngine(own, tokenizer() if text else None, config)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def request(
    name: str, length: int = 9, n: int = 1, group: int = 0, seed: int | None = None, **params: Any
) -> Request:
    ids = prompt(length, length if seed is None else seed)
    return Request(name, ids, n, SamplingParams(**{"max_tokens": 12, **params}), group)


def finish(
    engine: Engine,
    requests: Sequence[Request],
    between: Callable[[int], None] = lambda step: None,
    limit: int = 2000,
) -> dict[tuple[str, int], Completion]:
    """Submit all, step until all is done; `between` is called after each step."""
    for one in requests:
        engine.submit(one)
    done: dict[tuple[str, int], Completion] = {}
    for step in range(limit):
        for one in engine.step():
            done[one.request_id, one.sample_index] = one
        if not engine.unfinished:
            return done
        between(step)
    raise AssertionError(f"{engine.unfinished} samples unfinished after {limit} steps")


def weights(model: Transformer, version: int) -> Weights:
    return Weights(version, 0, {name: t.clone() for name, t in model.exchange().items()})


@torch.no_grad()
def learner_logprobs(
    model: Transformer, prompt: np.ndarray, response: np.ndarray, temperature: float
) -> np.ndarray:
    """What the learner's forward pass gives for a response: the oracle."""
    ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.long)
    ids = ids.to(model.embed.weight.device)
    positions = torch.arange(len(ids), device=ids.device)
    hidden = model(ids, positions, causal([len(ids)], ids.device))
    logits = model.logits(hidden[len(prompt) - 1 : -1])
    scaled = logits.float() / (temperature or 1.0)
    chosen = scaled.log_softmax(-1).gather(-1, ids[len(prompt) :, None])
    return chosen.squeeze(-1).cpu().numpy()


def assert_same(
    a: dict[tuple[str, int], Completion], b: dict[tuple[str, int], Completion], atol: float = CLOSE
) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].token_ids.tolist() == b[key].token_ids.tolist(), key
        np.testing.assert_allclose(a[key].logprobs, b[key].logprobs, atol=atol)
        assert (a[key].finish, a[key].stop, a[key].text) == (
            b[key].finish,
            b[key].stop,
            b[key].text,
        )


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], k, v [B, H, T, D], mask to add -> attention and log-sum-exp [B, H, R]."""
    scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores if mask is None else scores + mask
    return (torch.softmax(scores, 3) @ v.float()).to(q.dtype), scores.logsumexp(3)
