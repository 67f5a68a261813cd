"""A run and its files: whole, stopped and resumed, killed and resumed; always the same bytes."""

import hashlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import burnish
from burnish import api
from burnish.cli import main
from burnish.engine.sorter import SorterEngine
from burnish.errors import ActorDied, ActorError, BurnishError, ConfigError, RunError
from burnish.launch import local
from burnish.launch.models import with_own_precision
from burnish.loops.evaluate import Evaluator
from burnish.loops.recorder import go_back
from burnish.machine import hardware
from burnish.recipe.load import effective_settings, load_recipe
from burnish.rollout.buffer import Buffer
from burnish.runs import checkpoints
from burnish.runs.report import write_report
from burnish.runs.run import unsaved_best
from burnish.tasks.sorting import Sorting
from burnish.types import Grade, Status
from tests.conftest import aborted

SAME = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "log.txt")
SORT = ["train.steps=6", "train.epochs=2", "checkpoint.every=2", "validation.every=3"]
SORT += ["objective.kl=k3", "objective.entropy={target = 1.2, delta = 0.01}"]
MANY = ["task.prompts=7", "rollout.group_size=2", "rollout.batch=6", "train.batch=6"]
"""More prompts than a step asks."""


def tiny(smollm2, *more):
    """A small random transformer on the keyword task, bf16 over fp32 masters."""
    size = {"layers": 2, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    model = [f"model.{key}={value}" for key, value in size.items()]
    return [
        "model.name=scratch", f"model.tokenizer={smollm2}", *model, "device=cpu",
        "task.validation_prompts=4", "task.must_end=false", "rollout.max_tokens=6",
        "rollout.batch=8", "rollout.group_size=4", "train.batch=8", "train.steps=4",
        "train.learning_rate=1e-3", "checkpoint.every=2", "validation.every=3", *more,
    ]  # fmt: skip


def stopper(after):
    """Asks to stop once that many steps have been asked about."""
    asked = iter(range(after - 1))
    return lambda: next(asked, None) is None


CLOCKS = ("timings.jsonl", "turn_times.jsonl", "status.json", "restarts.txt", "ledger.jsonl")
"""Files of clocks and of restarts; TensorBoard's events are a file for each restart."""


def fingerprint(path):
    """Every file of a run as it must be whatever interrupted the run: a hash, or the content
    without clocks, without the number of restarts, and without the hashes of such fields."""
    path = Path(path)
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in CLOCKS)
    files = (file for file in files if not file.name.startswith("events."))
    return {str(file.relative_to(path)): steady(file) for file in files}


def steady(file):
    if file.name == "summary.json":
        return without(json.loads(file.read_text()), "seconds")
    if file.name.startswith("step-"):
        tensors, state = checkpoints.load_checkpoint(file)
        state = without(state, "incarnation")
        state |= {"positions": without(state["positions"], "timings.jsonl", "turn_times.jsonl")}
        flat = {name: t.reshape(-1).view(torch.uint8) for name, t in tensors.items()}
        bits = {name: t.numpy().tobytes() for name, t in flat.items()}
        return checkpoints.read_info(file)[:3], state, bits
    if file.name == "report.html":
        page, _, rest = file.read_text().partition('id="data">')
        data, _, end = rest.partition("</script>")
        data = without(json.loads(data), "asof", "clocks", "run")
        data["rollouts"]["rows"] = [untimed(row) for row in data["rollouts"]["rows"]]
        return page, data, end
    return hashlib.sha256(file.read_bytes()).hexdigest()


def untimed(row):
    """A response of a page without the seconds of its environment's calls."""
    turns = [without(turn, "seconds") for turn in row.get("turns", ())]
    return row | {"turns": turns}


def without(table, *names):
    return {key: value for key, value in table.items() if key not in names}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory):
    return api.train("sort", overrides=SORT, out=tmp_path_factory.mktemp("sort") / "whole")


@pytest.fixture(scope="module")
def language_run(smollm2, tmp_path_factory):
    path = tmp_path_factory.mktemp("language") / "whole"
    return api.train("keywords", overrides=tiny(smollm2), out=path)


