"""Advantage estimators: how much better than expected a response, a step or a token was.

Group estimators take ``rewards`` [S], one per response, and ``group_ids`` [S], the group of each
response (any integers, in any order), and return advantages [S]; ``sequences.to_tokens`` spreads
them over tokens. All but ``raw``, ``best_of_group`` and ``remax`` raise a ValueError if a group has
only one response. Estimators over time and turns take and return tensors with the shape of their
mask. If the
baseline is computed from the rewards, equal rewards have an advantage of exactly 0: differences are
summed instead of rewards, so that large rewards leave no rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.rl.order import best_of_k, gain_of_k
from burnish.rl.sequences import Rows, sum_by, to_tokens
from burnish.rl.turns import Turns


def raw(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward itself, without a baseline.

        A_i = r_i

    Williams 1992 (REINFORCE). Takes and returns [S].
    Differs from the paper in nothing.
    """
    _groups(rewards, group_ids)
    return rewards.clone()


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above its group's mean.

        A_i = r_i − mean_g(r)

    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (Dr. GRPO), which omits GRPO's division by the
    std. Takes and returns [S].
    Differs from the paper in nothing.
    """
    group, size = _groups(rewards, group_ids, least=2)
    return _centered(rewards, group, size)


def group_zscore(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The reward above its group's mean, in standard deviations.

        A_i = (r_i − mean_g(r)) / (std_g(r) + ε)

    Shao et al. 2024, https://arxiv.org/abs/2402.03300 (GRPO), section 4.1.2. Takes and returns [S].
    Differs from the paper in nothing that the paper specifies. It leaves open the std (unbiased
    here, over G − 1, as in verl and TRL) and ε (1e-6 as in verl; TRL has 1e-4).
    """
    group, size = _groups(rewards, group_ids, least=2)
    centered = _centered(rewards, group, size)
    std = (sum_by(centered**2, group, len(size)) / (size - 1)).sqrt()
    scaled = centered / (std[group] + eps)
    return torch.where(centered == 0, centered, scaled)  # 0 / 0 where ε is 0


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean reward of the other responses in its group.

        A_i = r_i − (Σ_g r − r_i) / (G − 1)

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740 (RLOO). Takes and returns [S].
    Differs from the paper in nothing.
    """
    group, size = _groups(rewards, group_ids, least=2)
    above = _above_least(rewards, group, size)
    return above - (sum_by(above, group, len(size))[group] - above) / (size[group] - 1)


def best_of_group(rewards: Tensor, group_ids: Tensor, *, centered: bool = False) -> Tensor:
    """The reward for the best responses of a group; 0 for its other responses.

        A_i = r_i [r_i = max_g(r)]                  (default)
        A_i = (r_i − mean_g(r)) [r_i = max_g(r)]    (``centered``)

    From a lecture's worked example (its "max" delta). Takes and returns [S]. If the rewards of a
    group are equal, all its responses are reinforced; with ``centered`` their advantages are 0.
    Differs from the lecture in nothing: its text centres the rewards, its code does not.
    """
    group, size = _groups(rewards, group_ids)
    best = torch.full_like(size, -torch.inf).scatter_reduce(0, group, rewards, "amax")
    kept = _centered(rewards, group, size) if centered else rewards
    return torch.where(rewards == best[group], kept, torch.zeros_like(rewards))


def batch_std(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    of: Literal["advantages", "rewards"] = "advantages",
    eps: float = 1e-6,
) -> Tensor:
    """The reward above its group's mean, in standard deviations of the whole batch.

        A_i = (r_i − mean_g(r)) / (std + ε)
        std of r_j − mean_g(r) over all responses j   (``of`` = "advantages")
        std of r_j over all responses j               (``of`` = "rewards")

    Khatri et al. 2025, https://arxiv.org/abs/2510.13786 (ScaleRL), whose Â_std is the std of all
    advantages in a batch; "rewards" is TRL's scale_rewards = "batch". Takes and returns [S].
    Differs from the paper in nothing that the paper specifies. It leaves open the std (unbiased
    here, over S − 1) and ε.
    """
    group, size = _groups(rewards, group_ids, least=2)
    centered = _centered(rewards, group, size)
    return _scaled(centered, centered if of == "advantages" else rewards, eps)


def pass_at_k(rewards: Tensor, group_ids: Tensor, *, k: int, eps: float = 1e-6) -> Tensor:
    """The increase of the expected best reward of k drawn responses if this response is one of
    them, in standard deviations of that best reward.

        M = max of the rewards of k responses drawn from the group without replacement
        A_i = (E[M | i is drawn] − E[M]) / (std[M] + ε)

    Chen et al. 2025, https://arxiv.org/abs/2508.10751 (Pass@k training), equations of the
    analytical derivation. For rewards of 0 and 1, of which N⁻ of N are 0, E[M] = 1 − C(N⁻, k) /
    C(N, k) is pass@k, std[M] = √(E[M] (1 − E[M])), and E[M | i] is 1 for a right response and 1 −
    C(N⁻ − 1, k − 1) / C(N − 1, k − 1) for a wrong one. With k = 1 it is ``group_zscore`` with the
    biased std. Takes and returns [S].
    Differs from the paper in allowing any rewards, for which order statistics give exact results;
    in ε, which the paper does not have; and in that a group that has lost responses and has at most
    k left uses one less than its size as k.
    """
    return _within_groups(rewards, group_ids, lambda own: best_of_k(own, min(k, len(own) - 1), eps))


def max_at_k(rewards: Tensor, group_ids: Tensor, *, k: int, eps: float | None = None) -> Tensor:
    """The decrease of the best reward of k responses if this response were missing, averaged over
    all sets of k responses of the group.

        A_i = Σ_(I: i in I) ( max_I r − max_(I without i) r ) / C(N, k)
        A_i ← A_i / (std_g(r) + ε)      (unless ``eps`` is None)

    I runs over all sets of k of the group's N responses. Walder & Karkhanis 2025,
    https://arxiv.org/abs/2505.15201 (PKPO): its estimator of max@k with the smallest variance,
    whose baseline is the best of the other k − 1 responses. With k = N only the best response has
    an advantage, its distance to the second best, as in Tang et al. 2025,
    https://arxiv.org/abs/2503.19595; verl's grpo_passk also divides by the std, with ε = 1e-6.
    Takes and returns [S].
    Differs from the paper in the reduction that follows, a mean over a group's responses instead of
    a sum, which makes the loss N times smaller; and in that a group that has lost responses and has
    fewer than k left uses its size as k.
    """

    def estimate(own: Tensor) -> Tensor:
        gain = gain_of_k(own, min(k, len(own)))
        return gain if eps is None else gain / (own.std() + eps)

    return _within_groups(rewards, group_ids, estimate)


def maxrl(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The reward above its group's mean, divided by that mean, so that rare successes weigh most.

        A_i = (r_i − mean_g(r)) / (mean_g(r) + ε),   0 where mean_g(r) = 0

    Tajwar et al. 2026, https://arxiv.org/abs/2602.02710 (maximum likelihood RL). For rewards of 0
    and 1 it estimates the gradient of log pass@1, truncated at the order of the group's size. Takes
    and returns [S]. Raises a ValueError if a reward is negative.
    Differs from the paper in allowing any rewards of at least 0, and in ε, which is 0 in the
    paper's formula and 1e-6 in the authors' code and SkyRL.
    """
    group, size = _groups(rewards, group_ids, least=2)
    if bool((rewards < 0).any()):
        raise ValueError(
            f"maxrl divides by a group's mean and needs rewards of at least 0, got "
            f"{rewards.min().item():g}; shift the rewards or use group_mean"
        )
    centered, mean = _centered(rewards, group, size), sum_by(rewards, group, len(size)) / size
    return torch.where(centered == 0, centered, centered / (mean[group] + eps))


