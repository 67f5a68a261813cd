"""The classic GRPO functions by their published names, thin over ``rl/``.

Existing course and research code runs against these unchanged: padded [B, T] tensors, labels
shifted by one against the inputs. (This file keeps a published interface and so is the one
exception to the alignment law and to the rule that only ``model/tokenizer.py`` turns text into
ids.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from burnish.graders import keywords
from burnish.graders.answers.checker import question_only_reward_fn as question_only_reward_fn
from burnish.graders.answers.checker import r1_zero_reward_fn as r1_zero_reward_fn
from burnish.rl import advantages as estimators
from burnish.rl import losses, ratios, reduce

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
keyword_inclusion_reward_fn = keywords.inclusion
compute_entropy = losses.entropy


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, Any], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Scores every response and centres the rewards within each group of ``group_size``.

    Returns advantages [N], raw rewards [N] and statistics of the raw rewards. The std is unbiased.
    """
    count = len(rollout_responses)
    if group_size < 1 or count % group_size:
        raise ValueError(f"{count} responses do not divide into groups of {group_size}")
    given = zip(rollout_responses, repeated_ground_truths, strict=True)
    scored = [reward_fn(response, truth) for response, truth in given]
    raw = torch.tensor([float(score["reward"]) for score in scored])
    groups = torch.arange(count) // group_size
    if normalize_by_std:
        advantages = estimators.group_zscore(raw, groups, eps=advantage_eps)
    else:
        advantages = estimators.group_mean(raw, groups)
    metadata = {
        "reward_mean": raw.mean().item(),
        "reward_std": raw.std(unbiased=count > 1).item(),
        "reward_max": raw.max().item(),
        "reward_min": raw.min().item(),
    }
    for part in ("format_reward", "answer_reward"):
        if all(part in score for score in scored):
            metadata[f"{part}_mean"] = sum(float(score[part]) for score in scored) / count
    return advantages, raw, metadata


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """−A log π per token: [B, 1], [B, T] → [B, T]."""
    return losses.reinforce(policy_log_probs, raw_rewards_or_advantages)


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) per token: advantages [B, 1], others [B, T] → [B, T]."""
    ratio = ratios.token_ratio(policy_log_probs, old_log_probs)
    loss = losses.clipped(ratio, advantages, low=cliprange, high=cliprange)
    clipped = losses.is_clipped(ratio, advantages, low=cliprange, high=cliprange)
    fraction = clipped.float().mean()
    return loss, {"clipped": clipped, "clip_fraction": fraction, "ratio": ratio.detach()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss [B, T] that ``loss_type`` names, and its metadata."""
    clip = {"advantages": advantages, "old_log_probs": old_log_probs, "cliprange": cliprange}
    needs: dict[str, dict[str, Any]] = {
        "no_baseline": {"raw_rewards": raw_rewards},
        "reinforce_with_baseline": {"advantages": advantages},
        "grpo_clip": clip,
    }
    if loss_type not in needs:
        raise ValueError(f"loss_type must be one of {', '.join(needs)}, got {loss_type!r}")
    for name, value in needs[loss_type].items():
        if value is None:
            raise ValueError(f"loss_type {loss_type!r} needs {name}; pass {name}=…")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(policy_log_probs=policy_log_probs, **needs[loss_type])
    (weight,) = needs[loss_type].values()
    return compute_naive_policy_gradient_loss(weight, policy_log_probs), {}


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean over the masked elements, along ``dim`` or over all; NaN where the mask is empty."""
    return masked_normalize(tensor, mask, dim) / mask.bool().sum(dim=dim)


def masked_normalize(
    tensor: Tensor,
    mask: Tensor,
    dim: int | None = None,
    normalize_constant: float = 1.0,
    *,
    constant_normalizer: float | None = None,
) -> Tensor:
    """The sum over the masked elements, divided by a constant; two keywords name the constant."""
    constant = normalize_constant if constant_normalizer is None else constant_normalizer
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return kept.sum(dim=dim) / constant


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-sequence masked mean, batch mean, over the accumulation steps; backward inside.

    Gradients add to the gradients of the parameters. A row without response tokens leaves the batch
    mean instead of making it NaN. Returns the scaled loss and the loss's metadata.
    """
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    weights = reduce.sequence_mean(response_mask).to(per_token.dtype)
    loss = reduce.weighted_sum(per_token, weights) / gradient_accumulation_steps
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metadata


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the masked sum over a constant, batch mean, over the steps; backward inside."""
    likelihood = masked_normalize(policy_log_probs, response_mask, -1, normalize_constant)
    loss = -likelihood.mean() / gradient_accumulation_steps
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {}


def get_response_log_probs(
    model: Callable[[Tensor], Any],
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
) -> dict[str, Tensor]:
    """log π(labels | input_ids) [B, T], and the token entropy [B, T] if asked.

    ``model`` is any causal language model of Hugging Face's interface: called with ids, it returns
    an object with ``logits`` [B, T, V].
    """
    logits = model(input_ids).logits
    log_probs = torch.log_softmax(logits, dim=-1)
    result = {"log_probs": log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits)
    return result


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Prompt and output tokenised apart, joined, right-padded; all results are [B, longest − 1].

    ``input_ids`` lacks the last column, ``labels`` the first; ``response_mask`` is true where a
    label is an output token. No special tokens are added: the strings are taken as complete.
    """
    # Padding is never learned from: the mask is made from lengths.
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in prompt_strs]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in output_strs]
    rows = [torch.tensor([*p, *o], dtype=torch.long) for p, o in zip(prompts, outputs, strict=True)]
    masks = [torch.arange(len(row)) >= len(p) for row, p in zip(rows, prompts, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = pad_sequence(masks, batch_first=True)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}