def test_a_run_leaves_its_directory(tmp_path):
    seen = []
    path = api.train("sort", overrides=["train.steps=3"], out=tmp_path / "run", show=seen.append)
    steps = [progress for progress in seen if progress.phase == "step"]
    assert [progress.step for progress in steps] == [1, 2, 3]
    assert all("rollout/reward" in progress.metrics for progress in steps)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "validation/reward" in rows[0]
    assert "validation/reward" in rows[3]
    timings = [json.loads(line) for line in (path / "timings.jsonl").read_text().splitlines()]
    for row in timings:
        phases = [v for k, v in row.items() if k.startswith("time/") and k != "time/step"]
        assert sum(phases) == pytest.approx(row["time/step"])
    assert not any(key.startswith("time/") for key in rows[1])
    asked = effective_settings(with_own_precision(load_recipe("sort", ["train.steps=3"])))
    assert effective_settings(load_recipe(str(path / "recipe.toml"))) == asked
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["gradient_steps"], summary["responses"]) == (30, 90)
    assert len(summary["before_and_after"]) == 3
    log = (path / "log.txt").read_text()
    assert log.startswith("step 1\n  prompt '")
    assert log.count("prompt") == 9
    assert "<html" in (path / "report.html").read_text()


LINEAR = ["train.schedule=linear", "checkpoint.every=4", "train.weight_decay=0.5"]
LINEAR += ["objective.kl.refresh=4"]
REFRESHED = [*MANY, "objective.kl.refresh=4"]
AVERAGED = ["objective.kl.ema=0.9"]
FULL = [*MANY, "selection.dead_groups=active", "selection.on_bound=learn"]
LAGGED = [*MANY, "selection.dead_groups=dynamic", "loop.lag=1", "objective.proximal=behavior"]
LAGGED += ["selection.leave_at=0.5", "selection.target=0.2"]


@pytest.mark.parametrize(
    ("stop_after", "more"),
    [(1, REFRESHED), (4, AVERAGED), (5, LINEAR), (3, FULL), (3, LAGGED)],
)
def test_stopped_and_resumed_equals_never_stopped(stop_after, more, tmp_path):
    asked = SORT + more
    whole = api.train("sort", overrides=asked, out=tmp_path / "whole")
    path = api.train("sort", overrides=asked, out=tmp_path / "run", stop=stopper(stop_after))
    assert checkpoints.step_of(checkpoints.latest(path)) == stop_after
    assert not (path / "summary.json").exists()
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)
    restarts = [
        checkpoints.load_checkpoint(checkpoints.latest(p))[1]["incarnation"] for p in (whole, path)
    ]
    assert restarts == [0, 1]


def test_a_checkpoint_has_the_score_of_its_own_step_or_none(tmp_path):
    asked = {"train": {"steps": 30, "epochs": 1}, "validation": {"every": 15}}
    asked["checkpoint"] = {"every": 10, "keep": 3}
    whole = api.train("sort", out=tmp_path / "whole", **asked)
    scores = {row["step"]: row.get("validation/reward") for row in whole.metrics}
    assert {s.step: s.score for s in whole.checkpoints} == {10: None, 20: None, 30: scores[30]}
    path = api.train("sort", out=tmp_path / "run", stop=stopper(16), **asked)
    assert {s.step: s.score for s in path.checkpoints} == {10: None, 16: None}
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)


def test_a_stop_at_the_best_step_keeps_what_would_have_been_kept(tmp_path, monkeypatch):
    """The best checkpoint of the interval is not given up for one that goes again."""
    real = checkpoints.save_checkpoint

    def save(run, step, *given, score, **how):
        return real(run, step, *given, score={2: 0.5, 4: 0.1, 5: 0.9}.get(step), **how)

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)
    asked = {"overrides": [*SORT, "checkpoint.keep=1"]}
    whole = api.train("sort", out=tmp_path / "whole", **asked)
    assert [saved.step for saved in whole.checkpoints] == [2, 6]
    path = api.train("sort", out=tmp_path / "run", stop=stopper(5), **asked)
    assert [saved.step for saved in path.checkpoints] == [2, 5]
    assert path.best.step == 5
    api.resume(path)
    assert [saved.step for saved in path.checkpoints] == [2, 6]
    assert fingerprint(path) == fingerprint(whole)


def set_held_out_rewards(monkeypatch, rewards):
    """Replace the held-out reward of some steps."""
    real = Evaluator.validate

    def validate(self, drift, when, *limit):
        groups, metrics = real(self, drift, when, *limit)
        step = int(when.removeprefix("after step ")) if "after" in when else 0
        return groups, metrics | ({"validation/reward": rewards[step]} if step in rewards else {})

    monkeypatch.setattr(Evaluator, "validate", validate)


