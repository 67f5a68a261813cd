"""LoRA: the change beside a product is the change of its weight, in values, gradients and files."""

import json

import pytest
import torch

from burnish.errors import ModelError
from burnish.model import checkpoint, lora, peft
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Transformer
from burnish.schema.recipe import TrainConfig
from tests.model import families

CONFIGS = {
    family: ModelConfig(
        vocab_size=37,
        n_layers=2,
        d_model=16,
        n_heads=4,
        d_ff=24,
        n_kv_heads=2,
        init_std=0.3,
        family=family,
    )
    for family in ("llama", "qwen2", "qwen3")
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def make(family="llama", dtype=torch.float64, *, moved=True, **chosen):
    """A model with an adapter of rank 3 and scale 5/3; moved: B is not 0."""
    model = Transformer(CONFIGS[family]).init_weights(3).to(dtype)
    train = TrainConfig(learn={"name": "lora", "rank": 3, "alpha": 5, **chosen})
    lora.learn(model, train, seed=7)
    if moved:
        random = torch.Generator().manual_seed(1)
        for _, (_, b) in sorted(lora.adapter_of(model).pairs.items()):
            b.copy_(torch.randn(b.shape, generator=random, dtype=torch.float64) / 4)
    return model


def logits(model):
    places = torch.arange(len(TOKENS))
    return model.logits(model(TOKENS, places, causal([len(TOKENS)], places.device)))


CHOSEN = [{}, {"modules": ["v_proj", "up_proj"]}, {"modules": ["k_proj", "down_proj"], "last": 1}]


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_beside_the_weights_is_in_the_weights(family, chosen):
    """W x + s B A x = (W + s B A) x, of each of Hugging Face's modules in a fused product."""
    beside, plain = make(family, **chosen), Transformer(CONFIGS[family]).init_weights(3).double()
    merged = make(family, **chosen)
    names = {f"{name}.weight" for name in lora.adapter_of(merged).pairs}
    modules, layers = chosen.get("modules", [None] * 7), chosen.get("last", 2)
    assert len(names) == len(modules) * layers
    lora.fold(merged)
    assert lora.adapter_of(merged) is None
    torch.testing.assert_close(logits(beside), logits(merged), rtol=0, atol=1e-10)
    assert (logits(beside) - logits(plain)).abs().max() > 0.01
    before, after = plain.exchange(), merged.exchange()
    assert {name for name in before if not torch.equal(before[name], after[name])} == names


def test_an_adapter_that_has_not_learned_changes_no_bit():
    model, plain = make(moved=False), Transformer(CONFIGS["llama"]).init_weights(3).double()
    assert lora.starts_at_base(model)
    assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(lora.without(make())), logits(plain))
    assert not lora.starts_at_base(make())


def test_a_is_drawn_from_the_seed_within_its_bound():
    first, again = lora.adapter_of(make()), lora.adapter_of(make())
    name = "model.layers.1.mlp.down_proj"  # d = 24
    a, _ = first.pairs[name]
    assert torch.equal(a, again.pairs[name][0])
    assert a.shape == (3, 24)
    assert 0.9 / 24**0.5 < a.abs().max() <= 1 / 24**0.5
    other = Transformer(CONFIGS["llama"]).init_weights(3)
    lora.learn(other, TrainConfig(learn={"name": "lora", "rank": 3}), seed=8)
    assert not torch.equal(a.float(), lora.adapter_of(other).pairs[name][0])


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_through_the_merged_weights(recompute):
    """With G = dL/dW of the merged model and W = W0 + s B A: dL/dB = s G Aᵀ, dL/dA = s Bᵀ G."""
    beside, merged = make(), lora.fold(make()).learn()
    beside.recompute = recompute
    for model in (beside, merged):
        logits(model).square().mean().backward()
    for weight in merged.parameters():
        weight.data = weight.grad  # so that `exchange` cuts gradients as it cuts weights
    whole, scale = merged.exchange(), 5 / 3
    products = {name: module for name, module, _ in lora._loras(beside)}
    for name, (a, b) in lora.adapter_of(beside).pairs.items():
        *_, index, group, part = name.split(".")
        product = next(p for p, names in lora.HF_MODULES.items() if f"{group}.{part}" in names)
        own = products[f"layers.{index}.{product}"].lora
        gradient = whole[f"{name}.weight"]
        torch.testing.assert_close(own.b[part].grad, scale * gradient @ a.T, rtol=0, atol=1e-12)
        torch.testing.assert_close(own.a[part].grad, scale * b.T @ gradient, rtol=0, atol=1e-12)
    learning = [name for name, p in beside.named_parameters() if p.requires_grad]
    assert all(".lora." in name for name in learning)
    assert all(p.grad is None for name, p in beside.named_parameters() if name not in learning)


