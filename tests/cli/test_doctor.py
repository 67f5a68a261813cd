"""The machine and the recipes as `burnish doctor` and `burnish plan` tell of them."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from burnish.cli import doctor, main
from burnish.launch import preflight
from burnish.machine import hardware
from burnish.recipe.costs import Size, estimate_seconds
from burnish.recipe.load import list_recipes, load_recipe
from burnish.recipe.plan import make_plan
from burnish.types import Rates

SMOLLM2 = Size(parameters=134_515_008, cached=11_520, context=8192, longest_prompt=45)
XEON = Rates("cpu", "fp32", 150.0, 228.0)
"""Two cores with AVX-512, as they were measured."""


def test_the_seconds_of_a_keyword_step_by_hand():
    """128 responses of 0.6 × 64 tokens to 16 prompts of 45. They are sampled once; the reference
    reads them, the initial model and the step before read 8 each, and a gradient takes as long as
    three passes. Of half of the layers the lower half runs once and the upper half as before. A
    token takes 0.1 ms beside that, when it is sampled and when it is learned."""
    rates = Rates("cpu", "fp32", 100.0, 200.0)
    few, many = 100e9 * 0.65, 200e9 * 0.7

    def told(*overrides):
        sets = ["train.steps=1", "task.validation_prompts=10", *overrides]
        return estimate_seconds(load_recipe("keywords", sets), SMOLLM2._replace(layers=30), rates)

    own, held_out = 128 * 0.6 * 64 + 16 * 45, 10 * (45 + 0.6 * 96)
    step = 2 * 134_515_008 * own
    sampled = (step + 2 * 2 * 134_515_008 * held_out) / few + 1e-4 * (2 * own + 2 * held_out)
    assert told() == pytest.approx(sampled + (1.125 + 3) * step / many)
    upper = 0.5 + 0.5 * (1.125 + 3)
    assert told("train.learn.name=layers", "train.learn.last=15") == pytest.approx(
        sampled + upper * step / many
    )


def test_the_estimate_is_within_a_factor_of_two_of_a_measured_step():
    """demo-small on two AVX-512 cores: generate 10 s, score 8, learn 12."""
    recipe = load_recipe("demo-small", ["train.steps=100", "task.validation_prompts=1"])
    told = estimate_seconds(recipe, SMOLLM2._replace(layers=30), XEON) / 100
    assert 30 / 2 < told < 30 * 2


def test_rows_say_how_long_a_supervised_run_is(tmp_path):
    file = tmp_path / "rows.jsonl"
    recipe = load_recipe("sft", [f"task.train={file}", "task.epochs=2"])
    assert estimate_seconds(recipe, SMOLLM2, XEON) == 0
    file.write_text(json.dumps({"prompt": "a", "answer": "b"}) * 100)
    tokens = 2 * file.stat().st_size / 4
    assert estimate_seconds(recipe, SMOLLM2, XEON) == pytest.approx(
        tokens * (6 * 134_515_008 / (228e9 * 0.7) + 1e-4)
    )


def test_the_estimate_of_a_tiny_model_is_within_a_factor_of_two():
    """sums on two AMX cores: 200 steps in 141 s, which the products alone would take 2 s for."""
    size = SMOLLM2._replace(parameters=120_000, layers=2, longest_prompt=9)
    told = estimate_seconds(load_recipe("sums"), size, XEON)
    assert 141 / 2 < told < 141 * 2


def test_a_plan_tells_the_time(tmp_path):
    recipe = load_recipe("keywords")
    assert "time" not in dict(make_plan(recipe, tmp_path, SMOLLM2)[-1][1])
    lines = dict(make_plan(recipe, tmp_path, SMOLLM2, XEON)[-1][1])
    assert re.fullmatch(r"about \d+ minutes", lines["time"])
    missing = dict(make_plan(recipe, tmp_path, None, XEON)[-1][1])
    assert missing["time"] == "not known before its model and rows are here"


def test_a_plan_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main.app, ["plan", "arithmetic"])
    assert done.exit_code == 1, done.output  # the run can't start
    said = " ".join(done.output.split())
    assert "the recipe can't run yet" in said
    assert "make it with: burnish data sums; burnish sft arithmetic-sft" in said
    assert not list(tmp_path.iterdir())


def flags(settings):
    return [flag for setting in settings for flag in ("--set", setting)]


def planned(*arguments):
    done = CliRunner().invoke(main.app, ["plan", *arguments])
    assert done.exit_code == ("the recipe can't run yet" in done.output), done.output
    return " ".join(done.output.split())


def test_a_plan_says_what_does_not_fit_and_what_is_not_there(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "measure_rates", lambda *a, **k: XEON)
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    small = [f"model.{key}={value}" for key, value in size.items()]
    small += ["train.steps=1", "model.name=scratch", f"model.tokenizer={smollm2}"]
    small += ["task.validation_prompts=2"]
    given = flags(small)
    assert "the recipe can't run yet" not in planned("keywords", *given)
    said = planned("keywords", *given, "--set", "engine.kv_mb=100000000", "--set", "device=cpu")
    assert "the run needs 104857.6 GB of cache" in said
    if not torch.cuda.is_available():
        said = planned("keywords", *given, "--set", "device=cuda:7")
        assert "lacks device = 'cuda:7' but torch finds no CUDA device; use 'auto'" in said
    rows = [{"prompt": "Say it."}] * 20 + [{"prompt": "Say it. " * 90}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["task.name=files", "task.train=rows.jsonl", "task.reward=none.py:f"]
    given = flags([*small[:-1], *own])
    assert "there is no file" in planned("keywords", *given)
    Path("none.py").write_text("def f(response, row):\n    return 1.0\n")
    said = planned("keywords", *given)
    assert "rows.jsonl, line 21: the prompt has" in said
    assert "the model's context of 128 tokens leaves 127" in said
    Path("rows.jsonl").write_text("{nonsense\n")
    assert "rows.jsonl, line 1: not JSON" in planned("keywords", *given)
    (tmp_path / "full" / "of").mkdir(parents=True)
    assert "must be new or empty, but it contains of" in planned("sort", "--out", "full")


@pytest.mark.parametrize("wanted", [0.5, 1.0, 1.1])
def test_the_doctor_tells_if_the_machine_is_busy(wanted, tmp_path, monkeypatch):
    cores = os.cpu_count()
    monkeypatch.setattr(hardware, "measure_rates", lambda *a, precision, **k: XEON)
    monkeypatch.setattr(os, "getloadavg", lambda: (wanted * cores, 0.0, 0.0))
    monkeypatch.setattr(doctor, "list_recipes", list)
    (_, lines), *_ = doctor.examine(tmp_path)
    said = [text for name, text in lines if name == "load"]
    assert bool(said) == (wanted > 1)
    assert all(f"{wanted * cores:.1f} processes wanted the {cores} cores" in text for text in said)


def test_the_doctor_tells_of_machine_parts_and_recipes(smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "measure_rates", lambda *a, precision, **k: XEON)
    for module in (doctor, preflight):
        monkeypatch.setattr(module, "is_installed", lambda extra: extra != "math")
    sections = {title: dict(lines) for title, lines in doctor.examine()}
    assert list(sections) == ["machine", "optional parts", "recipes"]
    told = sections["machine"]
    assert told["bf16 products"].endswith("228 while learning (computed in fp32)")
    assert "free" in told["memory"]
    assert str(tmp_path) in told["disk"]
    assert sections["optional parts"]["math"].startswith("install it: pip install 'burnish[math]'")
    assert sections["optional parts"]["gym"].startswith("installed")
    recipes = sections["recipes"]
    assert list(recipes) == list_recipes()
    assert recipes["sort"] == "about a minute, ready"
    assert "minutes, ready" in recipes["keywords"]
    assert recipes["gsm8k"].count("lacks: ") == 3
    assert "days" in recipes["gsm8k"]  # of the model that its first run begins with
    assert "lacks: there are no prompts" in recipes["sft"]
    assert not list(Path(tmp_path).iterdir())