@pytest.mark.parametrize("second", [4.0, 6.0])
def test_more_steps_do_not_delete_the_best_checkpoint(second, tmp_path, monkeypatch):
    """The run has ended at a step that is no multiple of checkpoint.every."""
    scores = {3: 5.0, 4: second}
    set_held_out_rewards(monkeypatch, scores)
    few = ["train.steps=3", "validation.every=10", "checkpoint.every=10"]
    path = api.train("sort", overrides=few, out=tmp_path / "run")
    assert path.best.step == 3
    api.resume(path, overrides=["train.steps=4"])
    best = max(scores, key=scores.get)
    assert [saved.step for saved in path.checkpoints] == sorted({best, 4})
    validation = json.loads((path / "summary.json").read_text())["validation"]
    assert (validation["best"], validation["best_step"]) == (scores[best], best)
    assert path.best.step == checkpoints.step_of(checkpoints.find_checkpoint(path, "best")) == best
    assert unsaved_best(path) is None


@pytest.mark.parametrize("step", [0, 3])
def test_a_best_validation_without_a_checkpoint_is_said(step, tmp_path, monkeypatch, capsys):
    set_held_out_rewards(monkeypatch, {step: 6.0, 4: 5.5})
    sets = ["train.steps=6", "validation.every=1", "checkpoint.every=2"]
    arguments = ["train", "sort", "--out", str(tmp_path / "run"), "--quiet"]
    monkeypatch.setattr(
        "sys.argv", ["burnish", *arguments, *(w for s in sets for w in ("--set", s))]
    )
    with pytest.raises(SystemExit, match="0"):
        main.main()
    when = f"at step {step}" if step else "before the first step"
    said = f"the best validation (6.000) was {when}, which has no checkpoint; step-00000004 is "
    assert f"{said}the best that is saved (5.500)" in " ".join(capsys.readouterr().out.split())
    assert burnish.Run(tmp_path / "run").best.step == 4


def test_weights_say_how_often_the_run_was_restarted(tmp_path, monkeypatch):
    """Also after a restart that ended before it saved anything."""
    from burnish.engine.sorter import SorterEngine

    path = api.train("sort", overrides=SORT, out=tmp_path / "run", stop=stopper(2))
    seen = []
    real = SorterEngine.load

    def load(self, weights):
        seen.append(weights.incarnation)
        if len(seen) == 1:
            raise BurnishError("gone")
        real(self, weights)

    monkeypatch.setattr(SorterEngine, "load", load)
    with pytest.raises(BurnishError, match="gone"):
        api.resume(path)
    api.resume(path)
    assert set(seen[1:]) == {2}
    assert (path / "restarts.txt").read_text() == "from step 2\n" * 2


def test_a_language_model_resumes_bit_for_bit(smollm2, language_run, tmp_path):
    path = api.train("keywords", overrides=tiny(smollm2), out=tmp_path / "run", stop=stopper(3))
    # What a crash leaves behind a checkpoint is cut off.
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "roll')
    api.resume(path)
    assert fingerprint(path) == fingerprint(language_run)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/grad_norm"] >= 0
    assert rows[-1]["mismatch/logprob_max"] < 0.1


def test_greedy_validation_measures_no_kl(smollm2, language_run, tmp_path):
    sets = tiny(smollm2, "train.steps=1", "validation.temperature=0")
    greedy = api.train("keywords", overrides=sets, out=tmp_path / "run")
    for run, is_greedy in ((greedy, True), (language_run, False)):
        last = run.metrics[-1]
        assert ("kl/held_out_k1" not in last) == is_greedy
        assert all(math.isfinite(value) for value in last.values())


def test_nothing_reads_memory_that_was_never_written(smollm2, language_run, tmp_path, monkeypatch):
    """Fresh memory full of NaN leaves the same bytes as fresh memory full of anything."""
    set_up = hardware.set_up_torch

    def set_up_and_fill(threads):
        set_up(threads)
        assert not torch.utils.deterministic.fill_uninitialized_memory
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)

    monkeypatch.setattr(hardware, "set_up_torch", set_up_and_fill)
    filled = api.train("keywords", overrides=tiny(smollm2), out=tmp_path / "filled")
    assert torch.empty(1).isnan()
    assert fingerprint(filled) == fingerprint(language_run)


