"""A run that learns an adapter: with lag, killed and resumed, evaluated, exported, learned on."""

import json

import pytest
import torch

from burnish import api
from burnish.errors import BurnishError, ConfigError
from burnish.launch import models
from burnish.launch.inputs import hash_inputs
from burnish.launch.resolve import resolve, survey
from burnish.model import checkpoint, lora, peft
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import load_recipe
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
    *("train.schedule=cosine", "train.final_share=0.1", "train.weight_decay=0.2"),
    *("rollout.repetition_penalty=1.2", "rollout.min_p=0.001", "rollout.truncated=true"),
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
    checkpoint.save_model(Transformer(ModelConfig(**shape, context=128)), path)
    byte_tokenizer().save(path)
    return path


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(run, base, tmp_path):
    path = tmp_path / "run"
    api.train("keywords", overrides=sets(base, REFRESH), out=path, stop=stopper(1))
    api.resume(path)
    ours, theirs = (without(fingerprint(one), "ledger.jsonl") for one in (path, run))
    assert ours == theirs  # the ledger has a line about the restart
    tensors, _ = checkpoints.load_checkpoint(checkpoints.latest(path))
    assert all(".lora." in name for name in tensors if name.startswith("policy."))
    assert 0 < run.metrics[1]["mismatch/logprob_max"] < 1e-4


@pytest.mark.slow
def test_its_model_is_the_base_with_the_adapter(run, base, tmp_path):
    """Exported whole, exported as an adapter beside its base, and opened as a run: one model."""
    api.export(run, tmp_path / "whole")
    api.export(run, tmp_path / "adapter", adapter=True)
    whole = load_recipe("keywords", {"model": {"name": str(tmp_path / "whole")}})
    beside = {"name": str(base), "adapter": str(tmp_path / "adapter")}
    recipes = [whole, *(load_recipe("keywords", {"model": m}) for m in (beside, str(run)))]
    first, *others = (models.open_model(resolve(recipe).source).exchange() for recipe in recipes)
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-7)
    plain = models.open_model(
        resolve(load_recipe("keywords", {"model": str(base)})).source
    ).exchange()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], plain[name])
    assert (
        len(
            {
                hash_inputs(recipe.task, {}, resolve(recipe).source, {})["model"]
                for recipe in recipes
            }
        )
        == 3
    )
    said = {}
    for recipe in recipes:
        model = {"name": recipe.model.name, "adapter": recipe.model.adapter}
        said[str(model)] = api.generate("a", model=model, max_tokens=5, precision="fp32")[0]
    assert len({tuple(answer.token_ids) for answer in said.values()}) == 1


def test_an_adapter_goes_on_learning(run, base, tmp_path):
    api.export(run, tmp_path / "adapter", adapter=True)
    given = [*sets(base), f"model.adapter={tmp_path / 'adapter'}"]
    found = resolve(load_recipe("keywords", given))
    policy = models.open_policy(found.source, found.recipe.train, found.recipe.seed)
    held, read = lora.adapter_of(policy), peft.read_adapter(tmp_path / "adapter")
    assert held.shapes == read.shapes
    name = "model.layers.1.self_attn.q_proj"
    assert torch.equal(held.pairs[name][1], read.pairs[name][1])
    for wrong, message in [
        ("train.learn.rank=3", r"train.learn.rank = 3 must equal the rank of model.adapter.*use 2"),
        ("train.learn.alpha=5", r"train.learn.alpha = 5 must equal the alpha of .*use 4"),
        (f"model.adapter={tmp_path}", "is not an adapter in PEFT's layout"),
    ]:
        with pytest.raises(BurnishError, match=message):
            resolve(load_recipe("keywords", [*given, wrong]))
    wide = f"model.name={other(tmp_path / 'other')}"
    for learned in (given, [one for one in given if one not in LEARN]):  # learned on, or merged
        recipe = load_recipe("keywords", [*learned, wide])
        told = [str(problem) for problem in survey(recipe, tmp_path / "run").problems]
        assert len(told) == 1
        assert "the adapter does not fit: in 14 modules" in told[0]
    second = api.train("keywords", overrides=[*given, "train.steps=1"], out=tmp_path / "second")
    assert second.metrics[1]["kl/initial_k1"] == pytest.approx(0, abs=1e-6)
    assert abs(second.metrics[1]["kl/reference_k1"]) > 1e-4


def test_a_run_without_an_adapter_exports_none(base, tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter: train\.learn is 'all'"):
        api.export(base.parent / "run", tmp_path / "out", adapter=True)


def opened(name, adapter=None):
    recipe = load_recipe("keywords", {"model": {"name": str(name), "adapter": adapter}})
    return models.open_model(resolve(recipe).source).exchange()


@pytest.mark.parametrize(
    "origin",
    [
        "directory",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("lora", "full", "scratch")),
    ],
)
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
    ours = models.open_run(
        models.find_run(made.recipe, made.path), checkpoints.find_checkpoint(made.path, "best")
    )[0]
    tokens, places = torch.arange(40, 52), torch.arange(12)
    with torch.no_grad():
        wanted = ours.logits(ours(tokens, places, causal([12])))
        plain = checkpoint.load_model(base)
        began = plain.logits(plain(tokens, places, causal([12])))
        torch.testing.assert_close(loaded(tokens[None]).logits[0], wanted, rtol=1e-4, atol=1e-4)
    assert (began - wanted).abs().max() > 0.01


def test_a_base_model_is_named_by_its_directory_or_on_the_hub(tmp_path):
    def named(name, seed=None):
        source = models.ModelSource(name, tmp_path, None, None, False, seed, None)
        return models.loadable_name(source)

    assert named("smollm2-135m") == str(tmp_path)
    assert named("hf:a/b") == "a/b"
    assert named("scratch", seed=1) is None
