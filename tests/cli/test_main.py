"""The command line as a user meets it: its words, its files, its exit code."""

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from rich.console import Console

from burnish.cli import main, tables
from tests.cli.test_serve import tiny as tiny_model

BURNISH = str(Path(sys.executable).with_name("burnish"))
SHORT = ["--set", "train.steps=2", "--set", "train.epochs=1"]


@pytest.fixture
def burnish(tmp_path, monkeypatch, capsys):
    """Runs a command in this process, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "out_console", Console(highlight=False, width=160))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["burnish", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=said.out, err=said.err)

    return run


def test_train_compare_and_the_files(burnish, tmp_path):
    for seed in (0, 1):
        done = burnish("train", "sort", *SHORT, "--seed", seed)
        assert done.code == 0, done.err
        assert "60 responses, 2 gradient steps" in done.out
        assert f"report: runs/sort-{seed + 1}/report.html" in done.out
    assert json.loads((tmp_path / "runs/sort-2/summary.json").read_text())["seed"] == 1
    done = burnish("compare", "runs/sort-1", "runs/sort-2", "--out", "both.html")
    assert done.code == 0, done.err
    header, label, *rows = done.out.splitlines()
    assert header.split() == ["reward", "held", "out", "inclusion", "ended"]
    assert label.strip() == "sort"
    firsts = ["sort-1,", "sort-2,", "mean", "std", "report:"]
    assert [row.split()[0] for row in rows] == firsts
    cells = [row.split(", seed")[-1].split() for row in rows[:4]]
    one, other, mean, std = (float(row[1]) for row in cells)
    assert mean == pytest.approx((one + other) / 2, abs=1e-3)
    assert std == pytest.approx(abs(one - other) / 2**0.5, abs=1.5e-3)  # over N − 1 = 1
    assert abs(one - other) > 0.02  # else the two denominators would look alike
    assert '"seeds":[2]' in (tmp_path / "both.html").read_text()
    assert burnish("train", "sort", *SHORT, "--set", "train.steps=1", "--out", "one").code == 0
    done = burnish("compare", "runs/sort-1", "one")
    named = [line.strip() for line in done.out.splitlines() if "=" in line]
    assert named == ["train.steps = 2", "train.steps = 1"]


@pytest.mark.slow  # three processes that load torch
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


def test_plan_says_what_will_be_computed_and_writes_nothing(burnish, tmp_path):
    done = burnish("plan", "sort", "--set", "objective.kl=k3")
    assert done.code == 0, done.err
    for line in (
        "Σ w_(i,t) (L_t + 0.01 k3_t)",
        "L_t = −min(ρ_t A_t, clip(ρ_t, 0.99, 1.01) A_t)",
        "w_(i,t) = 1 / Σ_i |y_i|",
        "30 responses = 3 prompts × 10 samples",
        "10 per rollout = 1 train batch of 30 responses × 10 epochs",
        "3,000 responses sampled, 1,000 gradient steps",
        "runs/sort-1",
    ):
        assert line in done.out, line
    one = [f"{key}={value}" for key, value in {"steps": 1, "epochs": 1, "batch": 10}.items()]
    planned = burnish("plan", "sort", *flags([f"train.{s}" for s in one], "rollout.batch=10")).out
    for line in ("1 prompt × 10 samples", "1 step: 10 responses sampled, 1 gradient step ("):
        assert line in planned
    assert not list(tmp_path.iterdir())


def test_the_version_is_printed_and_recipes_are_listed(burnish):
    done = burnish("--version")
    assert (done.code, done.out) == (0, f"burnish {version('burnish')}\n")
    listed, _, presets = burnish("recipes").out.partition("\npresets, applied to any recipe")
    assert "the lecture's example" in listed
    assert "DAPO: clip-higher" in presets


def test_the_end_is_told_with_whole_prompts_singulars_and_no_negative_zero(tmp_path, capsys):
    end = {"reward_first": -0.001, "reward_last": -0.0, "responses": 1, "gradient_steps": 1}
    held = {"first": -1e-9, "last": -0.0, "best": -0.0001, "best_step": 1}
    more = {"validation": held, "kl_held_out_k1": -0.004, "before_and_after": []}
    seconds = {"seconds": {"step": 1.0, "learn": 1.0}}
    asked = "Which of these numbers is the largest one: " + ", ".join(map(str, range(200)))
    pair = {"prompt": asked, "before": "y" * 999, "after": "199", "reward_before": -0.0}
    more["before_and_after"] = [pair | {"reward_after": 1.0}]
    (tmp_path / "summary.json").write_text(json.dumps(end | more | seconds))
    main._show_end(tmp_path)
    shown = capsys.readouterr().out
    assert asked in shown
    assert f"before [0] {'y' * 200} …\n" in shown
    assert "reward 0.00 → 0.00, 1 response, 1 gradient step, 1.0 s" in shown
    assert "-0.0" not in shown


def test_watch_serves_until_it_is_interrupted(tmp_path, burnish):
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
    taken = burnish("watch", "--port", url.rstrip("/").rpartition(":")[2])
    assert taken.code == 1
    assert "choose another port with --port" in taken.err
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    done = burnish("watch", "nowhere")
    assert "needs a run directory or a directory of runs, nowhere is neither" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "sort", "--set", "train.step=3"], "did you mean 'train.steps'?"),
        (["train", "nothing"], "there is no recipe 'nothing'"),
        (["train", "keywords", "--data", "none.jsonl"], "no such file"),
        (["compare", "nowhere"], "nowhere is not a run directory"),
        (["plan", "sort", "--set", "objective.advantage.gamma=0.9"], "has no effect"),
        (["generate", "x", "--model", "nothing"], "no model 'nothing'"),
    ],
)
def test_an_error_is_one_message_and_leaves_nothing(arguments, message, tmp_path, burnish):
    done = burnish(*arguments)
    assert done.code == 1
    assert message in done.err.replace("\n", " ")
    assert not list(tmp_path.iterdir())


# `timeout` signals a process, then its whole group.
@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow)],
)
def test_a_stopped_run_is_saved_and_resumed(number, times, tmp_path, burnish):
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
    done = burnish("resume", "run", "--set", "train.learning_rate=1")
    assert done.code == 1
    assert "it alters the results" in done.err
    assert "report: run/report.html" in burnish("report", "run").out


def flags(settings, *more):
    return [flag for setting in (*settings, *more) for flag in ("--set", setting)]


def tiny(smollm2, steps=1):
    """Flags that make the keyword recipe small."""
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128, "name": "scratch"}
    settings = [f"model.{key}={value}" for key, value in size.items()]
    settings += [f"model.tokenizer={smollm2}", f"train.steps={steps}", "device=cpu"]
    return flags(settings) + SMALL


SMALL = flags(
    ["rollout.batch=8", "rollout.group_size=4", "train.batch=8", "rollout.max_tokens=4"],
    "validation.max_tokens=4",
)


def test_train_with_data_and_reward_of_ones_own(burnish, smollm2, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {word}", "word": word}) + "\n" for word in "abcdefgh")
    )
    (tmp_path / "reward.py").write_text(
        "def includes(response, row):\n    return float(row['word'] in response)\n"
    )
    own = ["--data", "data.jsonl", "--reward", "reward.py:includes", "--out", "run"]
    done = burnish("train", "keywords", *own, *tiny(smollm2))
    assert done.code == 0, done.err
    done = burnish("export", "run", "model")
    assert "step-00000001 of run → model" in done.out, done.err
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_directory_of_rows_keeps_the_reward_of_the_recipe(burnish, smollm2, tmp_path):
    (tmp_path / "words").mkdir()
    for name, verb in (("train", "Say"), ("validation", "Write")):
        rows = [{"prompt": f"{verb} {word}.", "keywords": [word]} for word in ("red", "apple")] * 4
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "words" / f"{name}.jsonl").write_text(text)
    done = burnish("train", "keywords", "--data", "words", *tiny(smollm2))
    assert done.code == 0, done.err
    recipe = (tmp_path / "runs/keywords-1/recipe.toml").read_text()
    for line in ('train = "words/train.jsonl"', 'reward = "use"', "must_end = true"):
        assert line in recipe, line
    last = json.loads((tmp_path / "runs/keywords-1/metrics.jsonl").read_text().splitlines()[-1])
    assert {"rollout/part_inclusion", "validation/part_fraction"} <= last.keys()


def test_importing_the_command_line_is_light():
    heavy = ("torch", "ray", "transformers")
    code = f"import sys, burnish.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_generate_prints_every_answer(burnish, tmp_path):
    few = ["-n", 2, "--max-tokens", 4, "--model", tiny_model(tmp_path / "model")]
    done = burnish("generate", "Hello", "What is 2 + 2?", *few)
    assert done.code == 0, done.err
    assert "── prompt 1, sample 1 ──" in done.out
    assert "── prompt 2, sample 2 ──" in done.out
    assert "loading torch" in done.err


def test_a_warm_start_is_trained_on(burnish, smollm2, tmp_path):
    rows = [{"prompt": f"Say {word}", "answer": f"{word} {word}"} for word in "abcdefghij"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128, "name": "scratch"}
    small = flags([f"model.{key}={value}" for key, value in size.items()])
    small += flags([f"model.tokenizer={smollm2}", "train.batch=4", "device=cpu"])
    done = burnish("sft", "--data", "rows.jsonl", "--out", "warm", *small, "--quiet")
    assert done.code == 0, done.err
    assert "step 3/3  loss " in done.out
    assert "3 gradient steps" in done.out
    assert "report: warm/report.html" in done.out
    few = flags(["model.name=warm", "task.validation_prompts=2", "train.steps=1", "device=cpu"])
    done = burnish("train", "keywords", *SMALL, *few, "--out", "after")
    assert done.code == 0, done.err
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    done = burnish("sft", "--data", "bad.jsonl", *small)
    assert done.code == 1
    assert "bad.jsonl, line 1: no field 'answer', only 'prompt'; if another field" in done.err
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": " "}\n')
    done = burnish("sft", "--data", "bad.jsonl", *small)
    assert "bad.jsonl, line 1: a row to learn from needs a text 'answer'" in done.err
    done = burnish("plan", "sft", *small)
    assert done.code == 1  # the run can't start: there is no file of rows
    assert "1 × the rows, 4 at a time" in done.out, done.err


@pytest.mark.slow
def test_models_are_evaluated_side_by_side(burnish, smollm2, tmp_path):
    few = flags(["task.validation_prompts=2", "validation.max_tokens=2", "device=cpu"])
    both = ["--model", smollm2, "--model", "smollm2-135m", "-n", 2]
    done = burnish("eval", "keywords", *both, *few, "--out", "evals")
    assert done.code == 0, done.err
    assert "report: evals/side-by-side.html" in done.out
    (line,) = [line for line in done.out.splitlines() if "validation/accuracy_high" in line]
    assert len(line.split()) == 3
    done = burnish("compare", "evals/1", "evals/2", "--out", "both.html")
    assert "report: both.html" in done.out, done.err
    assert "<th>smollm2-135m</th>" in (tmp_path / "both.html").read_text()
    done = burnish("eval", "keywords", "--max-tokens", 2, *few[:2], *few[4:])
    assert done.code == 0, done.err
    (made,) = (tmp_path / "runs").glob("eval-keywords-*/report.html")
    assert f"report: {made.relative_to(tmp_path)}" in done.out


def test_the_consoles_take_no_text_for_an_emoji(monkeypatch):
    text = "/tmp/rw.py:x: and :warning:"
    for console in (tables.out_console, tables.err_console):
        with console.capture() as printed:
            console.print(text)
        assert printed.get() == f"{text}\n"
    with tables.out_console.capture() as printed:
        tables.print_sections([("title", [("reward", text)])])
        tables.print_text(text)
    assert printed.get().count(text) == 2