def test_more_steps_may_be_asked_for_and_other_mathematics_not(tmp_path):
    path = api.train("sort", overrides=SORT, out=tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"train\.learning_rate can't change when a run is resumed"
    ):
        api.resume(path, overrides=["train.learning_rate=0.1"])
    with pytest.raises(ConfigError, match="can only grow"):
        api.resume(path, overrides=["train.steps=2"])
    api.resume(path, overrides=["train.steps=8", "checkpoint.every=4"])
    longer = api.train("sort", overrides=[*SORT, "train.steps=8"], out=tmp_path / "longer")
    rows = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(9))
    ours, theirs = (checkpoints.load_checkpoint(checkpoints.latest(p))[0] for p in (path, longer))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_longer_run_decays_as_it_began_to(tmp_path):
    share = 0.25
    sets = ["train.schedule=linear", f"train.final_share={share}", "train.weight_decay=0.1"]
    path = api.train("sort", overrides=[*SORT, *sets], out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"train\.final_share can't change"):
        api.resume(path, overrides=["train.final_share=0.5"])
    api.resume(path, overrides=["train.steps=8"])
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rates = [row["train/learning_rate"] for row in rows[1:]]
    fallen = [(step + 0.5) / 12 for step in range(0, 12, 2)]  # two steps a rollout
    pairs = [1e-3 * (1 - (1 - share) * x) for x in fallen]
    assert rates == pytest.approx([*pairs, 1e-3 * share, 1e-3 * share])
    assert load_recipe(str(path / "recipe.toml")).train.decay_steps == 12


def test_an_environment_that_changed_is_named(tmp_path):
    path = api.train("sort", overrides=SORT, out=tmp_path / "run", stop=stopper(2))
    file = path / "environment.json"
    file.write_text(file.read_text().replace('"python": "', '"python": "2.'))
    with pytest.raises(RunError, match=r"python: 2\.3.* resume with --anyway"):
        api.resume(path)
    api.resume(path, anyway=True)


def test_a_run_resumes_from_another_commit_command_and_host(tmp_path):
    path = api.train("sort", overrides=SORT, out=tmp_path / "run", stop=stopper(2))
    file = path / "environment.json"
    found = json.loads(file.read_text())
    found["started"] = {"command": "other", "host": "other", "commit": "0", "modified": True}
    file.write_text(json.dumps(found))
    api.resume(path)
    assert json.loads(file.read_text())["started"]["host"] == "other"  # how it was first started
    del found["started"]  # a run of an earlier version
    file.write_text(json.dumps(found))
    api.resume(path, overrides=["train.steps=7"])


def test_what_bits_depend_on_is_recorded(sorted_run):
    found = json.loads((sorted_run / "environment.json").read_text())
    assert found["packages"].keys() == {"torch", "numpy", "pydantic", "numba", "triton"}
    assert hardware.processor() in found["processor"]
    assert found["gpu"] is None
    assert found["inputs"].keys() == {"code"}
    assert found["started"].keys() == {"command", "directory", "host", "commit", "modified"}


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_model_other_rows_or_another_reward(smollm2, tmp_path):
    names = ("tokenizer.json", "tokenizer_config.json", "config.json")
    (tmp_path / "tokenizer").mkdir()
    for name in names:
        if (smollm2 / name).is_file():
            (tmp_path / "tokenizer" / name).write_bytes((smollm2 / name).read_bytes())
    rows = [json.dumps({"prompt": f"Say {word}.", "limit": 20}) + "\n" for word in "abcdefghij"]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [s for s in tiny(tmp_path / "tokenizer") if not s.startswith("task.")]
    given = {"data": tmp_path / "rows.jsonl", "reward": f"{tmp_path / 'reward.py'}:short"}
    given |= {"overrides": settings, "stop": stopper(2)}
    path = api.train("keywords", out=tmp_path / "run", **given)
    for file, what in (
        ("tokenizer/config.json", "model"),
        ("rows.jsonl", r"task\.train"),
        ("reward.py", r"task\.reward"),
    ):
        before = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(before + b"\n")
        if file == "rows.jsonl":
            (tmp_path / file).write_bytes(before.replace(b"20", b"19", 1))
        with pytest.raises(RunError, match=rf"\(inputs\.{what}: \w+ → \w+\).*resume with --anyway"):
            api.resume(path)
        (tmp_path / file).write_bytes(before)
    assert api.resume(path).metrics[-1]["step"] == 4


