"""A loss from a script: PPO's clip with the off-policy sequence mask of DeepSeek-V3.2 and TRL.

    python examples/off_policy_mask.py [seed=1] [section.key=value …]

    M_i = 0 if A_i < 0 and (1/|y_i|) Σ_t (log π_behavior − log π) > δ, else 1
    L_t = M_i · (PPO's clipped loss)

A response with a negative advantage that the policy has already moved away from teaches nothing.
https://arxiv.org/abs/2512.02556; TRL's off_policy_mask_threshold is δ, and TRL's documentation
suggests to start with 0.5 for language models. The script learns to sort with six gradient steps
per rollout, and prints the held-out reward.
"""

import sys

from torch import Tensor

import burnish
from burnish.rl.losses import clipped
from burnish.rl.sequences import sequence_lengths, sequence_sum, to_tokens


def masked_clip(
    logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    sequence_ids: Tensor | None,
    behavior: Tensor,
    delta: float = 0.05,
) -> Tensor:
    """Return the loss of each token; a mean over the response decides whether it is masked."""
    moved = sequence_sum(behavior - logprobs.detach(), mask, sequence_ids)
    mean = moved / sequence_lengths(mask, sequence_ids).clamp(min=1)
    kept = (advantages >= 0) | (to_tokens(mean, mask, sequence_ids) <= delta)
    return clipped(ratio, advantages, low=0.2, high=0.2) * kept


def main() -> None:
    changes = ["train.batch=10", "train.epochs=2", "train.steps=30", *sys.argv[1:]]
    run = burnish.train("sort", objective={"loss": masked_clip}, overrides=changes)
    print(f"reward {run.summary['reward_first']:.2f} → {run.summary['reward_last']:.2f}")


if __name__ == "__main__":
    main()
