"""A run that learns an adapter: with lag, killed and resumed, evaluated, exported, learned on."""

import json

import pytest
import torch

from burnish import api, build, config, models, preflight
from burnish.errors import BurnishError, ConfigError
from burnish.model import checkpoint, lora, peft
from burnish.model.transformer import ModelConfig, Transformer
from burnish.runs import checkpoints
from tests.conftest import byte_tokenizer
from tests.loops.test_recorder import fingerprint, stopper, tiny, without

LEARN = ["train.learn=lora", "train.learn.rank=2", "train.learn.alpha=4", "train.log_kl=true"]
SETS = [*LEARN, "objective.kl=k3", "loop.lag=1", "train.steps=3"]
SETS += [
    "objective.entropy_coefficient=0.5",
    "checkpoint.every=1",
    "validation.every=3",
    "train.learning_rate=0.05",
    "train.precision=fp32",  # in bf16 the base, which does not learn, is held and exported rounded
]

REFRESH = "objective.kl.refresh=2"


@pytest.fixture(scope="module")
def base(smollm2, tmp_path_factory):
    """A tiny model of its own files, from a run of one step."""
    folder = tmp_path_factory.mktemp("base")
    run = api.train("keywords", overrides=[*tiny(smollm2), "train.steps=1"], out=folder / "run")
    api.export(run, folder / "model")
    return folder / "model"


def sets(base, *more):
    kept = [one for one in tiny(base) if not one.startswith("model.")]
    return [f"model.name={base}", *kept, *SETS, *more]


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "run"
    return api.train("keywords", overrides=sets(base, REFRESH), out=path)


def other(path):
    """A model of another width."""
    path.mkdir()
    shape = {"vocab_size": 256, "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24}
    checkpoint.save(Transformer(ModelConfig(**shape, context=128)), path)
    byte_tokenizer().save(path)
    return path


def test_a_stopped_run_goes_on_bit_for_bit(run, base, tmp_path):
    path = tmp_path / "run"
    api.train("keywords", overrides=sets(base, REFRESH), out=path, stop=stopper(1))
    api.resume(path)
    ours, theirs = (without(fingerprint(one), "ledger.jsonl") for one in (path, run))
    assert ours == theirs  # the ledger has a line about the restart
    tensors, _ = checkpoints.load(checkpoints.latest(path))
    assert all(".lora." in name for name in tensors if name.startswith("policy."))
    assert 0 < run.metrics[1]["mismatch/logprob_max"] < 1e-4


def test_its_model_is_the_base_with_the_adapter(run, base, tmp_path):
    """Exported whole, exported as an adapter beside its base, and opened as a run: one model."""
    api.export(run, tmp_path / "whole")
    api.export(run, tmp_path / "adapter", adapter=True)
    whole = config.load("keywords", {"model": {"name": str(tmp_path / "whole")}})
    beside = {"name": str(base), "adapter": str(tmp_path / "adapter")}
    recipes = [whole, *(config.load("keywords", {"model": m}) for m in (beside, str(run)))]
    first, *others = (models.open_model(recipe).model.exchange() for recipe in recipes)
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-7)
    plain = models.open_model(config.load("keywords", {"model": str(base)})).model.exchange()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], plain[name])
    assert len({preflight.hashes(recipe)["model"] for recipe in recipes}) == 3
    said = {}
    for recipe in recipes:
        model = {"name": recipe.model.name, "adapter": recipe.model.adapter}
        said[str(model)] = api.generate("a", model=model, max_tokens=5, precision="fp32")[0]
    assert len({tuple(answer.token_ids) for answer in said.values()}) == 1