@pytest.mark.slow
def test_a_run_of_a_model_that_a_run_learned_does_not_go_on_with_another(smollm2, tmp_path):
    """That run has gone on, and its best checkpoint is another one by now."""
    short = tiny(smollm2, "train.steps=2", "train.schedule=constant")
    first = api.train("keywords", overrides=short, out=tmp_path / "first")
    own = [s for s in tiny(smollm2) if not s.startswith("model.")]
    own.append(f"model.name={first}")
    path = api.train("keywords", overrides=own, out=tmp_path / "run", stop=stopper(2))
    api.resume(first, overrides=["train.steps=3"])
    (first / "checkpoints" / "step-00000002").unlink()
    with pytest.raises(RunError, match=r"\(inputs\.model: \w+ → \w+\)"):
        api.resume(path)


def test_nothing_is_deleted_before_a_run_can_resume(tmp_path):
    asked = [*SORT, "checkpoint.every=1", "checkpoint.keep=9"]
    path = api.train("sort", overrides=asked, out=tmp_path / "run")
    before = fingerprint(path)
    log = (path / "log.txt").read_bytes()
    (path / "log.txt").write_bytes(log[:10])
    with pytest.raises(RunError, match=r"log\.txt holds 10 bytes"):
        api.resume(path, from_checkpoint="step-00000002")
    (path / "log.txt").write_bytes(log)
    assert fingerprint(path) == before
    api.resume(path, from_checkpoint="step-00000002")
    assert fingerprint(path) == before


def test_a_damaged_checkpoint_is_said_and_the_one_before_used_if_asked(sorted_run, tmp_path):
    path = api.train("sort", overrides=SORT, out=tmp_path / "run", stop=stopper(5))
    damaged = checkpoints.latest(path)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    with pytest.raises(RunError, match="--from"):
        api.resume(path)
    with pytest.raises(RunError, match="has no checkpoint 'step-9'; it has step-"):
        api.resume(path, from_checkpoint="step-9")
    api.resume(path, from_checkpoint="step-00000004")
    assert fingerprint(path) == fingerprint(sorted_run)


def test_a_halted_run_keeps_what_it_had(tmp_path, monkeypatch):
    from burnish.tasks.sorting import Sorting

    graded = []
    real = Sorting.grade_all

    def failing(self, pairs):
        graded.extend(pairs)
        if len(graded) > 8 + 4 * 6:
            raise BurnishError("the grader is gone")
        return real(self, pairs)

    overrides = ["train.steps=9", "checkpoint.every=100", "validation.every=100", *MANY]
    whole = api.train("sort", overrides=overrides, out=tmp_path / "whole")
    monkeypatch.setattr(Sorting, "grade_all", failing)
    with pytest.raises(BurnishError, match="the grader is gone"):
        api.train("sort", overrides=overrides, out=tmp_path / "run")
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "run")) == 4
    write_report(tmp_path / "run")
    monkeypatch.undo()
    api.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(whole)


