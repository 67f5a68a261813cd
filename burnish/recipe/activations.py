"""Estimate of the memory that a gradient step needs on a GPU beside weights, gradients and moments.

The estimate follows the tensors of `burnish.model.transformer` with fused kernels, flash attention
and one process. It is the difference between the peak of a step and the memory of weights, fp32
gradients and moments. Legend: N tokens of a pack, d model width, f width of the MLP, V tokens in
the vocabulary; q and k are the widths of all query heads and of all key heads together.
"""

from __future__ import annotations

from typing import NamedTuple

from burnish.recipe.recipe import RolloutConfig, TrainConfig

LOGIT_ROWS = 4096
"""Rows of logits that a GPU holds at a time (`burnish.model.logprobs.GPU_CHUNK`)."""
WORKSPACES = 800_000_000
"""Bytes beside the tensors of a gradient step, such as workspaces of CUDA's libraries: the
difference between peaks measured on an H200 (38.0 GiB with all inputs of linear layers stored, and
8.2 GiB with recomputation) and the tensors of the step (37.2 and 7.4 GiB), for 16 × 1,024 tokens in
the shape of Qwen2.5-1.5B."""


class Widths(NamedTuple):
    """Widths of a language model's tensors, which determine the memory of its activations."""

    model: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together; the values have the same width."""
    mlp: int
    heads: int
    """Number of query heads."""
    key_heads: int
    vocabulary: int
    is_tied: bool = False
    """Whether the head shares the embedding's weights."""
    has_head_norms: bool = False
    """Whether queries and keys are normed."""
    has_fp32_head: bool = False


class PackSize(NamedTuple):
    """Size of the largest pack of a gradient step."""

    tokens: int
    actions: int
    """Tokens whose log-probabilities are computed."""
    contexts: int
    """Tokens of all contexts: a prompt counts once, and again before each of its responses."""
    is_whole: bool = True
    """Whether the gradient step consists of this pack alone."""


def largest_pack(train: TrainConfig, rollout: RolloutConfig, prompt: int) -> PackSize:
    """Return the size of the largest pack of a rollout with prompts of ``prompt`` tokens and
    responses of the maximum length, after limits on micro-batches."""
    samples = min(train.batch, train.micro_sequences or train.batch)
    prompts = -(-samples // rollout.group_size)
    actions = samples * rollout.max_tokens
    tokens = actions + prompts * prompt
    share = min(1.0, (train.micro_tokens or tokens) / tokens)
    return PackSize(
        tokens=round(share * tokens),
        actions=round(share * actions),
        contexts=round(share * (tokens + samples * prompt)),
        is_whole=share == 1 and samples == train.batch,
    )


def layer_bytes(widths: Widths, pack: PackSize, low: int, *, is_recomputed: bool) -> int:
    """Return the bytes that one layer saves for the backward pass, in a precision of ``low`` bytes
    per number, including the layer's input.

    Per token, these are 2 d (inputs of two norms), 2 q + 2 k (queries, keys, values and the
    attention's output) and 2 f (inputs of SwiGLU), and in fp32 the scales of the norms and the
    logsumexp of each head. Keys and values have a row per token of each context. Norms of queries
    and keys save their inputs, too. A layer that is recomputed as a whole also saves 2 d + f, the
    outputs of the norms and of SwiGLU; another computes each again when its gradient is needed.
    """
    d, q, k, f = widths.model, widths.queries, widths.keys, widths.mlp
    numbers, scales = 2 * d + 2 * q + 2 * f, 2 + widths.heads
    if is_recomputed:
        numbers += 2 * d + f
    if widths.has_head_norms:
        numbers, scales = numbers + q + 2 * k, scales + widths.heads + widths.key_heads
    per_token = low * numbers + 4 * scales
    return per_token * pack.tokens + low * 2 * k * pack.contexts


def activation_bytes(
    widths: Widths, pack: PackSize, layers: int, gradients: int, train: TrainConfig, low: int
) -> int:
    """Return the peak of a gradient step minus weights, moments and ``gradients``, the bytes of all
    gradients in fp32. ``layers`` is the number of trainable layers, and ``low`` the bytes per
    number in the passes.

    The peak is the largest of four sums: when the head's gradient is computed, when the backward
    pass is in the last layer or in the first layer, and when the embedding's gradient is computed.
    Each adds the saved tensors of the layers below, those of the current layer, and the gradients
    that exist then. With ``train.recompute``, a layer saves only its input until the backward pass
    reaches it. Gradients of earlier packs exist throughout.
    """
    d, f, vocabulary, tokens = widths.model, widths.mlp, widths.vocabulary, pack.tokens
    one = layer_bytes(widths, pack, low, is_recomputed=train.recompute)
    inputs = low * d * tokens
    kept = inputs if train.recompute else one
    # The gradient of SwiGLU, with the gradients of the layer's output and of SwiGLU's output, which
    # replaces this output if it was saved.
    within = one + low * (d + 2 * f + f * (not train.recompute)) * tokens
    learns_head = train.learn.name == "all"
    table = vocabulary * d
    wide = 4 if widths.has_fp32_head else low
    logits = wide * vocabulary * min(LOGIT_ROWS, pack.actions)
    head = logits + low * d * tokens + 2 * wide * d * pack.actions
    head += 4 * table * (wide > low) + learns_head * (4 + wide) * table
    before = 0 if pack.is_whole else gradients
    # A tied head's gradient waits in low precision for the embedding's; another is added in fp32.
    waiting = learns_head * widths.is_tied * low * table
    folded = learns_head * (not widths.is_tied) * pack.is_whole * 4 * table
    # In the first layer, the gradients of the embedding and of most of the layer are not there yet.
    later = 4 * (table + 2 * d * (widths.queries + widths.keys + f))
    almost = gradients - pack.is_whole * learns_head * later
    peak = max(
        layers * kept + head + before,
        (layers - 1) * kept + within + waiting + folded + before,
        within + waiting + almost,
        gradients + learns_head * (1 + 2 * widths.is_tied * (not pack.is_whole)) * low * table,
    )
    return max(0, peak - gradients) + WORKSPACES