def gdpo(parts: Tensor, group_ids: Tensor, *, weights: list[float], eps: float = 1e-6) -> Tensor:
    """The weighted sum of each reward part's group z-scores, divided by its std over the batch.

        Z_(i,k) = (r_(i,k) − mean_g(r_k)) / (std_g(r_k) + ε)
        A_i = (a_i − mean(a)) / (std(a) + ε),   a_i = Σ_k w_k Z_(i,k)

    Liu et al. 2026, https://arxiv.org/abs/2601.05242 (GDPO). ``parts`` [S, K], ``weights`` [K];
    returns [S]. Mean and std of a are over all responses of the batch; the mean is 0, because each
    group's mean is 0.
    Differs from the paper in nothing that the paper specifies; both stds are unbiased. TRL does the
    same with ε = 1e-4; verl whitens a over tokens, which is ``whiten(to_tokens(a, mask), mask)``.
    """
    columns = [
        weight * group_zscore(part, group_ids, eps=eps)
        for weight, part in zip(weights, parts.unbind(1), strict=True)
    ]
    total = torch.stack(columns).sum(0)
    return _scaled(total, total, eps)


def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward above its group's length-weighted mean, which is the baseline with the smallest
    variance if a response's squared gradient is proportional to its length.

        A_i = r_i − Σ_g l_j r_j / Σ_g l_j

    Hao et al. 2025, https://arxiv.org/abs/2505.23585 (OPO). ``lengths`` [S] are numbers of sampled
    tokens. Takes and returns [S].
    Differs from the paper in nothing; verl uses the raw reward in a group of one.
    """
    group, size = _groups(rewards, group_ids, least=2)
    above, lengths = _above_least(rewards, group, size), lengths.to(rewards.dtype)
    total = sum_by(lengths, group, len(size)).clamp(min=1)
    return above - (sum_by(lengths * above, group, len(size)) / total)[group]


def remax(rewards: Tensor, greedy: Tensor) -> Tensor:
    """The reward above the reward of the greedy response to the same prompt.

        A_i = r_i − r(greedy response)

    Li et al. 2024, https://arxiv.org/abs/2310.10505 (ReMax). ``greedy`` [S] has one reward per
    prompt, repeated for each of its responses. Takes and returns [S].
    Differs from the paper in allowing several responses per prompt, and from verl in that a KL in
    the reward counts for the whole response; in verl, each token has the KL of the tokens from it
    to the end.
    """
    return rewards - greedy


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Shift and scale x so that its actions have mean 0 and variance 1 over the whole batch.

        w_t = (x_t − mean(x)) / sqrt(var(x) + ε),  var unbiased, both over the mask

    As in verl and TRL. Slots outside the mask have meaningless values. Any shape; the mask has the
    same shape. Raises a ValueError if the mask has fewer than 2 actions.
    """
    acted = x[mask.bool()]
    if acted.numel() < 2:
        raise ValueError(f"whitening needs at least 2 actions, got {acted.numel()}")
    least = acted.min()
    mean = (acted - least).mean()
    variance = ((acted - least - mean) ** 2).sum() / (acted.numel() - 1)
    return (x - least - mean) * torch.rsqrt(variance + eps)


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, sequence_ids: Tensor | None = None
) -> Tensor:
    """Discounted returns, whitened over all actions of the batch.

        A_t = whiten(R_t),  R_t = r_t + γ R_(t+1)   (GAE with λ = 1 and values of 0)

    Hu 2025, https://arxiv.org/abs/2501.03262 (REINFORCE++). ``rewards`` are per token, because they
    include the paper's KL penalty (see ``kl.penalised_rewards``); ``sequences.on_last_action``
    makes them from one reward per response. All tensors have the shape of the mask.
    Differs from the paper in ε, which is added to the variance, as in verl, and not to the std.
    """
    nothing = torch.zeros_like(rewards)
    returns, _ = gae(rewards, nothing, mask, gamma=gamma, sequence_ids=sequence_ids)
    return torch.where(mask.bool(), whiten(returns, mask), torch.zeros_like(returns))


