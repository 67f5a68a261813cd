"""GRPO in one file: sample groups, score them, compare within the group, step. No Ray, no GPU.

    python examples/grpo_one_file.py

A small model learns to sort three numbers. This file contains the whole algorithm, in the order in
which it runs; the package implements the same in exchangeable pieces. A test takes one step with
this file and one with the package, and checks that the weights are the same.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

PROMPTS = torch.tensor([[1, 0, 2], [3, 2, 4], [4, 2, 0]])  # [P, L]
NUMBERS = 5


class Sorter(nn.Module):
    """A model that outputs all numbers of a response at once: prompts [P, L] to logits
    [P, L, NUMBERS]."""

    def __init__(self, length: int = 3, width: int = 10, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(width)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=random) * scale)

        self.embedding = weights(NUMBERS, width)
        self.encode = weights(length, width, width)  # one matrix per prompt position
        self.decode = weights(length, width, width)  # one matrix per response position

    def forward(self, prompts: Tensor) -> Tensor:
        encoded = torch.einsum("bpd,pde->be", self.embedding[prompts], self.encode)
        decoded = torch.einsum("be,red->brd", encoded, self.decode)
        return decoded @ self.embedding.T


# 1. Generate: a group of responses to each prompt.


@torch.no_grad()
def sample(model: Sorter, prompts: Tensor, group_size: int, random: torch.Generator) -> Tensor:
    """Sample G = ``group_size`` responses to each prompt; returns [P, G, L]."""
    count, length = prompts.shape
    probabilities = model(prompts).softmax(-1).view(count * length, -1)
    drawn = torch.multinomial(probabilities, group_size, replacement=True, generator=random)
    return drawn.view(count, length, group_size).transpose(1, 2)


# 2. Grade: a verifiable reward with partial credit.


def reward(prompt: list[int], response: list[int]) -> float:
    """Return one point for every number of the prompt that is in the response, and one for every
    two neighbours of the response that are in order."""
    inclusion = sum(number in response for number in prompt)
    ordering = sum(a <= b for a, b in pairwise(response))
    return float(inclusion + ordering)


def grade(prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the reward of every response: prompts [P, L] and responses [P, G, L] to [P, G]."""
    return torch.tensor(
        [
            [reward(prompt, response) for response in group]
            for prompt, group in zip(prompts.tolist(), responses.tolist(), strict=True)
        ]
    )


# 3. Score: the log-probability of every sampled number.


def log_probs(model: Sorter, prompts: Tensor, responses: Tensor) -> Tensor:
    """Return log π(number | prompt) for every number of every response, [P, G, L]."""
    logits = model(prompts)[:, None].expand(-1, responses.shape[1], -1, -1)
    return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


# 4. Advantages: better or worse than the rest of the group.


def advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """Return A_i = (r_i − mean_g(r)) / (std_g(r) + ε): [P, G] → [P, G]; exactly 0 for equal
    rewards."""
    above = rewards - rewards.amin(-1, keepdim=True)
    centered = above - above.mean(-1, keepdim=True)
    return centered / (above.std(-1, keepdim=True) + eps)


# 5. Learn: the clipped surrogate, with an optional KL term against a reference.


def grpo_loss(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    *,
    clip: float,
    reference: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """Return −mean over tokens of min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) − β k3.

    ``new``, ``old`` and ``reference`` are log-probabilities [P, G, L]; the advantage is [P, G].
    ρ = exp(new − old). (A published lecture divides the logarithms instead; that is not a ratio.)
    All responses have the same length here, so the mean over a response's tokens, then over
    responses, is the mean over all.
    """
    ratio = torch.exp(new - old)
    a = advantage[..., None]
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    if reference is not None:
        x = new - reference
        loss = loss + kl_coefficient * (torch.exp(-x) + x - 1)  # k3: unbiased, never negative
    return loss.mean()


def train(
    model: Sorter,
    prompts: Tensor = PROMPTS,
    *,
    steps: int = 100,
    gradient_steps: int = 10,
    group_size: int = 10,
    learning_rate: float = 1e-3,
    clip: float = 0.01,
    kl_coefficient: float = 0.0,
    refresh_every: int = 10,
    seed: int = 0,
) -> list[float]:
    """Train the model with Algorithm 1 of GRPO, https://arxiv.org/abs/2402.03300; return the mean
    reward of each step."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    frozen = Sorter(prompts.shape[1])
    history = []
    for step in range(steps):
        if step % refresh_every == 0:
            frozen.load_state_dict(model.state_dict())
        responses = sample(model, prompts, group_size, random)
        rewards = grade(prompts, responses)
        advantage = advantages(rewards)
        with torch.no_grad():
            old = log_probs(model, prompts, responses)
            reference = log_probs(frozen, prompts, responses) if kl_coefficient else None
        for _ in range(gradient_steps):
            loss = grpo_loss(
                log_probs(model, prompts, responses),
                old,
                advantage,
                clip=clip,
                reference=reference,
                kl_coefficient=kl_coefficient,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(rewards.mean().item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  reward {history[-1]:.2f}  loss {loss.item():+.5f}")
    return history


def main() -> None:
    model = Sorter()
    train(model)
    for prompt, response in zip(PROMPTS.tolist(), model(PROMPTS).argmax(-1).tolist(), strict=True):
        print(*prompt, " → ", *response)


if __name__ == "__main__":
    main()
