"""Runs on rows of tables: the same as on JSONL, and the same whatever interrupts them."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import burnish
from burnish import api
from burnish.errors import ConfigError, DataError, RunError
from burnish.recipe.costs import Room
from burnish.recipe.load import load_recipe
from burnish.recipe.tasks import FilesTask, MathTask
from burnish.tasks.data import table
from burnish.tasks.math import make_math
from burnish.tasks.mixture import Mixture
from burnish.tasks.text import make_files
from tests.conftest import byte_tokenizer
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401

datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
REWARD = (
    "def score(response, row):\n    return float(row['word'] in response) + len(response) % 3\n"
)
ROWS = [
    {
        "chat": [{"role": "user", "content": f"Name {kind} {i}."}],
        "word": "aeiou"[i % 5],
        "price": i / 2,
    }
    for i in range(12)
    for kind in ("a fruit", "a bird")
]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(table, "cache_directory", lambda: tmp_path / "burnish")
    datasets.disable_progress_bars()


@pytest.fixture
def data(tmp_path):
    """The names of the rows as Parquet and as JSONL."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    return [tmp_path / "rows.parquet", tmp_path / "rows.jsonl"]


def settings(smollm2, tmp_path, *more):
    size = {"layers": 2, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    model = [f"model.{key}={value}" for key, value in size.items()]
    return [
        "model.name=scratch", f"model.tokenizer={smollm2}", *model, "device=cpu",
        "task.columns.prompt=chat", "task.system=Be brief.", "task.workers=1",
        f"task.reward={tmp_path}/reward.py:score", "rollout.max_tokens=6", "rollout.batch=8",
        "rollout.group_size=4", "train.batch=8", "train.steps=4", "checkpoint.every=2",
        "validation.every=3", "selection.target=0.5", "task.must_end=false", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_parquet_run_resumes_bit_for_bit(smollm2, tmp_path, data):
    given = settings(smollm2, tmp_path)
    notes = []

    def show(progress):
        if progress.phase == "note":
            notes.append(progress.doing)

    how = {"data": data[0], "overrides": given}
    whole = api.train("keywords", **how, out=tmp_path / "whole", show=show)
    assert len({row["rollout/reward"] for row in whole.metrics[1:]}) > 1
    assert notes == [f"validation: 2 of the 24 rows of {data[0]} are held out"]
    prompts = [row["prompt"] for row in whole.rollouts]
    assert all("system\nBe brief." in prompt for prompt in prompts)
    path = api.train("keywords", **how, out=tmp_path / "run", stop=stopper(3))
    inputs = json.loads((path / "environment.json").read_text())["inputs"]
    assert inputs["task.train.datasets"] == datasets.__version__
    rows = data[0].read_bytes()
    datasets.Dataset.from_list(ROWS[1:]).to_parquet(data[0])
    with pytest.raises(RunError, match=r"inputs\.task\.train: \w+ → \w+"):
        api.resume(path)
    data[0].write_bytes(rows)
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)


@pytest.mark.slow
def test_kills_of_a_parquet_run_change_nothing_and_it_equals_a_jsonl_run(
    smollm2, tmp_path, data, monkeypatch
):
    given = settings(smollm2, tmp_path, "train.steps=10", "checkpoint.every=1")
    how = {"data": data[0], "overrides": given}
    whole = api.train("keywords", **how, out=tmp_path / "whole")
    lines = api.train("keywords", **how | {"data": data[1]}, out=tmp_path / "lines")
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"):
        assert (whole / name).read_bytes() == (lines / name).read_bytes()
    path = tmp_path / "run"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    context = multiprocessing.get_context("forkserver")
    kills = 0
    deadline = time.monotonic() + 900
    while not (path / "summary.json").exists():
        assert time.monotonic() < deadline
        is_new = not (path / "recipe.toml").exists()
        call = api.train if is_new else api.resume
        more = {**how, "out": path} if is_new else {}
        victim = context.Process(target=call, args=("keywords" if is_new else path,), kwargs=more)
        victim.start()
        before = count_steps(path)
        while victim.is_alive() and (kills >= 2 or count_steps(path) < before + 2):
            time.sleep(0.02)
        if victim.is_alive():
            os.kill(victim.pid, 9)
            kills += 1
        victim.join()
    assert kills == 2
    assert fingerprint(path) == fingerprint(whole)


def count_steps(path):
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_sft_on_chat_messages_of_a_table_equals_prompts_and_answers(smollm2, tmp_path):
    rows = [{"prompt": f"Say {i}.", "answer": f"It is {i}."} for i in range(12)]
    user, assistant = {"role": "user"}, {"role": "assistant"}
    chats = [
        {"chat": [user | {"content": row["prompt"]}, assistant | {"content": row["answer"]}]}
        for row in rows
    ]
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    given = {
        "model": {"name": "scratch", "tokenizer": smollm2, **size},
        "train": {"batch": 4},
        "task": {"epochs": 2.0},
        "device": "cpu",
        "show": False,
    }
    plain = burnish.sft(data=rows, out=tmp_path / "rows", **given)
    given["task"] = {"epochs": 2.0, "columns": {"prompt": "chat"}}
    given["data"] = rows = datasets.Dataset.from_list(chats)
    whole = burnish.sft(out=tmp_path / "table", **given)
    assert (plain / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    stopped = burnish.sft(out=tmp_path / "stopped", stop=stopper(2), **given)
    burnish.resume(stopped, show=False)
    assert fingerprint(stopped) == fingerprint(whole)
    alone = burnish.sft(out=tmp_path / "one", **given | {"data": rows.select([0])})
    assert "validation/loss" not in alone.metrics[0]
    assert [row["step"] for row in alone.metrics] == [1]


def test_a_recipe_does_not_keep_its_validation_data_with_other_data(tmp_path):
    file = tmp_path / "mine.toml"
    own = ["train", "validation"]
    text = "".join(f'{name} = "own-{name}.jsonl"\n' for name in own)
    file.write_text(
        f'[task]\nname = "files"\nreward = "keyword"\n{text}validation_rows = 9\n'
        '[model]\nname = "smollm2-135m"\n'.replace('"keyword"', '"reward.py:f"')
    )
    assert load_recipe(str(file)).task.validation == "own-validation.jsonl"
    for given in ({"data": "new.parquet"}, {"data": [{"prompt": "a"}]}, {"prompts": ["a"]}):
        task = api.recipe_of(file, **given).task
        assert (task.validation, task.validation_rows) == (None, None)
        assert task.reward == "reward.py:f"
        task = api.recipe_of(
            file, ["task.validation=b.csv", "task.validation_rows=3"], **given
        ).task
        assert (task.validation, task.validation_rows) == ("b.csv", 3)
    file.write_text(file.read_text().replace("validation_rows = 9", "validation_rows = 0"))
    assert api.recipe_of(file, data="new.parquet").task.validation_rows == 0
    assert api.recipe_of(file, reward="other.py:f").task.validation == "own-validation.jsonl"


def test_a_run_of_one_row_has_no_validation(smollm2, tmp_path):
    notes = []
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Name a fruit.", "word": "a"}\n')
    (tmp_path / "reward.py").write_text(REWARD)
    given = settings(smollm2, tmp_path, "train.steps=1")
    given = [text for text in given if "columns" not in text]
    run = api.train(
        "keywords",
        data=tmp_path / "rows.jsonl",
        overrides=given,
        out=tmp_path / "run",
        show=lambda progress: notes.append(progress.doing),
    )
    assert any(f"{tmp_path}/rows.jsonl has only one prompt" in note for note in notes)
    assert [row["step"] for row in run.metrics][-1] == 1
    assert "validation/reward" not in run.summary
    run.report()


@pytest.mark.slow
def test_a_run_without_validation(smollm2, tmp_path):
    """It trains on all rows, samples no held-out response, stops and resumes bit for bit, and has a
    report and a last checkpoint to export; `eval` says what it needs."""
    told = []
    rows = [{"prompt": f"Name fruit {i}.", "word": "a"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    given = settings(smollm2, tmp_path, "task.validation_rows=0", "rollout.batch=12")
    given = [text for text in given if "columns" not in text and "validation.every" not in text]
    given = [text.replace("train.batch=8", "train.batch=12") for text in given]
    how = {"data": tmp_path / "rows.jsonl", "overrides": given}
    run = api.train(
        "keywords", **how, out=tmp_path / "run", show=lambda progress: told.append(progress.doing)
    )
    assert any("all 3 rows of" in said and "are trained on" in said for said in told)
    assert not any("evaluating" in said for said in told)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert not [name for row in run.metrics for name in row if name.startswith("validation/")]
    assert len({row["prompt"] for row in run.rollouts}) == 3
    assert "validation" not in run.summary
    run.report()
    assert api.export(run, tmp_path / "exported").name.startswith("step-00000004")
    stopped = api.train("keywords", **how, out=tmp_path / "stopped", stop=stopper(2))
    api.resume(stopped)
    assert fingerprint(stopped) == fingerprint(run)
    with pytest.raises(ConfigError, match=r"holds out no prompts \(task.validation_rows = 0\)"):
        api.evaluate(str(run), out=tmp_path / "eval")
    (tmp_path / "one.jsonl").write_text('{"prompt": "Name a tree.", "word": "a"}\n')
    told.clear()
    api.evaluate(
        str(run),
        overrides=[f"task.validation={tmp_path}/one.jsonl", "validation.samples=2"],
        out=tmp_path / "eval",
        show=lambda progress: told.append(progress.doing),
    )
    assert "evaluating 1 prompt" in told


@pytest.mark.parametrize(
    ("recipe", "given", "said"),
    [
        ("math", ["validation.patience=2"], "validation.patience has no effect with task.valid"),
        ("math", ["validation.metric=validation/length"], "validation.metric has no effect"),
        ("sft", ["validation.every=2"], "validation.every has no effect with task.validation_rows"),
    ],
)
def test_settings_of_validation_have_no_effect_without_it(recipe, given, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe, ["task.validation_rows=0", *given])
    loaded = load_recipe(recipe, "task.validation_rows=0")
    assert (loaded.is_validated, loaded.target_metric) == (False, None)
    with pytest.raises(
        ConfigError, match=r"validation.every must .* got 0; task.validation_rows = 0 tr"
    ):
        load_recipe(recipe, "validation.every=0")


def test_a_mixture_is_validated_if_one_of_its_tasks_is():
    part = {"name": "files", "train": "a.jsonl", "reward": "r.py:f", "validation_rows": 0}
    other = {"name": "keywords"}
    tasks = {"name": "mixture", "weights": {"a": 1.0, "b": 1.0}, "tasks": {"a": part, "b": other}}
    table = {"task": tasks, "model": "smollm2-135m"}
    assert load_recipe(table).is_validated
    tasks["tasks"]["b"] = part
    assert not load_recipe(table).is_validated
    with pytest.raises(
        ConfigError, match=r"samples has no effect with task.tasks..\.validation_ro"
    ):
        load_recipe(table, "validation.samples=2")


def test_tasks_of_tables_ask_what_tasks_of_jsonl_ask(tmp_path):
    worked = "first {} + 2 = {}\nthen nothing = {}\n#### {}"
    rows = [
        {"question": f"{i} + 2?", "answer": worked.format(i, i + 2, i + 2, i + 2)}
        for i in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    made = {"tokenizer": byte_tokenizer(), "seed": 3, "room": Room(1000, "here")}
    asked = []
    for name in ("a.jsonl", "a.parquet"):
        file = str(tmp_path / name)
        hinted = make_math(MathTask(train=file, hints=0.5), **made)
        columns = {"prompt": "question"}
        own = FilesTask(train=file, columns=columns, function=lambda response, row: 1.0)
        task = Mixture(
            {"sums": hinted, "own": make_files(own, **made)}, {"sums": 2.0, "own": 1.0}, seed=3
        )
        prompts = [*(task.prompt(i) for i in range(70)), *task.validation]
        asked.append([(p.prompt_id, p.text, p.part, p.reference) for p in prompts])
        task.close()
    assert asked[0] == asked[1]


def test_a_prompt_of_a_table_that_is_too_long_is_named(tmp_path):
    rows = [{"prompt": "short"}] * 3 + [{"prompt": "x" * 90}] + [{"prompt": "other"}] * 3
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    config = FilesTask(train=f"{tmp_path}/a.parquet", function=lambda response, row: 1.0)
    made = {"tokenizer": byte_tokenizer(), "seed": 0}
    said = r"row 3 \(counted from 0\): the prompt has 111 tokens, and the context leaves 110"
    with pytest.raises(DataError, match=said):
        make_files(config, **made, room=Room(110, "the context"))
    make_files(config, **made, room=Room(111, "the context")).close()


MEMORY = """
import sys
from burnish.launch.inputs import hash_files
from burnish.recipe.tasks import FilesTask
from burnish.recipe.costs import Room
from burnish.tasks.rows import load_rows
from burnish.tasks.text import make_files
from pathlib import Path
from tests.conftest import byte_tokenizer

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(sys.argv[2])).split()[1]) / 1024

config = FilesTask(train=sys.argv[1], function=lambda response, row: 1.0, validation_rows=64)
import datasets, burnish.tasks.data.table
before = peak()
load_rows(config, seed=0)
task = make_files(config, tokenizer=byte_tokenizer(), seed=0, room=Room(9000, "here"))
[task.prompt(i) for i in range(500)]
hash_files([Path(sys.argv[1])])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("parquet", marks=pytest.mark.extra), "jsonl"])
def test_a_million_rows_need_little_memory(tmp_path, ending):
    """The rows are 300 MB as text, and more than 1 GB as Python objects. Memory that mirrors files
    is not counted: the kernel drops it when it is needed."""
    file = tmp_path / f"big.{ending}"
    ids = np.arange(1_000_000)
    frame = {"prompt": [f"Question {i}: " + "how many? " * 25 for i in ids], "n": ids}
    rows = datasets.Dataset.from_dict(frame)
    rows.to_parquet(file) if ending == "parquet" else rows.to_json(file)
    del rows, frame
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(file), "RssAnon"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )
    assert float(done.stdout) < 250  # about 200 MB of it are permutations of the rows
