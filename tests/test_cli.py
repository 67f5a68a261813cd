"""The command line as a user meets it: a process, its output, its exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import pytest

from burnish import cli

BURNISH = str(Path(sys.executable).with_name("burnish"))


def burnish(*arguments, cwd, **more):
    return subprocess.run(
        [BURNISH, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "160", **more},
        check=False,
    )


def test_train_compare_and_the_files(tmp_path):
    for seed in (0, 1):
        done = burnish("train", "sort", "--set", "train.steps=3", "--seed", str(seed), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "90 responses, 30 gradient steps" in done.stdout
        assert f"report: runs/sort-{seed + 1}/report.html" in done.stdout
    assert json.loads((tmp_path / "runs/sort-2/summary.json").read_text())["seed"] == 1
    done = burnish("compare", "runs/sort-1", "runs/sort-2", "--out", "both.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, label, *rows = done.stdout.splitlines()
    assert header.split() == ["reward", "held", "out", "inclusion", "ended"]
    assert label == "sort"
    assert [row.split()[0] for row in rows] == ["seed", "seed", "mean", "std", "picture:"]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_start_together_take_a_directory_each(tmp_path):
    command = [BURNISH, "train", "sort", "--set", "train.steps=2", "--seed"]
    started = [
        subprocess.Popen([*command, str(seed)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    made = {path.parent.name: json.loads(path.read_text())["seed"]
            for path in (tmp_path / "runs").glob("*/summary.json")}  # fmt: skip
    assert sorted(made) == ["sort-1", "sort-2", "sort-3"]
    assert sorted(made.values()) == [0, 1, 2]


def test_a_command_that_fails_leaves_no_directory(tmp_path):
    done = burnish("train", "keywords", "--data", "none.jsonl", cwd=tmp_path)
    assert "no such file" in done.stderr
    assert not list(tmp_path.iterdir())


def test_plan_says_what_will_be_computed_and_writes_nothing(tmp_path):
    done = burnish("plan", "sort", "--set", "objective.kl=k3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "Σ w_(i,t) (L_t + 0.01 k3_t)",
        "L_t = −min(ρ_t A_t, clip(ρ_t, 0.99, 1.01) A_t)",
        "w_(i,t) = 1 / Σ_i |y_i|",
        "30 responses = 3 prompts × 10 samples",
        "10 per rollout = 1 train batch of 30 responses × 10 epochs",
        "3,000 responses sampled, 1,000 gradient steps",
        "runs/sort-1",
    ):
        assert line in done.stdout, line
    assert not list(tmp_path.iterdir())


def test_the_version_is_printed(tmp_path):
    done = burnish("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"burnish {version('burnish')}\n")


def test_the_end_is_told_with_whole_prompts_singulars_and_no_negative_zero(tmp_path, capsys):
    one = ["--set", "train.steps=1", "--set", "train.epochs=1", "--set", "rollout.batch=10"]
    planned = burnish("plan", "sort", *one, "--set", "train.batch=10", cwd=tmp_path).stdout
    for line in ("1 prompt × 10 samples", "1 step: 10 responses sampled, 1 gradient step ("):
        assert line in planned
    end = {"reward_first": -0.001, "reward_last": -0.0, "responses": 1, "gradient_steps": 1}
    held = {"first": -1e-9, "last": -0.0, "best": -0.0001, "best_step": 1}
    more = {"validation": held, "kl_held_out_k1": -0.004, "before_and_after": []}
    seconds = {"seconds": {"step": 1.0, "learn": 1.0}}
    asked = "Which of these numbers is the largest one: " + ", ".join(map(str, range(200)))
    pair = {"prompt": asked, "before": "y" * 999, "after": "199", "reward_before": -0.0}
    more["before_and_after"] = [pair | {"reward_after": 1.0}]
    (tmp_path / "summary.json").write_text(json.dumps(end | more | seconds))
    cli._show_end(tmp_path)
    shown = capsys.readouterr().out
    assert asked in " ".join(shown.split())  # whole, and broken between words alone
    assert f"before [0] {'y' * 200} …\n" in shown
    assert "reward 0.00 → 0.00, 1 response, 1 gradient step, 1.0 s" in shown
    assert "-0.0" not in shown


def test_compared_runs_are_named_by_their_settings(tmp_path):
    for steps in (2, 3):
        out = ["--out", f"run-{steps}", "--set", f"train.steps={steps}"]
        assert burnish("train", "sort", *out, cwd=tmp_path).returncode == 0
    done = burnish("compare", "run-2", "run-3", cwd=tmp_path)
    assert [line for line in done.stdout.splitlines() if "=" in line] == [
        "train.steps = 2",
        "train.steps = 3",
    ]


def test_watch_serves_until_it_is_interrupted(tmp_path):
    (tmp_path / "runs").mkdir()
    process = subprocess.Popen(
        [BURNISH, "watch", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = process.stdout.readline().split()[-1]
    assert "No run is here yet" in urlopen(url, timeout=20).read().decode()
    taken = burnish("watch", "--port", url.rstrip("/").rpartition(":")[2], cwd=tmp_path)
    assert taken.returncode == 1
    assert "is taken; choose another with --port" in taken.stderr
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    done = burnish("watch", "nowhere", cwd=tmp_path)
    assert "needs a run directory or a directory of runs, nowhere is neither" in done.stderr


def test_recipes_are_listed(tmp_path):
    done = burnish("recipes", cwd=tmp_path)
    assert "sort" in done.stdout
    assert "the lecture's example" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "sort", "--set", "train.step=3"], "did you mean 'train.steps'?"),
        (["train", "nothing"], "there is no recipe 'nothing'"),
        (["compare", "nowhere"], "nowhere is not a run directory"),
        (["compare", "nowhere", "--out", "no/such/place.png"], "no/such is not a directory"),
        (["plan", "sort", "--set", "objective.advantage.gamma=0.9"], "has no effect"),
    ],
)
def test_an_error_is_one_message(arguments, message, tmp_path):
    done = burnish(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    debug = burnish(*arguments, "--debug", cwd=tmp_path)
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert not list(tmp_path.iterdir())


# `timeout` signals a process, then its whole group.
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stopped_run_is_saved_and_resumed(number, times, tmp_path):
    process = subprocess.Popen(
        [BURNISH, "train", "sort", "--set", "train.steps=100000", "--out", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline, "no step within a minute"
        time.sleep(0.1)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.01)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped and saved; continue with: burnish resume run" in out
    done = burnish("resume", "run", "--set", "train.learning_rate=1", cwd=tmp_path)
    assert done.returncode == 1
    assert "it alters what is computed" in done.stderr
    done = burnish("report", "run", cwd=tmp_path)
    assert "report: run/report.html" in done.stdout


def tiny(smollm2):
    """Flags that make the keyword recipe small."""
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    settings = [f"model.{key}={value}" for key, value in size.items()]
    settings += ["model.name=scratch", f"model.tokenizer={smollm2}", "train.steps=2"]
    settings += ["rollout.batch=8", "rollout.group_size=4", "train.batch=8", "rollout.max_tokens=4"]
    return flags(settings)


def flags(settings):
    return [flag for setting in settings for flag in ("--set", setting)]


def test_train_with_data_and_reward_of_ones_own(smollm2, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {word}", "word": word}) + "\n" for word in "abcdefgh")
    )
    (tmp_path / "reward.py").write_text(
        "def includes(response, row):\n    return float(row['word'] in response)\n"
    )
    own = ["--data", "data.jsonl", "--reward", "reward.py:includes", "--out", "run"]
    done = burnish("train", "keywords", *own, *tiny(smollm2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = burnish("export", "run", "model", cwd=tmp_path)
    assert "step-00000002 of run → model" in done.stdout, done.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_directory_of_rows_keeps_the_reward_of_the_recipe(smollm2, tmp_path):
    (tmp_path / "words").mkdir()
    for name in ("train", "validation"):
        rows = [{"prompt": f"Say {word}.", "keywords": [word]} for word in ("red", "apple")] * 4
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "words" / f"{name}.jsonl").write_text(text)
    done = burnish("train", "keywords", "--data", "words", *tiny(smollm2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = (tmp_path / "runs/keywords-1/recipe.toml").read_text()
    for line in ('train = "words/train.jsonl"', 'reward = "use"', "must_end = true"):
        assert line in recipe, line
    last = json.loads((tmp_path / "runs/keywords-1/metrics.jsonl").read_text().splitlines()[-1])
    assert {"rollout/part_inclusion", "validation/part_fraction"} <= last.keys()


def test_help_and_import_are_light():
    code = (
        "import sys, burnish.cli; print([m for m in ('torch', 'pydantic', 'ray', 'transformers', "
    )
    code += "'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train_is_there_from_python(tmp_path):
    code = "import burnish; print(burnish.train('sort', overrides=['train.steps=2'], out='mine'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "mine"
    assert (tmp_path / "mine" / "summary.json").exists()


def test_generate_writes_text_and_jsonl(smollm2, tmp_path):
    (tmp_path / "prompts.txt").write_text("Hello\nWhat is 2 + 2?\n")
    arguments = ["--prompts", "prompts.txt", "-n", "2", "--max-tokens", "4", "--out", "out.jsonl"]
    done = burnish("generate", *arguments, "--model", str(smollm2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "── prompt 2, sample 2 ──" in done.stdout
    assert "tokens per second" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows[:3]] == [
        ("Hello", 0),
        ("Hello", 1),
        ("What is 2 + 2?", 0),
    ]
    assert all(len(row["token_ids"]) == len(row["logprobs"]) <= 4 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a PROMPT or --prompts FILE"),
        (["x", "--dtype", "int8"], "dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
        (["--prompts", "none.txt"], "none.txt can't be read"),
        (["x", "--model", "nothing"], "no model 'nothing'"),
    ],
)
def test_generate_refuses_with_one_message(arguments, message, tmp_path):
    done = burnish("generate", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_warm_start_is_trained_on(smollm2, tmp_path):
    rows = [{"prompt": f"Say {word}", "answer": f"{word} {word}"} for word in "abcdefghij"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    small = [f"model.{key}={value}" for key, value in size.items()]
    small += ["model.name=scratch", f"model.tokenizer={smollm2}", "train.batch=4"]
    given = ["--data", "rows.jsonl", "--out", "warm", *flags(small)]
    done = burnish("sft", *given, "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 3/3  loss " in done.stdout
    assert "3 gradient steps" in done.stdout
    assert "report: warm/report.html" in done.stdout
    few = [*tiny(smollm2)[14:], *flags(["model.name=warm", "task.validation_prompts=2"])]
    done = burnish("train", "keywords", *few, "--out", "after", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    done = burnish("sft", "--data", "bad.jsonl", *flags(small), cwd=tmp_path)
    assert done.returncode == 1
    assert "bad.jsonl, line 1: a row to learn from needs a text 'answer'" in done.stderr
    done = burnish("plan", "sft", *flags(small), cwd=tmp_path)
    assert "1 × the rows, 4 at a time" in done.stdout, done.stderr


def test_models_are_evaluated_side_by_side(smollm2, tmp_path):
    few = flags(["task.validation_prompts=3", "validation.max_tokens=4", "device=cpu"])
    both = ["--model", str(smollm2), "--model", "smollm2-135m", "-n", "2"]
    done = burnish("eval", "--task", "keywords", *both, *few, "--out", "evals", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report: evals/side-by-side.html" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "validation/accuracy_high" in line]
    assert len(line.split()) == 3
    done = burnish("compare", "evals/1", "evals/2", "--out", "both.html", cwd=tmp_path)
    assert "report: both.html" in done.stdout, done.stderr
    assert "only smollm2-135m is right: 0 of 6" in (tmp_path / "both.html").read_text()
    done = burnish("compare", "evals/1", "evals/2", "--metric", "train/loss", cwd=tmp_path)
    assert "these are evaluations" in done.stderr
    done = burnish("eval", "keywords", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "runs").glob("eval-keywords-*/report.html")
    assert f"report: {made.relative_to(tmp_path)}" in done.stdout
    done = burnish("eval", cwd=tmp_path)
    assert "give a RECIPE or --task NAME" in done.stderr
