"""What a script or a notebook calls: the names at the top, a run that is read, recipes as dicts."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import burnish
from burnish import api
from burnish.console.progress import showing
from burnish.errors import BurnishError, ConfigError, DataError, ModelError, RunError
from burnish.launch.resolve import resolve
from burnish.model import checkpoint, hub
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import format_toml, load_recipe, read_recipe_table, recipe_to_toml
from tests.loops.test_recorder import fingerprint

PUBLIC = ["Run", "batched", "evaluate", "export", "generate", "resume", "sft", "train"]
SHORT = {"steps": 3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(smollm2, **more):
    """Sections that make the keyword recipe small."""
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    return {
        "model": {"name": "scratch", "tokenizer": smollm2, **size},
        "task": {"validation_prompts": 2},
        "rollout": {"batch": 8, "group_size": 4, "max_tokens": 4},
        "train": {"steps": 2, "batch": 8},
        "device": "cpu",
    } | more


@pytest.fixture(scope="module")
def language(smollm2, tmp_path_factory):
    """A run of a small language model, to be read by several tests."""
    return burnish.train("keywords", out=tmp_path_factory.mktemp("runs") / "run", **small(smollm2))


def test_the_names_at_the_top():
    assert sorted(burnish.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(burnish, name).__doc__, name
    assert set(PUBLIC) <= set(dir(burnish))
    with pytest.raises(AttributeError, match="trian"):
        _ = burnish.trian


def test_importing_is_light():
    heavy = ("torch", "pandas", "rich", "pydantic", "numpy")
    code = f"import sys, burnish; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_is_read_from_its_directory(tmp_path, monkeypatch):
    noted = {"note": "<why>", "tags": ["a"], "out": tmp_path / "sort-1"}
    run = burnish.train("sort", train=SHORT, checkpoint={"every": 1}, **noted)
    assert (run.note, run.tags) == ("<why>", ("a",))
    html = run._repr_html_()
    assert "finished, 3 of 3 steps" in html
    assert "&lt;why&gt;" in html
    assert "held out" in html
    assert run.path == Path(run) == tmp_path / "sort-1"
    assert f"{run}" == str(run.path)
    assert (run / "metrics.jsonl").is_file()
    asked = ["train.steps=3", "checkpoint.every=1", "train.precision=fp32"]
    assert run.recipe == load_recipe("sort", asked)
    assert [row["step"] for row in run.metrics] == [row["step"] for row in run.timings]
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3]
    assert run.summary == json.loads((run / "summary.json").read_text())
    assert {row["step"] for row in run.rollouts} == {1, 2, 3}
    assert {row["step"] for row in run.evaluations} == {0, 3}
    assert [saved.step for saved in run.checkpoints] == [2, 3]
    assert run.checkpoints[-1].score == run.metrics[-1]["validation/reward"]
    assert run.best == run.checkpoints[-1]
    assert run.model == str(run.path)
    assert run.report() == run.path / "report.html"
    assert repr(run) == f"Run({str(run.path)!r})"
    assert burnish.Run(str(run)).metrics == run.metrics
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: rows))
    assert run.frame() == run.metrics
    assert run.frame("timings") == run.timings
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match=r"needs the package pandas; install it: .* Run\.timings, a"):
        run.frame("timings")


def test_a_run_that_has_not_finished_is_read_as_far_as_it_is(tmp_path):
    with pytest.raises(RunError, match="is not a run directory"):
        burnish.Run(tmp_path)
    stopped = burnish.train("sort", train=SHORT, out=tmp_path / "run", stop=lambda: True)
    assert stopped.summary["steps"] == 1
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "stopped early" in stopped._repr_html_()
    with pytest.raises(RunError, match="no finished step"):
        _ = stopped.summary


def test_a_resumed_run_is_one(tmp_path):
    stopped = burnish.train("sort", train=SHORT, out=tmp_path / "run", stop=lambda: True)
    assert [row["step"] for row in burnish.resume(stopped).metrics] == [0, 1, 2, 3]
    longer = burnish.resume(stopped, train={"steps": 4})
    assert longer.summary["steps"] == 4
    with pytest.raises(ConfigError, match=r"train\.batch can't change when a run is resumed"):
        burnish.resume(stopped, overrides={"train": {"batch": 10}})


def test_a_recipe_by_its_name_by_a_table_and_by_settings_is_the_same(tmp_path):
    table = read_recipe_table("sort")
    table["train"] |= SHORT
    recipes = [
        api.recipe_of("sort", [{"train": SHORT}]),
        api.recipe_of("sort", ["train.steps=3"]),
        api.recipe_of(table, [{"name": "sort"}]),
        api.recipe_of(load_recipe("sort"), [{"train.steps": 3}]),
    ]
    assert [recipe for recipe in recipes if recipe != recipes[0]] == []
    assert burnish.train("sort", train={"steps": 1}, seed=4, out=tmp_path / "e").recipe.seed == 4
    for settings, message in (
        ({"train": {"step": 3}}, r"unknown setting 'train\.step'; did you mean 'train\.steps'\?"),
        ({"steps": 3}, r"unknown setting 'steps'; did you mean 'train\.steps'\?"),
        ({"prompts": "hello world"}, r"write prompts=\['hello world'\]"),
        ({"prompts": []}, "prompts is empty; give at least one prompt or row"),
        ({"prompts": {"prompt": "hello"}}, "prompts must be a list of texts or rows"),
    ):
        with pytest.raises(BurnishError, match=message):
            burnish.train("sort", out=tmp_path / "none", **settings)
    assert not (tmp_path / "none").exists()


def test_rows_and_a_reward_of_ones_own(smollm2, tmp_path):
    rows = [{"prompt": f"Say {word}", "answer": word} for word in "abcdefghij"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = small(smollm2, task={"must_end": False})
    run = burnish.train(
        "keywords", data=file, reward=lambda text, row: 0.5, out=tmp_path / "run", **sections
    )
    assert run.metrics[-1]["rollout/reward"] == 0.5
    assert run.recipe.task.train == str(file)
    supervised = {key: sections[key] for key in ("model", "device")} | {"train": {"batch": 4}}
    supervised |= {"checkpoint": {"every": 1}}
    warm = burnish.sft(data=file, out=tmp_path / "warm", **supervised)
    assert len(warm.metrics) == 4  # 9 rows, 4 at a time, and the start
    kept = burnish.sft(data=rows, out=tmp_path / "kept", stop=lambda: True, **supervised)
    assert burnish.resume(kept).metrics == warm.metrics  # on rows that the run kept
    assert api.recipe_of("keywords", [{"model": warm}]).model.name == str(warm)
    with pytest.raises(ConfigError, match="the sorting task needs 'sorter'"):
        burnish.sft("sort")
    with pytest.raises(ConfigError, match="give --data FILE"):
        burnish.sft(out=tmp_path / "none")


WORDS = ["Say red.", "Say blue.", "Say green.", "Say black."] * 3


LENGTH = """
def length(response, row):
    return float(len(response)) * (row["prompt"] not in {"", "?", "!"})

