"""The model made from scratch: sizes, seeds, options and what is refused."""

from dataclasses import replace

import pytest
import torch

from burnish.errors import ModelError
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Rope, Transformer

TINY = ModelConfig(vocab_size=37, n_layers=2, d_model=16, n_heads=4, d_ff=24, n_kv_heads=2)


def run(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    n = len(tokens)
    return model.logits(model(tokens, torch.arange(n), causal([n])))


def test_from_scratch_size_and_shapes() -> None:
    model = Transformer(ModelConfig(vocab_size=1000)).init_weights(0)
    layer = 4 * 512 * 512 + 3 * 512 * 1344 + 2 * 512
    assert sum(p.numel() for p in model.parameters()) == 4 * layer + 1000 * 512 + 512
    assert run(model, torch.arange(7)).shape == (7, 1000)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_same_seed_makes_the_same_model(family: str) -> None:
    config = replace(TINY, family=family, tied=False)
    one, two, other = (Transformer(config).init_weights(seed) for seed in (1, 1, 2))
    tokens = torch.tensor([3, 1, 4, 1, 5])
    assert torch.equal(run(one, tokens), run(two, tokens))
    assert not torch.equal(run(one, tokens), run(other, tokens))
    half = Transformer(config).to(torch.bfloat16).init_weights(1)
    assert torch.equal(half.embed.weight, one.embed.weight.bfloat16())


def test_residual_projections_start_smaller() -> None:
    model = Transformer(ModelConfig(vocab_size=64, n_layers=8)).init_weights(0)
    for name, std in {"qkv": 0.02, "gate_up": 0.02, "out": 0.005, "down": 0.005}.items():
        weight = model.get_parameter(f"layers.3.{name}.weight")
        assert weight.std().item() == pytest.approx(std, rel=0.02)


def test_fp32_head() -> None:
    model = Transformer(replace(TINY, fp32_head=True)).init_weights(0).to(torch.bfloat16)
    hidden = torch.randn(3, 16).bfloat16()
    got = model.logits(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, hidden.float() @ model.embed.weight.float().T)
    assert Transformer(TINY).to(torch.bfloat16).logits(hidden).dtype == torch.bfloat16


def test_positions_are_relative() -> None:
    """Shifting every position changes nothing; that is what RoPE is for."""
    model = Transformer(TINY).init_weights(0).double()
    tokens, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(5)
    base = model(tokens, positions, causal([5]))
    torch.testing.assert_close(model(tokens, positions + 9, causal([5])), base, rtol=0, atol=1e-6)
    assert not torch.allclose(model(tokens, positions * 2, causal([5])), base, atol=1e-4)


@pytest.mark.parametrize(
    "change", [{"n_kv_heads": 3}, {"n_heads": 3, "n_kv_heads": 3}, {"head_dim": 5}]
)
def test_impossible_sizes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="heads must divide a width of 16 into even widths"):
        replace(TINY, **change)


def test_impossible_rope_is_refused() -> None:
    with pytest.raises(ModelError, match="must be default or llama3, got 'longrope'"):
        Rope.from_hf({"rope_parameters": {"rope_type": "longrope"}})


def test_hf_config_round_trip() -> None:
    rope = Rope(500.0, (2.0, 1.0, 4.0, 32))
    config = replace(TINY, family="qwen3", head_dim=8, rope=rope)
    assert ModelConfig.from_hf(config.to_hf()) == config
