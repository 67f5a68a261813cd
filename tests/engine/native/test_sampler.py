from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from burnish.draws import uniforms
from burnish.engine import cpu, sampler
from burnish.engine.sequence import ANY, Limits

Sample = Callable[..., tuple[list[int], list[float]]]


class Draw(NamedTuple):
    """How one row's token is drawn."""

    point: float
    temperature: float = 1.0
    banned: frozenset[int] = frozenset()
    top_p: float = 1.0
    top_k: int | None = None


@pytest.fixture(params=[sampler.plain_weigh, cpu.weigh], ids=["plain", "cpu"])
def sample(request: pytest.FixtureRequest) -> Sample:
    def found(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
        points = torch.tensor([draw.point for draw in draws], dtype=torch.float64)
        heat = torch.tensor([draw.temperature or 1.0 for draw in draws])
        limited: dict[Limits, list[int]] = {}
        for row, draw in enumerate(draws):
            limits = Limits(not draw.temperature, *draw[2:])
            if limits != ANY:
                limited.setdefault(limits, []).append(row)
        given = logits.contiguous(), points, heat, limited
        tokens, logprobs = sampler.sample(*given, request.param)
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
}


def expected(
    temperature: float = 1.0,
    banned: frozenset[int] = frozenset(),
    top_p: float = 1.0,
    top_k: int | None = None,
) -> np.ndarray:
    """By the definition: one token after another."""
    logits = LOGITS.double().numpy() / temperature
    logits[list(banned)] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    whole = sum(p[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        if sum(p[j] for j in kept) < top_p * whole:
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
