"""The classic GRPO functions under their published names, as thin wrappers of ``rl/``.

Existing course and research code can use them unchanged: tensors are padded [B, T], and labels are
shifted by one relative to the inputs. To keep the published interface, this file does not follow
two rules of the package: index t describes token t, and only ``model/tokenizer.py`` tokenizes text.
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
    """Score every response, and subtract the mean reward of its group; return advantages [N], raw
    rewards [N] and statistics of the raw rewards.

    A group is ``group_size`` consecutive responses. ``reward_fn`` takes a response and its ground
    truth, and returns a dict with "reward". If ``normalize_by_std``, divide advantages by the
    group's unbiased std + ``advantage_eps``. The statistics are the rewards' mean, std,
    maximum and minimum and, if all dicts have them, the means of "format_reward" and
    "answer_reward". Raises a ValueError if groups are not complete or have only one response.
    """
    count = len(rollout_responses)
    if group_size < 1 or count % group_size:
        raise ValueError(
            f"the number of responses must be a multiple of group_size, got {count} responses and "
            f"group_size {group_size}"
        )
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
    """Return −A log π per token: [B, 1], [B, T] → [B, T]."""
    return losses.reinforce(policy_log_probs, raw_rewards_or_advantages)


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) per token, and metadata.

    Advantages are [B, 1]; the other tensors and the loss are [B, T]. ρ is the ratio of the policy's
    to the old probability, and ε is ``cliprange``. The metadata are "ratio" and "clipped" (bool),
    both [B, T], and "clip_fraction", the fraction of all B T slots that are clipped.
    """
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
    """Return the per-token loss [B, T] of ``loss_type``, and its metadata.

    "no_baseline" is the policy gradient with ``raw_rewards``, "reinforce_with_baseline" the same
    with ``advantages``, and "grpo_clip" is `compute_grpo_clip_loss`; only "grpo_clip" has metadata.
    Raises a ValueError for another type, or if an argument that the type needs is None.
    """
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
    """Return the mean over the elements where ``mask`` is true, along ``dim``, or over the whole
    tensor if ``dim`` is None. A mean over no elements is NaN."""
    return masked_normalize(tensor, mask, dim) / mask.bool().sum(dim=dim)


def masked_normalize(
    tensor: Tensor,
    mask: Tensor,
    dim: int | None = None,
    normalize_constant: float = 1.0,
    *,
    constant_normalizer: float | None = None,
) -> Tensor:
    """Return the sum over the elements where ``mask`` is true, along ``dim``, or over the whole
    tensor if ``dim`` is None, divided by a constant.

    The constant is ``normalize_constant``, or ``constant_normalizer`` if it is given.
    """
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
    """Compute the loss of a microbatch and call ``backward``.

    The loss is the mean over the batch of each sequence's mean over response tokens, divided by the
    number of accumulation steps. Gradients are accumulated in the parameters. Rows without response
    tokens are excluded from the batch mean. Returns the divided loss, without gradient, and its
    metadata. For ``loss_type`` and the arguments after it see `compute_policy_gradient_loss`.
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
    """Compute the supervised loss of a microbatch and call ``backward``.

    The loss is the negative mean over the batch of each sequence's sum over response tokens,
    divided by ``normalize_constant`` and by the number of accumulation steps. Rows without response
    tokens count as 0. Gradients are accumulated in the parameters. Returns the divided loss,
    without gradient, and empty metadata.
    """
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
    """Return a dict with "log_probs", log π(labels | input_ids) [B, T], and with "token_entropy"
    [B, T] if ``return_token_entropy``.

    ``model`` is a causal language model with Hugging Face's interface: called with ids, it returns
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
    """Tokenize prompts and outputs separately, concatenate them and pad on the right.

    Returns a dict of tensors [B, longest − 1]: ``input_ids`` is without the last column, ``labels``
    without the first, and ``response_mask`` is true where a label is an output token. No special
    tokens are added.
    """
    # The value of the padding does not matter: the mask is made from lengths.
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in prompt_strs]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in output_strs]
    rows = [torch.tensor([*p, *o], dtype=torch.long) for p, o in zip(prompts, outputs, strict=True)]
    masks = [torch.arange(len(row)) >= len(p) for row, p in zip(rows, prompts, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    mask = pad_sequence(masks, batch_first=True)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}