def test_weights_are_merged_in_fp32_and_rounded_once():
    """W = 1 in bf16, whose next number is 1 + 1/128; alpha / rank = 2 and A = 3/256, so the sum is
    1 + 6/256 · B. For B = 171/1024 that is 1.003914, which is above 1 + 1/256 and rounds up; for
    B = 170.6/1024 it is 1.003905 and rounds down. B in bf16 would be 171/1024 both times."""
    model = Transformer(CONFIGS["llama"]).to(torch.bfloat16)
    view = model.exchange()["model.layers.0.self_attn.v_proj.weight"]
    view.fill_(1)
    a, b = torch.full((1, 16), 3 / 256), torch.full((8, 1), 171 / 1024)
    b[1] = 170.6 / 1024
    adapter = lora.Adapter(1, 2.0, {"model.layers.0.self_attn.v_proj": (a, b)})
    (found,) = lora.merged(model, adapter).values()
    assert found.dtype == torch.bfloat16
    assert found[:2, 0].tolist() == [1 + 1 / 128, 1.0]
    assert bool((view == 1).all())


def test_files_are_read_as_they_were_written(tmp_path):
    model = make(dtype=torch.float32, last=1)
    peft.write(lora.adapter_of(model), tmp_path, base="hf:a/b")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5, "a/b")
    assert config["layers_to_transform"] == [1]
    other = make(dtype=torch.float32, last=1, moved=False)
    lora.fill(other, peft.read(tmp_path))
    assert torch.equal(logits(other), logits(model))
    plain = Transformer(CONFIGS["llama"]).init_weights(3)
    lora.fold(plain, peft.read(tmp_path))
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    peft.write(lora.adapter_of(make("qwen3")), tmp_path, base="b")
    adapter, wide = peft.read(tmp_path), make(moved=False)
    with pytest.raises(ModelError, match=r"does not fit: 12 modules.*train.learn"):
        lora.fill(make(modules=["q_proj"]), adapter)
    with pytest.raises(ModelError, match=r"does not fit: 14 modules.*\[3, 16\]"):
        lora.fill(make(rank=2), adapter)
    before = logits(wide)
    shape = {**vars(CONFIGS["llama"]), "d_ff": 32}
    other = Transformer(ModelConfig(**shape)).init_weights(0)
    with pytest.raises(ModelError, match=r"does not fit: 6 modules.*model.name must be"):
        lora.fold(other, adapter)
    unknown = adapter._replace(pairs={"lm_head": adapter.pairs["model.layers.0.mlp.up_proj"]})
    with pytest.raises(ModelError, match=r"does not fit: 1 modules.*lm_head"):
        lora.fold(wide, unknown)
    assert torch.equal(logits(wide), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "plain LoRA, got peft_type = 'LOHA'"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"bias": "all", "modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\], bias"),
        ({"r": None}, "no adapter in PEFT's layout"),
    ],
)
def test_other_kinds_are_refused(tmp_path, changes, message):
    peft.write(lora.adapter_of(make()), tmp_path, base="b")
    config = json.loads((tmp_path / peft.CONFIG).read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / peft.CONFIG).write_text(json.dumps(kept))
    with pytest.raises(ModelError, match=message):
        peft.read(tmp_path)


def test_a_file_without_its_pairs_is_refused(tmp_path):
    adapter = lora.adapter_of(make())
    peft.write(adapter, tmp_path, base="b")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / peft.TENSORS)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, tmp_path / peft.TENSORS)
    with pytest.raises(ModelError, match=r"lack or are not known: .*up_proj.lora_B"):
        peft.read(tmp_path)
    (tmp_path / peft.TENSORS).unlink()
    with pytest.raises(ModelError, match="missing or damaged"):
        peft.read(tmp_path)


@pytest.mark.parametrize("family", ["smollm2", "qwen2.5", "qwen3"])
@pytest.mark.parametrize("last", [None, 1])
def test_peft_reads_and_writes_the_same_files(tmp_path, family, last):
    """Ours loads with PEFT, PEFT's loads here; logits agree."""
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    peer, base = families.make(family), tmp_path / "base"
    families.save(peer, base)
    model = checkpoint.load(base)
    lora.learn(model, TrainConfig(learn={"name": "lora", "rank": 3, "alpha": 5, "last": last}), 0)
    for _, b in lora.adapter_of(model).pairs.values():
        b.normal_(generator=torch.Generator().manual_seed(1))
    peft.write(lora.adapter_of(model), tmp_path / "ours", base=str(base))
    loaded = theirs.PeftModel.from_pretrained(peer, tmp_path / "ours").eval()
    with torch.no_grad():
        wanted = loaded(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(model).detach(), wanted, rtol=1e-4, atol=1e-3)
    loaded.save_pretrained(tmp_path / "again")
    again = checkpoint.load(base)
    lora.fold(again, peft.read(tmp_path / "again"))
    torch.testing.assert_close(logits(again).detach(), wanted, rtol=1e-4, atol=1e-3)
