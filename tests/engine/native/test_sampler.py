from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from burnish.engine.native import cpu, sampler
from burnish.engine.native.sampler import Limited
from burnish.engine.native.sequence import ANY, DrawLimits
from burnish.randomness import uniforms

Sample = Callable[..., tuple[list[int], list[float]]]


class Draw(NamedTuple):
    """How one row's token is drawn."""

    point: float
    temperature: float = 1.0
    banned: frozenset[int] = frozenset()
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    penalty: float = 1.0
    seen: tuple[int, ...] = (0, 3, 6)


@pytest.fixture(params=[sampler.plain_weigh, cpu.weigh], ids=["plain", "cpu"])
def sample(request: pytest.FixtureRequest) -> Sample:
    def found(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        points = torch.tensor([draw.point for draw in draws], dtype=torch.float64)
        heat = torch.tensor([draw.temperature or 1.0 for draw in draws])
        limited: dict[DrawLimits, list[int]] = {}
        for row, draw in enumerate(draws):
            limits = DrawLimits(not draw.temperature, *draw[2:-1])
            if limits != ANY:
                limited.setdefault(limits, []).append(row)
        seen = {row: np.array(draw.seen) for row, draw in enumerate(draws)}
        given = logits.contiguous(), points, heat, Limited(limited, seen)
        tokens, logprobs = sampler.sample_tokens(*given, request.param)
        return tokens.tolist(), logprobs.tolist()

    return found


LOGITS = torch.tensor([1.3, 0.2, -0.5, 2.0, 0.9, -torch.inf, -1.5, 0.0])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.8},
    "cold": {"temperature": 0.4},
    "banned": {"banned": frozenset({3, 6})},
    "banned, warm": {"banned": frozenset({3}), "temperature": 1.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "both, warm": {"top_k": 5, "top_p": 0.8, "temperature": 1.5},
    "banned, top_k": {"banned": frozenset({3}), "top_k": 2},
    "min_p": {"min_p": 0.3},
    "min_p, warm": {"min_p": 0.3, "temperature": 1.8},
    "min_p, banned": {"min_p": 0.5, "banned": frozenset({3})},
    "min_p, top_p": {"min_p": 0.12, "top_p": 0.85},
    "penalty": {"penalty": 1.5},
    "penalty, cold": {"penalty": 1.5, "temperature": 0.4},
    "penalty, banned": {"penalty": 3.0, "banned": frozenset({1, 3})},
    "encouraged": {"penalty": 0.7, "temperature": 1.5},
    "all": {"penalty": 2.0, "temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.35},
}


def expected(
    temperature: float = 1.0,
    banned: frozenset[int] = frozenset(),
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    penalty: float = 1.0,
) -> np.ndarray:
    """By the definition: one token after another."""
    logits = LOGITS.double().numpy().copy()
    for i in (0, 3, 6):
        logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
    logits /= temperature
    logits[list(banned)] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    whole = sum(p[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        if sum(p[j] for j in kept) < top_p * whole and p[i] >= min_p * max(p):
            kept.append(i)
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_is_right(case: str, sample: Sample) -> None:
    """Chi-square over 10,000 draws; the limit is passed by chance once in 10,000 tests."""
    n = 10_000
    draws = [Draw(point, **CASES[case]) for point in uniforms(0, 0, 1, 2, np.arange(n))]
    tokens, logprobs = sample(LOGITS.expand(n, -1), draws)
    p = expected(**CASES[case])
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    seen = p > 0
    chi2 = ((counts[seen] - n * p[seen]) ** 2 / (n * p[seen])).sum()
    assert chi2 < {1: 15.2, 2: 18.5, 3: 21.2, 4: 23.6, 5: 25.8, 6: 27.9}[int(seen.sum()) - 1]
    scaled = LOGITS / CASES[case].get("temperature", 1.0)
    np.testing.assert_allclose(logprobs, torch.log_softmax(scaled, 0)[tokens], atol=1e-6)


def test_inverse_of_the_cumulative_distribution(sample: Sample) -> None:
    """A large vocabulary, blocks and a remainder: the token is the first whose sum exceeds u."""
    torch.manual_seed(0)
    logits = torch.randn(64, 1000) * 2
    u = np.random.default_rng(0).random(64)
    tokens, _ = sample(logits, [Draw(float(x)) for x in u])
    p = torch.softmax(logits.double(), 1).numpy().cumsum(1)
    assert tokens == [
        int(np.searchsorted(row, x, side="right")) for row, x in zip(p, u, strict=True)
    ]


def test_probability_zero_is_never_drawn(sample: Sample) -> None:
    logits = torch.full((4, 600), -torch.inf)
    logits[:, [5, 300, 599]] = torch.tensor([0.0, -200.0, 1.0])
    edges = [0.0, 2.0**-53, 1 - 2.0**-53, 0.5]
    tokens, _ = sample(logits, [Draw(u) for u in edges])
    assert set(tokens) <= {5, 599}
    assert (tokens[0], tokens[2]) == (5, 599)


def test_greedy_takes_the_likeliest_at_temperature_one(sample: Sample) -> None:
    tokens, logprobs = sample(
        LOGITS.expand(2, -1), [Draw(0.1, 0.0), Draw(0.1, 0.0, banned=frozenset({3}))]
    )
    assert tokens == [3, 0]
    np.testing.assert_allclose(logprobs, torch.log_softmax(LOGITS, 0)[[3, 0]], atol=1e-6)


def test_a_ban_on_nearly_all_the_mass(sample: Sample) -> None:
    logits = torch.tensor([[500.0, 1.0, 2.0]])
    for point, token in ((0.0, 1), (0.9, 2)):
        tokens, logprobs = sample(logits, [Draw(point, banned=frozenset({0}))])
        assert tokens == [token]
        assert logprobs[0] == pytest.approx(float(logits[0, token]) - 500, abs=1e-4)


def test_logits_that_overflowed_spoil_their_own_row_only(sample: Sample) -> None:
    logits = LOGITS.expand(4, -1).clone()
    logits[1], logits[2, 3] = torch.nan, torch.inf
    for draw in (Draw(0.999), Draw(0.999, banned=frozenset({0})), Draw(0.5, 0.0)):
        tokens, logprobs = sample(logits, [draw] * 4)
        assert np.isnan(logprobs).tolist() == [False, True, True, False]
        assert (tokens[0], logprobs[0]) == (tokens[3], logprobs[3])


def test_draws_do_not_depend_on_the_batch(sample: Sample) -> None:
    torch.manual_seed(1)
    logits = torch.randn(40, 1300)
    points = uniforms(7, 0, 0, 0, np.arange(40))
    draws = [Draw(p, temperature=[1.0, 0.5, 0.0][i % 3]) for i, p in enumerate(points)]
    together = sample(logits, draws)
    apart = [sample(logits[i : i + 1], draws[i : i + 1]) for i in range(40)]
    assert together[0] == [tokens[0] for tokens, _ in apart]
    np.testing.assert_allclose(together[1], [logprobs[0] for _, logprobs in apart], atol=1e-6)


def test_min_p_applies_after_the_temperature(sample: Sample) -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: at temperature 1, 0.6 of the largest is 0.24, and the first
    two stay, with 4/7 and 3/7. At temperature 2 the weights are their roots 0.632, 0.548, 0.447,
    0.316, and 0.6 of the largest is 0.379: three stay, the first with 0.632 / 1.627 = 0.3886."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    edges = {1.0: [0.571, 0.572, 0.999], 2.0: [0.388, 0.389, 0.724, 0.726, 0.999]}
    wanted = {1.0: [0, 1, 1], 2.0: [0, 1, 1, 2, 2]}
    for heat, points in edges.items():
        rows = logits.expand(len(points), -1)
        tokens, logprobs = sample(rows, [Draw(point, heat, min_p=0.6) for point in points])
        assert tokens == wanted[heat]
        scaled = torch.log_softmax(logits / heat, 0)[tokens]
        np.testing.assert_allclose(logprobs, scaled, atol=1e-6)


def test_the_penalty_divides_or_multiplies_and_its_logprobs_are_the_models(sample: Sample) -> None:
    """Greedy on 2, −1, 0.5 and −0.2. With the first two seen and a penalty of 5 they are 0.4, −5,
    0.5, −0.2, so the third wins; with the first and third seen, 0.4, −1, 0.1, −0.2."""
    logits = torch.tensor([2.0, -1.0, 0.5, -0.2])
    draws = [Draw(0.5, 0.0, penalty=5.0, seen=seen) for seen in ((0, 1), (0, 2), (1, 3), (0,) * 9)]
    tokens, logprobs = sample(logits.expand(4, -1), draws)
    assert tokens == [2, 0, 0, 2]
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits, 0)[tokens], atol=1e-6)
    # At temperature 2 the weights are exp(0.2), exp(−2.5), exp(0.25) and exp(−0.1): 1.2214, 0.0821,
    # 1.2840 and 0.9048, together 3.4923. The ends are 0.3497, 0.3732, 0.7409 and 1.
    points = [0.349, 0.351, 0.373, 0.374, 0.740, 0.742]
    draws = [Draw(point, 2.0, penalty=5.0, seen=(0, 1)) for point in points]
    tokens, logprobs = sample(logits.expand(6, -1), draws)
    assert tokens == [0, 1, 1, 2, 2, 3]
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits / 2, 0)[tokens], atol=1e-6)