def reinforce_plus_plus_baseline(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor:
    """The reward above its group's mean, whitened over all actions of the batch.

        A_(i,t) = whiten(r_i − mean_g(r))

    Hu 2025, https://arxiv.org/abs/2501.03262 (REINFORCE++-baseline). As in verl, a response counts
    once per action in the whitening, so long responses weigh more. ``rewards`` and ``group_ids``
    [S]; returns a tensor with the shape of the mask.
    Differs from the paper in ε, like ``reinforce_plus_plus``.
    """
    centered = to_tokens(group_mean(rewards, group_ids), mask, sequence_ids)
    return torch.where(mask.bool(), whiten(centered, mask), torch.zeros_like(centered))


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over actions; returns (advantages, returns).

        δ_t = r_t + γ V_(t+1) − V_t
        A_t = δ_t + γ λ A_(t+1),   returns_t = A_t + V_t

    Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16. ``values[t]`` is the value
    before token t. ``bootstrap`` [S] is the value after the last action, which should be 0 for
    responses that ended by themselves; None means 0 for all. Advantages are not whitened. All other
    tensors have the shape of the mask; results are 0 outside it.
    Differs from the paper in skipping tokens that are not actions: t + 1 is the next action, and a
    reward on another token is ignored.
    """
    rows = Rows(mask, sequence_ids)
    reward, value = rows.pack(rewards), rows.pack(values)
    next_value = value.new_zeros(rows.count) if bootstrap is None else bootstrap[: rows.count]
    next_advantage = value.new_zeros(rows.count)
    advantages = []
    for t in reversed(range(rows.width)):
        inside = t < rows.lengths
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(inside, advantage, next_advantage)
        next_value = torch.where(inside, value[:, t], next_value)
        advantages.append(advantage)
    advantage_rows = torch.stack(advantages[::-1], dim=1) if advantages else value
    return rows.unpack(advantage_rows), rows.unpack(advantage_rows + value)


def vine(
    rewards: Tensor, values: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor:
    """The increase in value over a step of a response, assigned to each action of the step.

        A_t = Σ_(u in t's step) r_u + V(next step) − V(t's step),   V after the last step = 0

    Kazemnejad et al. 2024, https://arxiv.org/abs/2410.01679 (VinePPO), section 4, with γ = 1: GAE
    with λ = 0 over steps. ``values`` are values before the first token of each step, and NaN before
    other tokens; the first action of each response must begin a step, or a ValueError is raised.
    ``rewards`` are per token. All tensors have the shape of the mask; the result is 0 outside it.
    Differs from the paper in the value before the first step, for which the learner passes the mean
    reward of the group's other responses instead of sampling K more responses to the prompt.
    """
    rows = Rows(mask, sequence_ids)
    reward, value = rows.pack(rewards), rows.pack(values)
    column = torch.arange(rows.width, device=mask.device)
    starts = (column < rows.lengths[:, None]) & value.isfinite()
    if not starts[rows.lengths > 0, :1].all():
        raise ValueError("steps need a value before the first action of each response")
    step = (starts.cumsum(1) - 1).clamp(min=0)  # the number of each action's step in its row
    place = step + rows.width * torch.arange(rows.count, device=mask.device)[:, None]
    gained, before = (
        sum_by(x, place, x.numel()).view_as(x)  # [S, L], a column for each step
        for x in (reward, torch.where(starts, value, torch.zeros_like(value)))
    )
    advantages, _ = gae(gained, before, column < starts.sum(1)[:, None], lam=0.0)
    return rows.unpack(advantages.gather(1, step))


def turn_mean(
    rewards: Tensor,
    ends: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    gamma: float = 1.0,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """The return of a turn above the group's mean return at the same turn, assigned to each action
    of the turn.

        A_(i,k) = R_(i,k) − mean of R_(j,k) over the episodes j of the group that reached turn k
        R_(i,k) = Σ_(l ≥ k) γ^(l−k) r_(i,l)

    Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.3 (GRPO with process
    supervision), with turns as the steps. ``rewards`` are per token, and r_(i,l) is their sum over
    turn l. ``ends`` marks the last token of each turn, also of episodes that are not in the loss:
    these count in the mean. ``group_ids`` [S]; all other tensors have the shape of the mask, and
    the result is 0 outside it. A turn that only one episode of the group reached has the advantage
    0.
    Differs from the paper in the baseline, which compares equal turns instead of the rewards of all
    steps; in omitting the division by the std; and in the discount γ.
    """
    turns = Turns(ends, mask, sequence_ids)
    gained, count = turns.sums(rewards), turns.reached.shape[1]
    returns, _ = gae(gained, torch.zeros_like(gained), turns.reached, gamma=gamma)
    number = torch.arange(count, device=mask.device)
    place = group_ids[: len(gained), None] * count + number  # one number per group and turn
    group, size = _groups(returns[turns.reached], place[turns.reached])
    above = torch.zeros_like(returns)
    above[turns.reached] = _centered(returns[turns.reached], group, size)
    return turns.to_tokens(above)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    ends: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the turns of episodes; returns (advantages, returns),
    those of a turn assigned to each of its actions.

        δ_k = r_k + γ V_(k+1) − V_k,   V_k = value before the first action of turn k
        A_k = δ_k + γ λ A_(k+1),   returns_k = A_k + V_k

    Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16, with turns as the actions.
    ``rewards`` are per token, and r_k is their sum over turn k. ``ends`` marks the last token of
    each turn. The value after the last turn is 0. All tensors have the shape of the mask; the
    results are 0 outside it.
    Differs from the paper in nothing.
    """
    turns = Turns(ends, mask, sequence_ids)
    estimates = gae(turns.sums(rewards), turns.firsts(values), turns.reached, gamma=gamma, lam=lam)
    advantages, returns = map(turns.to_tokens, estimates)
    return advantages, returns


def teacher(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The teacher's log-probability of a sampled token minus the policy's: on-policy distillation.

        A_t = −(log π_prox − log π_teacher)

    Lu 2025, https://thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2024,
    https://arxiv.org/abs/2306.13649 (GKD). In a given context, its mean over tokens sampled from
    π_prox is −KL(π_prox ‖ π_teacher). As in the post the discount is 0: the advantage of a token
    does not include the KL of later tokens. The result has no gradient. All tensors have the shape
    of the mask; the result is 0 outside it.
    Differs from the post in the student's log-probabilities, which are those of π_prox; they are
    the sampler's, as in the post, if the recipe sets this. Differs from GKD in estimating the KL
    from the sampled token instead of the whole distributions.
    """
    difference = (teacher_logprobs - logprobs).detach()
    return torch.where(mask.bool(), difference, torch.zeros_like(difference))


def _groups(rewards: Tensor, group_ids: Tensor, *, least: int = 1) -> tuple[Tensor, Tensor]:
    """The group of each reward [S], renumbered to [0, groups), and the number of rewards in each
    group [groups], as floats.

    Raises a ValueError if a group has fewer than ``least`` rewards.
    """
    assert rewards.shape == group_ids.shape == (len(rewards),), "both are [S]"
    names, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if size.numel() and int(size.min()) < least:
        name = names[int(size.argmin())].item()
        raise ValueError(
            f"a group baseline needs at least {least} responses, but group {name} has "
            f"{int(size.min())}; drop the group or use raw"
        )
    return group, size.to(rewards.dtype)


def _above_least(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Each reward minus its group's smallest reward; exactly 0 in a group of equal rewards."""
    least = torch.full_like(size, torch.inf).scatter_reduce(0, group, rewards, "amin")
    return rewards - least[group]


def _centered(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Each reward minus its group's mean."""
    above = _above_least(rewards, group, size)
    return above - (sum_by(above, group, len(size)) / size)[group]


def _within_groups(
    rewards: Tensor, group_ids: Tensor, estimate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply ``estimate``, a function [n] -> [n], to the n rewards of each group, in double
    precision; returns [S]. Raises a ValueError if a group has only one response."""
    group, size = _groups(rewards, group_ids, least=2)
    result = torch.empty_like(rewards)
    for number in range(len(size)):
        own = (group == number).nonzero().squeeze(1)
        result[own] = estimate(rewards[own].double()).to(result.dtype)
    return result


def _scaled(x: Tensor, of: Tensor, eps: float) -> Tensor:
    """x divided by the standard deviation of ``of`` + ε, both [S]; exactly 0 where x is 0."""
    return torch.where(x == 0, x, x / ((of - of.min()).std() + eps))
