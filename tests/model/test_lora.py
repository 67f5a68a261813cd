"""LoRA: the change beside a product is the change of its weight, in values, gradients and files."""

import json

import pytest
import torch

from burnish.errors import ModelError
from burnish.model import checkpoint, lora, peft
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.recipe import TrainConfig
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
    peft.write_adapter(lora.adapter_of(model), tmp_path, base="a/b")
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5, "a/b")
    assert config["layers_to_transform"] == [1]
    other = make(dtype=torch.float32, last=1, moved=False)
    lora.load_adapter(other, peft.read_adapter(tmp_path))
    assert torch.equal(logits(other), logits(model))
    plain = Transformer(CONFIGS["llama"]).init_weights(3)
    lora.fold(plain, peft.read_adapter(tmp_path))
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-4)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    peft.write_adapter(lora.adapter_of(make("qwen3")), tmp_path, base="b")
    adapter, wide = peft.read_adapter(tmp_path), make(moved=False)
    with pytest.raises(ModelError, match=r"does not fit: in 12 modules.*train.learn"):
        lora.load_adapter(make(modules=["q_proj"]), adapter)
    with pytest.raises(ModelError, match=r"does not fit: in 14 modules.*\[3, 16\]"):
        lora.load_adapter(make(rank=2), adapter)
    before = logits(wide)
    shape = {**vars(CONFIGS["llama"]), "d_ff": 32}
    other = Transformer(ModelConfig(**shape)).init_weights(0)
    with pytest.raises(ModelError, match=r"does not fit: in 6 modules.*model.name must be"):
        lora.fold(other, adapter)
    unknown = adapter._replace(pairs={"lm_head": adapter.pairs["model.layers.0.mlp.up_proj"]})
    with pytest.raises(ModelError, match=r"does not fit: in 1 modules.*lm_head"):
        lora.fold(wide, unknown)
    assert torch.equal(logits(wide), before)