def test_an_adapter_goes_on_learning(run, base, tmp_path):
    api.export(run, tmp_path / "adapter", adapter=True)
    given = [*sets(base), f"model.adapter={tmp_path / 'adapter'}"]
    policy = models.open_policy(config.load("keywords", given)).model
    held, read = lora.adapter_of(policy), peft.read(tmp_path / "adapter")
    assert held.shapes == read.shapes
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(held.pairs[name][1], read.pairs[name][1])
    for wrong, message in [
        ("train.learn.rank=3", r"train.learn.rank = 3 must be that of model.adapter.*use 2"),
        ("train.learn.alpha=5", r"train.learn.alpha = 5 must be that of .*use 4"),
        (f"model.adapter={tmp_path}", "is no adapter in PEFT's layout"),
    ]:
        with pytest.raises(BurnishError, match=message):
            preflight.check(config.load("keywords", [*given, wrong]))
    wide = f"model.name={other(tmp_path / 'other')}"
    for learned in (given, [one for one in given if one not in LEARN]):  # learned on, or merged
        recipe = config.load("keywords", [*learned, wide])
        told = [str(problem) for problem in build.look(recipe, tmp_path / "run")[2]]
        assert len(told) == 1
        assert "the adapter does not fit: 14 modules" in told[0]
    second = api.train("keywords", overrides=[*given, "train.steps=1"], out=tmp_path / "second")
    assert second.metrics[1]["kl/initial_k1"] == pytest.approx(0, abs=1e-6)
    assert abs(second.metrics[1]["kl/reference_k1"]) > 1e-4


def test_a_run_without_an_adapter_exports_none(base, tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter: train\.learn is 'all'"):
        api.export(base.parent / "run", tmp_path / "out", adapter=True)


def opened(name, adapter=None):
    recipe = config.load("keywords", {"model": {"name": str(name), "adapter": adapter}})
    return models.open_model(recipe).model.exchange()


@pytest.mark.parametrize("origin", ["directory", "lora", "full", "scratch"])
def test_an_exported_adapter_names_a_base_that_others_load(run, base, tmp_path, origin, smollm2):
    """Of a run from a model directory, from a run with LoRA, from a run that learned all weights,
    and from random weights: the base that adapter_config.json names is a directory in Hugging
    Face's layout, and with the adapter it is the run's model."""
    first = {"lora": run.path, "full": base.parent / "run"}.get(origin)
    given = [*tiny(smollm2), *SETS] if first is None else sets(first)
    made = run
    if origin != "directory":
        made = api.train("keywords", overrides=[*given, "train.steps=1"], out=tmp_path / "run")
    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    api.export(made, adapter, adapter=True)
    api.export(made, whole)
    named = json.loads((adapter / peft.CONFIG).read_text())["base_model_name_or_path"]
    assert named == str(base if origin == "directory" else adapter / "base")
    merged, beside, before = opened(whole), opened(named, str(adapter)), opened(named)
    assert merged.keys() == beside.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(beside[name], tensor, rtol=0, atol=1e-6)
    assert any(not torch.equal(before[name], merged[name]) for name in merged)


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_the_adapter_of_a_run_that_began_from_a_run(run, base, tmp_path):
    """By AutoPeftModel, which reads the base's name from adapter_config.json."""
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    from burnish.model.attention import causal

    made = api.train("keywords", overrides=[*sets(run.path)], out=tmp_path / "second")
    api.export(made, tmp_path / "adapter", adapter=True)
    loaded = theirs.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ours = models.open_run(made.recipe, checkpoints.choose(made.path, "best"))[0].model
    tokens, places = torch.arange(40, 52), torch.arange(12)
    with torch.no_grad():
        wanted = ours.logits(ours(tokens, places, causal([12])))
        plain = checkpoint.load(base)
        began = plain.logits(plain(tokens, places, causal([12])))
        torch.testing.assert_close(loaded(tokens[None]).logits[0], wanted, rtol=1e-4, atol=1e-4)
    assert (began - wanted).abs().max() > 0.01


def test_the_default_model_is_named_by_its_directory(monkeypatch):
    recipe = config.load("keywords", [*LEARN])
    monkeypatch.setattr(models.hub, "resolve", lambda name: models.hub.default_directory())
    assert recipe.model.name == models.hub.DEFAULT
    assert models.named_base(recipe) == str(models.hub.default_directory())
    assert models.named_base(config.load("keywords", [*LEARN, "model.name=hf:a/b"])) == "a/b"
