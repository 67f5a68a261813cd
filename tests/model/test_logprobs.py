"""Chunked log-probabilities equal those from whole logits, in values and gradients."""

import pytest
import torch
from torch import Tensor

from burnish.model import logprobs
from burnish.model.attention import PackedAttention, causal
from burnish.model.logprobs import token_logprobs
from burnish.model.transformer import ModelConfig, Transformer

CONFIG = ModelConfig(vocab_size=37, n_layers=2, d_model=16, n_heads=4, d_ff=24, n_kv_heads=2)


@pytest.fixture
def model() -> Transformer:
    return Transformer(CONFIG).init_weights(3).double()


def whole(model: Transformer, hidden: Tensor, tokens: Tensor, before: Tensor, heat: Tensor):
    """[N] log-probabilities and entropies by the definition, from all logits at once."""
    logp = (model.logits(hidden[before]) / heat[:, None]).log_softmax(-1)
    return logp[torch.arange(len(tokens)), tokens], -(logp.exp() * logp).sum(-1)


@pytest.fixture(params=[3, 100])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of logits that exist at a time."""
    monkeypatch.setattr(logprobs, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
def test_chunked_equals_whole(model: Transformer) -> None:
    torch.manual_seed(0)
    n = 13
    hidden = torch.randn(n, 16, dtype=torch.float64, requires_grad=True)
    tokens, before = torch.randint(37, (n,)), torch.randint(n, (n,))
    heat = torch.rand(n, dtype=torch.float64) + 0.5
    slots = torch.tensor([1, 2, 5, 6, 7, 8, 12])
    wrt = [hidden, model.embed.weight]
    want = [x[slots] for x in whole(model, hidden, tokens, before, heat)]
    got = token_logprobs(model, hidden, tokens, before, slots, heat)[:2]
    upstream = torch.randn(2, len(slots), dtype=torch.float64)
    for g, w, up in zip(got, want, upstream, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)
        grads = torch.autograd.grad(g, wrt, up, retain_graph=True)
        for a, b in zip(grads, torch.autograd.grad(w, wrt, up, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    with torch.no_grad():
        still, *_ = token_logprobs(model, hidden, tokens, before, slots, heat)
    torch.testing.assert_close(still, want[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heat", [1.0, 0.7])
@pytest.mark.usefixtures("chunk")
def test_kept_logits_and_those_made_again_are_the_same(
    model: Transformer, heat: float, dtype: torch.dtype
) -> None:
    """To the bit: the first backward pass has the last chunk's logits, the second has none."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 16).to(dtype).requires_grad_()
    tokens, before, temperature = torch.randint(37, (7,)), torch.arange(7), torch.full((7,), heat)
    weight = model.to(dtype).embed.weight
    both = token_logprobs(model, hidden, tokens, before, before, temperature)[:2]
    first, second = (
        torch.autograd.grad(
            both,
            (hidden, weight),
            torch.randn(2, 7, generator=torch.manual_seed(1)).unbind(),
            retain_graph=True,
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_slots_is_an_empty_answer(model: Transformer) -> None:
    hidden, tokens = torch.zeros(3, 16, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    none, heat = torch.zeros(0, dtype=torch.long), torch.ones(3)
    for measured in token_logprobs(model, hidden.requires_grad_(), tokens, tokens, none, heat)[:2]:
        assert measured.shape == (0,)
        (gradient,) = torch.autograd.grad(measured.sum(), hidden, retain_graph=True)
        assert gradient.abs().sum() == 0


def test_low_precision_logits_are_normalised_in_float32(model: Transformer) -> None:
    torch.manual_seed(0)
    model.bfloat16()
    hidden, slots, heat = torch.randn(5, 16).bfloat16(), torch.arange(5), torch.full((5,), 0.7)
    tokens = torch.randint(37, (5,))
    got, _ = token_logprobs(model, hidden, tokens, slots, slots, heat)
    assert got.dtype == torch.float32
    want, _ = whole(model, hidden, tokens, slots, heat.double())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_pack_equals_its_sequences_run_alone(model: Transformer) -> None:
    """Values and gradients: a prompt computed once = a prompt before each response."""
    torch.manual_seed(0)
    prompt, responses = torch.randint(37, (5,)), [torch.randint(37, (n,)) for n in (3, 6)]
    parameters = list(model.parameters())

    tokens = torch.cat([prompt, *responses])
    positions = torch.cat([torch.arange(5), torch.arange(5, 8), torch.arange(5, 11)])
    before = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 4, 8, 9, 10, 11, 12])
    attend = PackedAttention(torch.tensor([0, 5, 8, 14]), torch.tensor([True, False, False]))
    hidden = model(tokens, positions, attend)
    heat = torch.full((14,), 0.8)
    packed, *_ = token_logprobs(model, hidden, tokens, before, torch.arange(5, 14), heat)

    alone = []
    for response in responses:
        sequence = torch.cat([prompt, response])
        slots = torch.arange(len(sequence))
        hidden = model(sequence, slots, causal([len(sequence)]))
        alone.append(token_logprobs(model, hidden, sequence, slots - 1, slots[5:], heat)[0])
    want = torch.cat(alone)
    torch.testing.assert_close(packed, want, rtol=0, atol=1e-10)
    upstream = torch.randn(9, dtype=torch.float64)
    for g, w in zip(
        torch.autograd.grad(packed, parameters, upstream),
        torch.autograd.grad(want, parameters, upstream),
        strict=True,
    ):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("chunk")
def test_deterministic_algorithms_are_enough(model: Transformer) -> None:
    """Every operation has a deterministic form, and the same step twice is the same to the bit."""
    attend = PackedAttention(torch.tensor([0, 5, 8, 12]), torch.tensor([True, False, False]))
    tokens = torch.arange(12) % 5  # repeated, so that the embedding's gradient accumulates
    positions = torch.cat([torch.arange(8), torch.arange(5, 9)])
    before = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 4, 8, 9, 10])

    def gradients() -> list[Tensor]:
        hidden = model(tokens, positions, attend)
        heat = torch.full((12,), 0.9)
        both = token_logprobs(model, hidden, tokens, before, torch.arange(5, 12), heat)
        return list(torch.autograd.grad(sum(both[:2]).sum(), list(model.parameters())))

    torch.use_deterministic_algorithms(True)
    try:
        first, second = gradients(), gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
