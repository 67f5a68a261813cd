"""New models, whose weights are drawn from the seed."""

import pytest

from burnish.launch.models import find_model, open_model
from burnish.recipe.models import ScratchConfig

SMALL = {"tokenizer": "bytes", "layers": 1, "width": 32, "heads": 2, "d_ff": 32}


def made(**settings):
    source = find_model(ScratchConfig(**SMALL, **settings), 0)
    return open_model(source)


def test_norms_and_the_initial_std_reach_the_model():
    plain, other = made(), made(qk_norm=True, init_std=0.2)
    assert (plain.config.family, other.config.family) == ("llama", "qwen3")
    assert plain.layers[0].q_norm is None
    assert other.layers[0].q_norm is not None
    assert plain.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert other.embed.weight.std().item() == pytest.approx(0.2, rel=0.1)