def test_a_run_that_halts_right_after_a_checkpoint_keeps_that_one(
    sorted_run, tmp_path, monkeypatch
):
    from burnish.tasks.sorting import Sorting

    monkeypatch.setattr(Sorting, "prompt", halting(Sorting.prompt, after=4 * 3))
    with pytest.raises(BurnishError, match="no more prompts"):
        api.train("sort", overrides=SORT, out=tmp_path / "run")
    monkeypatch.undo()
    names = [path.name for path in checkpoints.list_checkpoints(tmp_path / "run")]
    assert names == ["step-00000002", "step-00000004"]
    api.resume(tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(sorted_run)


def halting(prompt, *, after):
    def limited(self, index):
        if index >= after:
            raise BurnishError("no more prompts")
        return prompt(self, index)

    return limited


def test_an_exported_model_repeats_the_validation(smollm2, language_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = language_run
    chosen = api.export(path, tmp_path / "hf", which="last")
    assert chosen.name == "step-00000004"
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    AutoTokenizer.from_pretrained(tmp_path / "hf")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    keep = ("task.", "rollout.")
    settings = [setting for setting in tiny(smollm2) if setting.startswith(keep)]
    again = api.evaluate("keywords", overrides=[f"model.name={tmp_path / 'hf'}", "device=cpu",
                                                "train.batch=8", *settings])  # fmt: skip
    for name, value in again.figures.items():
        assert value == pytest.approx(rows[-1][name]), name
    with pytest.raises(RunError, match="is not empty"):
        api.export(path, tmp_path / "hf")


def test_a_run_that_begins_again_replays_nothing(two_groups):
    """A learner that dies before the first checkpoint leaves the driver with its old buffer."""
    prompts = SimpleNamespace(load_state=lambda state: None)
    parts = SimpleNamespace(prompts=prompts, buffer=Buffer(4), learner=SimpleNamespace())
    parts.buffer.put(two_groups)
    directory = SimpleNamespace(cut_back=lambda positions: None, restart=lambda step: 1)
    assert go_back(directory, parts, None) == 0
    assert not parts.buffer.kept


def test_an_export_that_fails_leaves_nothing(language_run, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr("burnish.model.checkpoint.shutil.copyfile", full)
    with pytest.raises(OSError, match="no space"):
        api.export(language_run, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


REWARD = """
def short(response, row):
    return {"reward": float(len(response) < row["limit"]), "length": len(response)}
"""


def test_own_rewards_leave_the_same_whether_they_run_here_or_in_workers(smollm2, tmp_path):
    """A function that lives in this process alone is called here, one in a file by workers."""
    names = {}
    exec(REWARD, names)
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    rows = [{"prompt": f"Say {word}.", "limit": 20} for word in "abcdefghij"]
    settings = [s for s in tiny(smollm2, "train.steps=2") if not s.startswith("task.")]
    here, there = (
        api.train("keywords", prompts=rows, reward=reward, overrides=settings, out=tmp_path / out)
        for reward, out in ((names["short"], "here"), (f"{file}:short", "there"))
    )
    for name in SAME:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    last = json.loads((here / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/grades_scored"] == 1.0
    assert "rollout/part_length" in last
    clocks = [
        [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
        for run in (here, there)
    ]
    assert [row.keys() for row in clocks[0]] == [row.keys() for row in clocks[1]]
    assert all(row["time/grade"] > 0 for rows in clocks for row in rows[1:])


def test_prompts_for_a_task_that_has_its_own_are_refused():
    with pytest.raises(ConfigError, match=r"'files' does not go with model\.name = 'sorter'"):
        api.train(load_recipe("sort"), prompts=["a"])


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(smollm2, tmp_path, monkeypatch):
    """kill -9 of a run and of its resumptions, until ten have hit and it has finished."""
    overrides = tiny(smollm2, "train.steps=12", "checkpoint.every=1")
    whole = api.train("keywords", overrides=overrides, out=tmp_path / "whole")
    path = tmp_path / "run"
    moments = random.Random(0)
    # Not plain forks: OpenMP's threads do not follow into them.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["burnish.api", "burnish.learner.learner", "burnish.engine.native.cpu_kernels"]
    )

    def process():
        if (path / "recipe.toml").exists():
            return context.Process(target=api.resume, args=(path,))
        first = {"overrides": overrides, "out": path}
        return context.Process(target=api.train, args=("keywords",), kwargs=first)

    kills = 0
    deadline = time.monotonic() + 240
    while not (path / "summary.json").exists() or kills < 10:
        assert time.monotonic() < deadline, f"{kills} kills and no end within four minutes"
        if kills >= 10:
            last = process()
            last.start()
            last.join(120)
            assert last.exitcode == 0
            continue
        if (path / "summary.json").exists():  # it got to the end too soon: once more from the start
            shutil.rmtree(path)
        victim = process()
        victim.start()
        victim.join(moments.uniform(0.5, 4.0))
        if victim.is_alive():
            os.kill(victim.pid, signal.SIGKILL)
            kills += 1
        victim.join()
    assert kills >= 10
    assert fingerprint(path) == fingerprint(whole)


def test_a_run_whose_reward_always_fails_names_the_error(tmp_path, monkeypatch):
    failure = Grade(math.nan, status=Status.ERROR, message="ZeroDivisionError: division by zero")
    monkeypatch.setattr(Sorting, "grade_all", lambda self, items: [failure for _ in items])
    change = ["train.steps=2", "rollout.max_errors=1"]
    run = api.train("sort", overrides=change, out=tmp_path / "run")
    (warning,) = run.warnings
    assert warning.startswith(
        "No response was graded, so nothing was learned. The most frequent error: "
        "ZeroDivisionError: division by zero."
    )
    rows = run.rollouts
    assert {(row["status"], row["message"]) for row in rows} == {("error", failure.message)}
    assert f"[error: {failure.message}]" in (run.path / "log.txt").read_text()


def test_a_run_that_never_gets_a_grade_ends_with_readable_files(tmp_path, monkeypatch, capsys):
    real = SorterEngine.step
    monkeypatch.setattr(SorterEngine, "step", lambda self: list(map(aborted, real(self))))
    change = ["train.steps=2", "rollout.max_errors=1"]
    run = api.train("sort", overrides=change, out=tmp_path / "run")
    rows = run.metrics
    assert [row["train/version"] for row in rows[1:]] == [0, 0]
    assert [row["train/skipped"] for row in rows[1:]] == [10, 10]
    assert rows[0]["validation/aborted"] == rows[1]["rollout/aborted"] == 1
    assert (run.summary["responses"], run.summary["gradient_steps"]) == (60, 0)
    write_report(run.path)
    main._show_end(run.path)
    shown = capsys.readouterr().out
    assert "no response was graded, 60 responses, 0 gradient steps" in shown
    assert "before [no grade]" in shown


def mortal(monkeypatch, at, *, in_recovery=0):
    """Runs of this process whose learner dies when step ``at`` is learned, each time that the step
    comes until the list is empty, and in so many recoveries after it."""
    deaths, recoveries = list(at), iter(range(in_recovery))
    built = local.build_local
    revived = []

    def build_mortal(resolved):
        parts = built(resolved)
        load = parts.learner.load_state

        def train(**how):
            for step in parts.train(**how):
                if deaths and step.number == deaths[0]:
                    deaths.pop(0)
                    raise ActorDied("learner died (exit type TEST)")
                yield step

        def load_state(state):
            if next(recoveries, None) is not None:
                raise ActorDied("learner died (exit type RECOVERY)")
            load(state)

        parts.learner.load_state = load_state
        return parts._replace(train=train, revive=lambda: revived.append(1))

    monkeypatch.setattr(local, "build_local", build_mortal)
    return revived


def test_a_learner_that_dies_while_it_recovers_costs_time_alone(tmp_path, monkeypatch):
    settings = {"train": {"steps": 6}, "checkpoint": {"every": 2}, "show": False}
    whole = burnish.train("sort", out=tmp_path / "whole", **settings)
    revived = mortal(monkeypatch, [3, 5], in_recovery=2)
    run = burnish.train("sort", out=tmp_path / "run", **settings)
    assert len(revived) == 4
    assert (run / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()


def test_a_learner_that_dies_at_the_same_step_again_and_again_ends_the_run(tmp_path, monkeypatch):
    mortal(monkeypatch, [3] * 100)
    with pytest.raises(ActorError, match="died 5 times without progress beyond step 2"):
        burnish.train("sort", out=tmp_path / "run", show=False, train={"steps": 6})


@pytest.mark.parametrize("lag", [0, 2])
def test_active_sampling_resumes_bit_for_bit(tmp_path, lag):
    """Rollouts in flight have prompts in reserve, which a checkpoint keeps."""
    chosen = {"dead_groups": "active", "leave_at": 0.9, "on_bound": "learn", "max_asked": 4}
    sizes = {"rollout": {"batch": 6, "group_size": 2}, "train": {"steps": 8, "batch": 6}}
    settings = sizes | {"task": {"prompts": 40}, "selection": chosen, "checkpoint": {"every": 3}}
    settings |= {"loop": {"lag": lag}, "objective": {"proximal": "behavior"}, "show": False}
    whole = burnish.train("sort", out=tmp_path / "whole" / "run", **settings)
    assert any(row["rollout/asked_per_used"] > 1 for row in whole.metrics if row["step"])
    path = tmp_path / "parts" / "run"
    burnish.train("sort", out=path, stop=stopper(2), **settings)
    burnish.resume(path, stop=stopper(3), show=False)
    burnish.resume(path, show=False)
    assert fingerprint(path) == fingerprint(whole.path)