@pytest.mark.parametrize("name", ["min_p", "penalty", "all"])
def test_the_distribution_is_that_of_transformers(name: str, sample: Sample) -> None:
    """Its processors, in the order in which `generate` applies them."""
    from transformers.generation import logits_process as theirs

    torch.manual_seed(2)
    rows, vocab = 64, 700
    logits, points = torch.randn(rows, vocab) * 3, np.random.default_rng(3).random(rows)
    how = {"temperature": 1.3, "min_p": 0.02} if name == "min_p" else {"penalty": 1.4}
    if name == "all":
        how = {"penalty": 1.4, "temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.02}
    seen = torch.randint(vocab, (rows, 400))
    draws = [
        Draw(float(point), seen=tuple(own), **how)
        for point, own in zip(points, seen.tolist(), strict=True)
    ]
    tokens, logprobs = sample(logits, draws)
    steps: list[Any] = []
    if "penalty" in how:
        steps.append(theirs.RepetitionPenaltyLogitsProcessor(how["penalty"]))
    heat = how.get("temperature", 1.0)
    steps.append(theirs.TemperatureLogitsWarper(heat))
    if "top_k" in how:
        steps.append(theirs.TopKLogitsWarper(60))
        steps.append(theirs.TopPLogitsWarper(how["top_p"]))
    if "min_p" in how:
        steps.append(theirs.MinPLogitsWarper(how["min_p"]))
    scores = logits.clone()
    for step in steps:
        scores = step(seen, scores)
    ends = torch.softmax(scores.double(), 1).cumsum(1).numpy()
    assert tokens == [
        int(np.searchsorted(row, point, side="right"))
        for row, point in zip(ends, points, strict=True)
    ]
    plain = torch.log_softmax(logits / heat, 1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, plain, atol=1e-5)
