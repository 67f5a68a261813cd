"""Checkpoints of every family: the same logits as transformers, there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, ROPES, make, save
from safetensors.torch import load_file, save_file

from burnish.errors import ModelError
from burnish.model import checkpoint
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Transformer

TOKENS = torch.randint(96, (40,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def ours(model: Transformer) -> torch.Tensor:
    n = len(TOKENS)
    return model.logits(model(TOKENS, torch.arange(n), causal([n])))


@torch.no_grad()
def theirs(model: Any) -> torch.Tensor:
    return model(TOKENS[None]).logits[0]


def reload(directory: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@pytest.mark.parametrize(
    ("family", "rope"), [*((family, "default") for family in FAMILIES), ("llama", "llama3")]
)
def test_logits_and_round_trip(family: str, rope: str, tmp_path: Path) -> None:
    peer = make(family, rope)
    model = checkpoint.load_model(save(peer, tmp_path / "theirs"))
    torch.testing.assert_close(ours(model), theirs(peer), rtol=0, atol=1e-5)
    checkpoint.save_model(model, tmp_path / "ours", source=tmp_path / "theirs")
    again = reload(tmp_path / "ours")
    assert torch.equal(theirs(again), theirs(peer))
    state, back = peer.state_dict(), again.state_dict()
    assert state.keys() == back.keys()
    assert all(torch.equal(state[name], back[name]) for name in state)
    assert torch.equal(ours(checkpoint.load_model(tmp_path / "ours")), ours(model))


@pytest.mark.parametrize("rope", ROPES)
def test_older_layout_of_rope_settings(rope: str, tmp_path: Path) -> None:
    peer = make("llama", rope)
    directory = save(peer, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    (directory / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(
        ours(checkpoint.load_model(directory)), theirs(peer), rtol=0, atol=1e-5
    )


def test_sharded_safetensors(tmp_path: Path) -> None:
    peer = make("qwen3")
    save(peer, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        ours(checkpoint.load_model(tmp_path)), theirs(peer), rtol=0, atol=1e-5
    )
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-\d+.safetensors is missing"):
        checkpoint.load_model(tmp_path)


def test_precision_is_chosen_at_loading_and_written(tmp_path: Path) -> None:
    peer = make("qwen2")
    model = checkpoint.load_model(
        save(peer, tmp_path / "theirs"), dtype=torch.bfloat16, fp32_head=True
    )
    assert ours(model).dtype == torch.float32
    checkpoint.save_model(model, tmp_path / "ours")
    again = reload(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, peer.lm_head.weight.bfloat16())


def test_state_is_a_view_and_loading_it_is_all_or_nothing() -> None:
    config = ModelConfig(vocab_size=9, n_layers=1, d_model=8, n_heads=2, d_ff=12)
    model, other = (Transformer(config).init_weights(seed) for seed in (0, 1))
    state = model.exchange()
    assert all(not tensor.requires_grad for tensor in state.values())
    checkpoint.load_hf_state(model, other.exchange())
    assert all(torch.equal(state[k], v) for k, v in other.exchange().items())
    broken = {k: v + 1 for k, v in state.items()}
    del broken["model.norm.weight"]
    with pytest.raises(ModelError, match=r"missing model.norm.weight .8.; not expected nothing"):
        checkpoint.load_hf_state(model, broken)
    assert all(torch.equal(state[k], v) for k, v in other.exchange().items())


def damaged(directory: Path, change: Any) -> Path:
    save(make("smollm2"), directory)
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("model.layers.1.mlp.up_proj.weight"),
            "missing model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda state: state.update({"model.layers.2.extra.weight": torch.zeros(1)}),
            "missing nothing; not expected model.layers.2.extra.weight",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(5)}),
            r"missing model.norm.weight \[32\]; not expected model.norm.weight \[5\]",
        ),
        (
            lambda state: state.update({"lm_head.weight": torch.zeros(96, 32)}),
            "lm_head.weight differs from the embedding",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        checkpoint.load_model(damaged(tmp_path, change))


def test_harmless_extras_are_accepted(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    model = checkpoint.load_model(damaged(tmp_path, change))
    torch.testing.assert_close(ours(model), theirs(make("smollm2")), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"mlp_bias": True, "hidden_act": "gelu"}, "hidden_act = 'gelu', mlp_bias = True"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "got 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "beta_fast": 32.0}}, "got 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "'llama3' without high_freq_factor, original_max_position_embeddings",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(make("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        checkpoint.load_model(tmp_path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        checkpoint.load_model(tmp_path)
    save(make("llama"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is missing or damaged"):
        checkpoint.load_model(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors files only, never from pickles"):
        checkpoint.load_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        checkpoint.load_model(tmp_path)