WRITTEN = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 5,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 3,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["up_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
"""The adapter_config.json of plain LoRA, as PEFT 0.21.2 writes it."""


def written(folder, **changes):
    """An adapter whose adapter_config.json has every field of PEFT, some of them changed."""
    peft.write_adapter(lora.adapter_of(make()), folder, base="base")
    (folder / peft.CONFIG).write_text(json.dumps(WRITTEN | changes))
    return folder


ACCEPTED = [
    {},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": "mica"},
    {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
    {"init_lora_weights": False},
    {"task_type": None, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
    {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
    {"modules_to_save": [], "target_parameters": []},
    {"a_field_of_a_later_version": None, "another": False, "third": {}},
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_plain_lora_is_read_however_it_was_drawn(tmp_path, changes):
    adapter = peft.read_adapter(written(tmp_path, **changes))
    assert (adapter.rank, adapter.alpha, len(adapter.pairs)) == (3, 5.0, 14)


REFUSED = [
    ({"peft_type": "LOHA"}, "plain LoRA, got peft_type = 'LOHA'"),
    ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
    *(
        ({"init_lora_weights": kind}, f"init_lora_weights = '{kind}'.*conversion")
        for kind in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "later")
    ),
    ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens = \[1, 2\].*can't be merged"),
    ({"use_rslora": True}, "use_rslora = True"),
    ({"use_dora": True}, "use_dora = True"),
    ({"use_qalora": True}, "use_qalora = True"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"lora_bias": True}, "lora_bias = True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
    (
        {"bias": "all", "modules_to_save": ["lm_head"]},
        r"bias = 'all', modules_to_save = \['lm_head'",
    ),
    ({"bias": "lora_only"}, "bias = 'lora_only'"),
    ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
    ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    ({"megatron_config": {"a": 1}}, "megatron_config"),
    ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
    ({"corda_config": {"corda_method": "ipm"}}, "corda_config"),
    ({"lora_ga_config": {"scale": "unit"}}, "lora_ga_config"),
    ({"monteclora_config": {"num_samples": 8}}, "monteclora_config"),
    ({"kasa_config": {"beta": 1}}, "kasa_config"),
    ({"velora_config": {"scale": 1}}, "velora_config"),
    ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    ({"ensure_weight_tying": True}, "ensure_weight_tying = True"),
    ({"a_field_of_a_later_version": 2}, "a_field_of_a_later_version = 2"),
    ({"r": None}, "r = None"),
    ({"r": 0}, "r = 0"),
    ({"r": True}, "r = True"),
    ({"lora_alpha": "5"}, "lora_alpha = '5'"),
    ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_other_kinds_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        peft.read_adapter(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["[]", "{", "1", "{}", '{"peft_type": "LORA", "r": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (written(tmp_path) / peft.CONFIG).write_text(text)
    with pytest.raises(ModelError, match="not an adapter in PEFT's layout"):
        peft.read_adapter(tmp_path)


def test_a_file_without_its_pairs_is_refused(tmp_path):
    adapter = lora.adapter_of(make())
    peft.write_adapter(adapter, tmp_path, base="b")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / peft.TENSORS)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, tmp_path / peft.TENSORS)
    with pytest.raises(ModelError, match=r"missing or unknown tensors: .*up_proj.lora_B"):
        peft.read_adapter(tmp_path)
    (tmp_path / peft.TENSORS).unlink()
    with pytest.raises(ModelError, match="missing or damaged"):
        peft.read_adapter(tmp_path)


@pytest.mark.parametrize("family", ["smollm2", "qwen2.5", "qwen3"])
@pytest.mark.parametrize("last", [None, 1])
def test_peft_reads_and_writes_the_same_files(tmp_path, family, last):
    """Ours loads with PEFT, PEFT's loads here; logits agree."""
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    peer, base = families.make(family), tmp_path / "base"
    families.save(peer, base)
    model = checkpoint.load_model(base)
    lora.learn(model, TrainConfig(learn={"name": "lora", "rank": 3, "alpha": 5, "last": last}), 0)
    for _, b in lora.adapter_of(model).pairs.values():
        b.normal_(generator=torch.Generator().manual_seed(1))
    peft.write_adapter(lora.adapter_of(model), tmp_path / "ours", base=str(base))
    loaded = theirs.PeftModel.from_pretrained(peer, tmp_path / "ours").eval()
    with torch.no_grad():
        wanted = loaded(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(model).detach(), wanted, rtol=1e-4, atol=1e-3)
    loaded.save_pretrained(tmp_path / "again")
    again = checkpoint.load_model(base)
    lora.fold(again, peft.read_adapter(tmp_path / "again"))
    torch.testing.assert_close(logits(again).detach(), wanted, rtol=1e-4, atol=1e-3)


KINDS = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "eva": {"init_lora_weights": "eva"},
    "random": {"init_lora_weights": False},
    "some layers": {"layers_to_transform": [1], "target_modules": ["q_proj", "down_proj"]},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa, fast": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "alora": {"alora_invocation_tokens": [4, 1]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    "bias": {"bias": "all"},
    "bias of B": {"lora_bias": True},
    "head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 2]},
    "replicated": {"layer_replication": [[0, 2], [1, 2]]},
}
REFUSED_KINDS = {*list(KINDS)[list(KINDS).index("pissa") :]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_writes_is_merged_exactly_or_refused(tmp_path, kind):
    """Each kind of LoRA that PEFT offers, moved away from its initial values and saved by PEFT: the
    merged model has the logits of PEFT's own, or the adapter is refused."""
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    families.save(families.make("llama"), tmp_path / "base")
    settings = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6} | KINDS[kind]
    made = theirs.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = theirs.get_peft_model(families.make("llama"), made).eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=random) / 10
    model.save_pretrained(tmp_path / "adapter")
    again = theirs.PeftModel.from_pretrained(families.make("llama"), tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = again(TOKENS[None]).logits[0]
    if kind in REFUSED_KINDS:
        with pytest.raises(ModelError, match="must be plain LoRA"):
            peft.read_adapter(tmp_path / "adapter")
        return
    ours = checkpoint.load_model(tmp_path / "base")
    assert (logits(ours).detach() - wanted).abs().max() > 0.01
    lora.fold(ours, peft.read_adapter(tmp_path / "adapter"))
    torch.testing.assert_close(logits(ours).detach(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_that_peft_converted_to_plain_lora_is_merged_exactly(tmp_path, kind):
    """The remedy that the message for PiSSA and OLoRA names."""
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    families.save(families.make("llama"), tmp_path / "base")
    made = theirs.LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=4, init_lora_weights=kind
    )
    model = theirs.get_peft_model(families.make("llama"), made).eval()
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = kind
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += torch.randn(parameter.shape, generator=random) / 10
        wanted = model(TOKENS[None]).logits[0]
    model.save_pretrained(
        tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    ours = lora.fold(
        checkpoint.load_model(tmp_path / "base"), peft.read_adapter(tmp_path / "adapter")
    )
    torch.testing.assert_close(logits(ours).detach(), wanted, rtol=1e-4, atol=1e-4)
