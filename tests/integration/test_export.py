"""The files of an export: their type, their bits, their modes, and who can load them."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from burnish import api
from burnish.errors import ConfigError, ModelError
from burnish.launch import models
from burnish.runs import checkpoints

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b:02d}"} for a in range(3) for b in range(8)]
SHORT = {"batch": 8, "warmup_steps": 0, "precision": "fp32", "learning_rate": 0.05}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model from random weights whose tokens are bytes, as the recipe sums-sft trains it, and an
    adapter for it."""
    folder = tmp_path_factory.mktemp("export")
    how = {"task": {"epochs": 1}, "data": folder, "show": False}
    for name, rows in {"train": ROWS[4:], "validation": ROWS[:4]}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    first = api.sft("sums-sft", train=SHORT, out=folder / "first", **how)
    learn = {"learn": {"name": "lora", "rank": 2}}
    given = {"overrides": [f"model.name={first}"], "train": SHORT | learn, "out": folder / "second"}
    return {"model": first, "adapter": api.sft("sums-sft", **given, **how)}


@pytest.fixture
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def export(runs, kind, out, dtype="fp32"):
    """The tensors of an exported model or adapter."""
    api.export(runs[kind], out, adapter=kind == "adapter", dtype=dtype, show=False)
    files = sorted(out.rglob("*.safetensors"))
    return {(file.relative_to(out), k): v for file in files for k, v in load_file(file).items()}


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tensors_are_rounded_once(runs, tmp_path, kind, dtype):
    """An adapter is written beside its base, which is a run: both have the type."""
    whole, found = (export(runs, kind, tmp_path / name, name) for name in ("fp32", dtype))
    assert len({file for file, _ in whole}) == (2 if kind == "adapter" else 1)
    assert whole.keys() == found.keys()
    for name, tensor in whole.items():
        assert (tensor.dtype, found[name].dtype) == (torch.float32, DTYPES[dtype])
        assert torch.equal(found[name], tensor.to(DTYPES[dtype])), name
    config = tmp_path / dtype / ("base/config.json" if kind == "adapter" else "config.json")
    assert f'"dtype": "{str(DTYPES[dtype]).removeprefix("torch.")}"' in config.read_text()


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True)
def test_files_have_the_mode_that_the_umask_leaves(runs, tmp_path, umask, kind):
    export(runs, kind, tmp_path / "out")
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        most = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == most & ~umask, path


@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True)
def test_checkpoints_have_it_as_well(tmp_path, umask):
    saved = checkpoints.save_checkpoint(
        tmp_path, 1, {"a": torch.zeros(2)}, {}, score=None, keep=1, every=1
    )
    assert stat.S_IMODE(saved.stat().st_mode) == 0o666 & ~umask


def test_a_type_that_can_not_hold_the_weights_is_refused(runs, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="must be fp32 or bf16 or fp16, got 'fp8'; fp32"):
        export(runs, "model", tmp_path / "out", "fp8")
    real = models.open_run

    def large(*given):
        transformer, model = real(*given)
        transformer.embed.weight.data[0, 0] = 1e5
        return transformer, model

    monkeypatch.setattr(models, "open_run", large)
    with pytest.raises(ModelError, match=r"reach 100000, and float16 ends at 65504; .*bf16"):
        export(runs, "model", tmp_path / "out", "fp16")
    assert not list(tmp_path.iterdir())
    export(runs, "model", tmp_path / "out", "bf16")


@pytest.mark.slow
def test_the_export_answers_as_the_run(runs, tmp_path):
    export(runs, "model", tmp_path / "out")
    how = {"max_tokens": 8, "temperature": 0, "precision": "fp32", "show": False}
    answers = [api.generate("1+2=\n", model=m, **how) for m in (runs["model"], tmp_path / "out")]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_transformers_loads_a_model_whose_tokens_are_bytes(runs, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(runs, "model", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = "1+2=\n ä€"
    inputs = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False)[
        0, inputs.input_ids.shape[1] :
    ]
    how = {"max_tokens": 8, "temperature": 0, "precision": "fp32", "show": False}
    (answer,) = api.generate(prompt, model=tmp_path / "out", **how)
    assert made.tolist() == answer.token_ids
    assert tokenizer.decode(made, skip_special_tokens=True) == answer.text
    assert tokenizer.eos_token_id == 256


PRECISIONS = " in float32", " in bfloat16"
"""Ends of the line, which depend on the processor."""


@pytest.mark.slow
def test_a_run_that_is_loaded_is_told_by_its_name(runs, capsys):
    """Not by the model that it started from."""
    for run in runs.values():
        api.generate("1+2=\n", model=run, max_tokens=1)
        lines = (line.partition("] ")[2] for line in capsys.readouterr().err.splitlines())
        told = [line.rpartition(" in ")[0] for line in lines if line.endswith(PRECISIONS)]
        assert told == [f"loading {run.path}"]