def halves(response, row):
    return float(len(response) // 2)
"""
typed: dict[str, Callable] = {}
exec(LENGTH, typed)  # as in a prompt: no worker can load them
length, halves = typed["length"], typed["halves"]


@pytest.fixture
def own_recipe(smollm2, tmp_path):
    """A recipe file with rows and a reward of its own."""
    rows = "".join(json.dumps({"prompt": f"Never ask {i}"}) + "\n" for i in range(12))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "reward.py").write_text("def nothing(response, row):\n    return 0.0\n")
    task = {"name": "files", "train": str(tmp_path / "rows.jsonl")}
    task["reward"] = f"{tmp_path / 'reward.py'}:nothing"
    table = small(smollm2, task=task, checkpoint={"every": 1})
    table["model"] = table["model"] | {"tokenizer": str(smollm2)}
    (tmp_path / "mine.toml").write_text(format_toml(table))
    return tmp_path / "mine.toml"


def test_a_run_goes_on_with_the_prompts_and_the_reward_of_the_script(own_recipe, tmp_path):
    given = {"prompts": WORDS, "reward": length}
    whole = burnish.train(own_recipe, out=tmp_path / "whole", **given)
    run = burnish.train(own_recipe, out=tmp_path / "run", stop=lambda: True, **given)
    kept = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    assert kept == [{"prompt": text} for text in WORDS]
    assert (run.recipe.task.train, run.recipe.task.reward) == (None, None)
    with pytest.raises(RunError, match=r"is the Python function length; .*reward=length\)"):
        burnish.resume(run)
    with pytest.raises(RunError, match=r"inputs\.reward: length \(\w+\) → halves \(\w+\)"):
        burnish.resume(run, reward=halves)
    burnish.resume(run, reward=length)
    assert run.metrics == whole.metrics
    assert {row["asked"] for row in run.rollouts} <= set(WORDS)
    assert fingerprint(run) == fingerprint(whole)


def test_a_run_resumed_in_another_directory_names_its_own(own_recipe, tmp_path, monkeypatch):
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home, other):
        folder.mkdir()
    (home / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    monkeypatch.chdir(home)
    how = {"data": "mine.jsonl", "out": tmp_path / "run", "stop": lambda: True}
    run = burnish.train(own_recipe, **how)
    monkeypatch.chdir(other)
    for text in (None, '{"prompt": "c"}\n{"prompt": "d"}\n'):  # no file, and another one
        if text is not None:
            (other / "mine.jsonl").write_text(text)
        with pytest.raises(BurnishError, match=r"no such file|inputs\.task\.train: ") as caught:
            burnish.resume(run, **MORE)
        assert caught.value.__notes__ == [f"the run was started in {home}; run the command there"]
    monkeypatch.chdir(home)
    (home / "mine.jsonl").unlink()
    with pytest.raises(BurnishError, match="no such file") as caught:
        burnish.resume(run, **MORE)
    assert not hasattr(caught.value, "__notes__")


def test_a_script_may_replace_the_rows_alone_or_the_reward_alone(own_recipe, tmp_path):
    short = {"train": {"steps": 1}}
    rows = burnish.train(own_recipe, prompts=WORDS, out=tmp_path / "rows", **short)
    assert (rows.recipe.task.train, rows.metrics[-1]["rollout/reward"]) == (None, 0.0)
    assert {row["asked"] for row in burnish.resume(rows, **MORE).rollouts} <= set(WORDS)
    with pytest.raises(
        ConfigError, match=r"reward can't change when a run is resumed, and .*:noth"
    ):
        burnish.resume(rows, reward=length)
    loaded = load_recipe(own_recipe)
    task = api.recipe_of(loaded, reward=length).task
    assert (task.train.endswith("rows.jsonl"), task.reward) == (True, None)
    other = tmp_path / "other.py"
    other.write_text("def one(response, row):\n    return 1.0\n")
    named = burnish.train(loaded, reward=f"{other}:one", out=tmp_path / "named", **short)
    assert named.recipe.task.reward == f"{other}:one"
    assert burnish.resume(named, **MORE).metrics[-1]["rollout/reward"] == 1.0
    other.write_text("def one(response, row):\n    return 2.0\n")
    with pytest.raises(RunError, match=r"inputs\.task\.reward: \w+ → \w+.*--anyway"):
        burnish.resume(named, train={"steps": 3})
    with pytest.raises(ConfigError, match="give one of the two"):
        burnish.train(own_recipe, prompts=WORDS, data=tmp_path / "rows.jsonl")


def test_several_rewards_are_summed_and_the_run_resumes_bit_for_bit(own_recipe, tmp_path):
    """Two functions and a file: their weights, metrics, hashes, GDPO, and a resumed run."""
    file = tmp_path / "other.py"
    file.write_text(
        "import burnish\n\n\n@burnish.batched\n"
        "def several(responses, rows):\n    return [len(r) % 3 for r in responses]\n"
    )
    rewards = [
        {"reward": f"{file}:several", "weight": 2.0},
        {"reward": length, "weight": 0.5, "name": "chars"},
        {"reward": lambda text, row: {"reward": len(row["prompt"]), "part": 1}, "name": "asked"},
    ]
    gdpo = {"name": "gdpo", "parts": {"several": 1.0, "chars": 0.5}}
    given = {"prompts": WORDS, "reward": rewards, "objective": {"advantage": gdpo}}
    whole = burnish.train(own_recipe, out=tmp_path / "whole", **given)
    row = whole.metrics[-1]
    parts = {name: row[f"rollout/part_{name}"] for name in ("several", "chars", "asked")}
    assert row["rollout/reward"] == pytest.approx(
        2 * parts["several"] + 0.5 * parts["chars"] + parts["asked"]
    )
    assert row["rollout/part_asked_part"] == 1
    assert "validation/part_several" in row
    run = burnish.train(own_recipe, out=tmp_path / "run", stop=lambda: True, **given)
    one, two, _ = run.recipe.task.rewards
    assert (one.reward, one.weight, two.name, two.function) == (
        f"{file}:several", 2.0, "chars", None,
    )  # fmt: skip
    inputs = json.loads((run / "environment.json").read_text())["inputs"]
    assert {"reward.chars", "reward.asked", "task.rewards.several"} <= inputs.keys()
    with pytest.raises(RunError, match=r"include the Python functions chars, asked, and chars, "):
        burnish.resume(run)
    with pytest.raises(RunError, match=r"functions chars, asked, and asked was not passed"):
        burnish.resume(run, reward=[rewards[1]])
    own = rewards[2]
    with pytest.raises(ConfigError, match="has the rewards several, chars, asked; omit halves"):
        burnish.resume(run, reward=[rewards[1], own, halves])
    with pytest.raises(RunError, match=r"inputs\.reward\.chars: length \(\w+\) → halves"):
        burnish.resume(run, reward=[{"reward": halves, "name": "chars"}, own])
    with pytest.raises(ConfigError, match=r"needs a name of letters, .* got '<lambda>'"):
        burnish.resume(run, reward=[lambda text, row: 1.0])
    burnish.resume(run, reward=rewards[1:])
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["a.py:f", "b.py:f"], r"two rewards with the name 'f'; give each of them its own name"),
        ([{"reward": "a.py:f", "weight": 0}], "needs rewards with a weight other than 0"),
        (["a.py:f", "none"], "has reward = 'none', which has no effect in a sum"),
        (["a.py:ended"], "has the name 'ended', which burnish uses"),
        ([lambda text, row: 1.0], "needs a name of letters, digits and _, got '<lambda>'"),
        ([], "must have at least 1 item"),
        ([{"reward": "a.py:f", "wieght": 1}], r"task\.rewards\.0\.wieght'; did you mean"),
    ],
)
def test_what_several_rewards_must_be(rewards, message):
    with pytest.raises(ConfigError, match=message):
        api.recipe_of("keywords", prompts=WORDS, reward=rewards)


def test_rewards_are_written_as_toml_and_one_replaces_several(tmp_path):
    weights = {"a.py:f": 0.5, "inclusion": 2}
    recipe = api.recipe_of("keywords", data="x.jsonl", reward=weights)
    text = recipe_to_toml(recipe)
    line = 'rewards = [{ reward = "a.py:f", weight = 0.5, name = "f" }, { reward = "inclusion", '
    assert line + 'weight = 2.0, name = "inclusion" }]' in text
    (tmp_path / "again.toml").write_text(text)
    again = load_recipe(tmp_path / "again.toml")
    assert again.task == recipe.task
    assert api.recipe_of(again, reward="b.py:g").task.rewards is None
    with pytest.raises(ConfigError, match="has both reward and rewards; remove one"):
        load_recipe(again, ["task.reward=b.py:g"])
    both = api.recipe_of("keywords", data="x.jsonl", reward=[halves, "a.py:f"])
    assert load_recipe(both, ["train.steps=7"]).task.rewards[0].function is halves
    assert api.recipe_of(both, reward=length).task.function is length


MORE = {"train": {"steps": 2}}


def test_the_kept_prompts_are_measured_and_checked(own_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"prompts": WORDS, "out": tmp_path / "run", "train": {"steps": 1}}
    run = burnish.train(own_recipe, **given)
    assert {row["asked"] for row in burnish.evaluate(run).rows} <= set(WORDS)
    (run / "prompts.jsonl").write_text((run / "prompts.jsonl").read_text().replace("red", "pink"))
    with pytest.raises(RunError, match=r"inputs\.prompts: \w+ → \w+"):
        burnish.resume(run, train={"steps": 2})
    (run / "prompts.jsonl").unlink()
    with pytest.raises(DataError, match=r"prompts\.jsonl can't be read"):
        burnish.resume(run, train={"steps": 2})
    with pytest.raises(DataError, match="prompts may contain only texts, numbers, lists and dicts"):
        burnish.train(own_recipe, prompts=["a", {"prompt": "b", "x": {1}}])


def test_a_function_is_known_by_its_code():
    from functools import partial

    from burnish.launch.inputs import hash_function

    def make(scale):
        return lambda response, row: scale * (row["a"] in {"x", "y", "z"})

    class Judge:
        def __call__(self, response, row):
            return 1.0

    assert hash_function(make(1)) == hash_function(make(1)) != hash_function(make(2))
    assert hash_function(length) != hash_function(halves)
    one, two = (lambda *given, k=1: k), (lambda *given, k=2: k)
    assert hash_function(one) != hash_function(two)
    assert hash_function(Judge()) == hash_function(Judge())
    assert hash_function(partial(make, 1)) != hash_function(partial(make, 2))
    code = "from burnish.launch.inputs import hash_function\n# moved\n"
    code += f"{LENGTH}\nprint(hash_function(length))"
    other = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=other)
    assert done.stdout.strip() == hash_function(length)


def test_an_evaluation_has_figures_and_rows(language, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, few = language, {"validation": {"samples": 2}}
    measured = burnish.evaluate(run, **few)
    (path,) = Path("runs").iterdir()
    assert measured.path == path
    assert len(measured.rows) == 4
    assert measured.figures["validation/responses"] == 4
    kept = burnish.evaluate(run, out=tmp_path / "kept", **few)
    assert kept.figures == measured.figures
    assert [row["response"] for row in kept.rows] == [row["response"] for row in measured.rows]
    assert kept.path == tmp_path / "kept"
    assert "validation/reward" in repr(kept)
    other = burnish.evaluate(
        "keywords",
        model=run,
        overrides=["device=cpu"],
        **few | {"task": {"validation_prompts": 1}, "rollout": {"max_tokens": 2}},
    )
    assert len(other.rows) == 2


def test_generate_answers_in_python(smollm2, tmp_path):
    settings = {"model": smollm2, "max_tokens": 3, "seed": 5, "precision": "fp32", "device": "cpu"}
    (one,) = burnish.generate("Hello", **settings)
    assert one.prompt == "Hello"
    assert len(one.token_ids) == len(one.logprobs) <= 3
    assert one.finish in ("stop", "length")
    many = burnish.generate(["Hello", "Tell me"], n=2, **settings)
    assert [(answer.prompt, answer.sample) for answer in many] == [
        ("Hello", 0), ("Hello", 1), ("Tell me", 0), ("Tell me", 1),
    ]  # fmt: skip
    assert many[0].text == one.text
    with pytest.raises(ConfigError, match=r"engine.precision must be 'auto', 'fp32', .* 'int8'"):
        burnish.generate("Hello", model=smollm2, precision="int8")


def test_a_run_writes_and_is_exported(language, tmp_path):
    run = language
    settings = {"max_tokens": 3, "precision": "fp32", "device": "cpu"}
    written = [answer.text for answer in burnish.generate("Hello", model=run, n=2, **settings)]
    assert burnish.export(run, tmp_path / "hf") == run.best.path
    exported = burnish.generate("Hello", model=tmp_path / "hf", n=2, **settings)
    assert written == [answer.text for answer in exported]


def test_the_page_tells_the_truth(tmp_path, monkeypatch):
    """Its examples on the sorting model run as they stand; the others are code; names are there."""
    monkeypatch.chdir(tmp_path)
    page = (Path(burnish.__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        code = compile(block, "docs/api.md", "exec")
        if "sort" in block or "resume" in block:
            exec(code, names)
    run = names["run"]
    assert run.summary["steps"] == 40
    table = page.partition("| attribute |")[2].partition("\n\n")[0]
    attributes = [name for cell in re.findall(r"^\| (.*?) \|", table, flags=re.M)
                  for name in re.findall(r"`(\w+)`", cell)]  # fmt: skip
    public = {name for name in dir(burnish.Run) if not name.startswith("_")} | {"path"}
    assert set(attributes) == public
    functions = {name.partition(".")[2] for name in re.findall(r"^\| `([\w.]+)`", page, flags=re.M)}
    assert set(PUBLIC) <= functions
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 100


@pytest.mark.parametrize(("given", "notes"), [("auto", 0), ("fp32", 0), ("bf16", 1)])
def test_a_precision_that_is_not_multiplied_is_said_with_what_it_costs(given, notes, monkeypatch):
    from burnish.machine import hardware

    monkeypatch.setattr(
        hardware, "supports_precision", lambda precision, device: precision == "fp32"
    )
    sets = [f"train.precision={given}", f"engine.precision={given}", "device=cpu"]
    seen = []
    with showing(seen.append):
        recipe = resolve(load_recipe("keywords", sets)).recipe
    said = [progress.doing for progress in seen if progress.phase == "note"]
    assert len(said) == notes
    assert all("no bf16 products" in note and "times as long as in fp32" in note for note in said)
    assert recipe.train.precision == recipe.engine.precision == given.replace("auto", "fp32")


def test_a_function_may_stand_for_a_piece_and_its_run_resumes(tmp_path):
    def baseline(rewards, group_ids):
        from burnish.rl.advantages import group_mean

        return group_mean(rewards, group_ids)

    few, given = ["train.steps=2"], {"out": tmp_path / "own", "show": False}
    own = burnish.train("sort", overrides=few, objective={"advantage": baseline}, **given)
    named = [*few, "objective.advantage=group_mean"]
    known = burnish.train("sort", overrides=named, out=tmp_path / "known", show=False)
    assert own.metrics == known.metrics
    more = {"overrides": ["train.steps=3"], "show": False}
    with pytest.raises(RunError, match=r"is the Python function baseline; continue the run from"):
        burnish.resume(own.path, **more)
    burnish.resume(own.path, objective={"advantage": baseline}, **more)
    burnish.resume(known.path, **more)
    assert own.metrics == known.metrics


def test_objects_stand_for_a_model_and_for_a_tokenizer(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    tokenizer, shape = Tokenizer.load(smollm2), {"n_layers": 1, "d_model": 32, "n_heads": 4}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, d_ff=48, context=128, **shape)
    model = Transformer(config).init_weights(0)
    mine = small(
        smollm2, model=(model, tokenizer), train={"steps": 1, "batch": 8, "schedule": "constant"}
    )
    run = burnish.train("keywords", out=tmp_path / "run", **mine)
    written = Path(run.recipe.model.name)
    assert torch.equal(checkpoint.load_model(written).embed.weight, model.embed.weight)
    peer = transformers.AutoModelForCausalLM.from_pretrained(written)
    theirs = hub.as_setting((peer, transformers.AutoTokenizer.from_pretrained(written)))
    assert torch.equal(checkpoint.load_model(theirs).embed.weight, model.embed.weight)
    shutil.rmtree(written)
    with pytest.raises(BurnishError, match=f"no model '{written}'"):
        burnish.resume(run, train={"steps": 2})
    assert hub.as_setting((model, tokenizer)) == written  # equal objects have one directory
    assert burnish.resume(run, train={"steps": 2}).metrics[-1]["step"] == 2
    scratch = hub.as_setting({"name": "scratch", "tokenizer": tokenizer})
    assert Tokenizer.load(scratch["tokenizer"]).end_ids == tokenizer.end_ids
    with pytest.raises(ModelError, match=r"a pair of a model and its tokenizer, got 1\.5"):
        burnish.train("keywords", model=1.5)
