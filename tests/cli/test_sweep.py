"""Sweeps: their files, what is refused, what is kept and resumed, and how they end."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from burnish import api
from burnish.cli import sweep
from burnish.errors import ConfigError, MissingExtra, RunError

HEAD = """
recipes = ["sort"]
seeds = [0, 1]
set = { "train.steps" = 2, "train.epochs" = 1, "objective.proximal" = "behavior" }
"""
GRID = '[grid]\n"loop.lag" = [0, 1]\n'
AFTER_A_WARM_START = {
    "adapters",
    "adapters-arithmetic",
    "distill",
    "learned_reward",
    "presets",
    "shorter",
}
"""Experiments that need rows and a run which their files say how to make."""
EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))


def plan(file, out):
    return sweep.plan_jobs(file, sweep.read_sweep(file), out)


def write(path, text):
    (path / "lags.toml").write_text(text)
    return path / "lags.toml"


def test_a_sweep_is_the_product_of_recipes_variants_grid_and_seeds(tmp_path):
    (tmp_path / "mine.toml").write_text('task = "sort"\n[rollout]\nbatch = 60\n')
    text = """
    recipes = ["sort", "mine.toml"]
    seeds = [3, 4]
    set = { "objective.proximal" = "behavior" }
    [grid]
    loop.lag = [0, 1]
    "objective.loss" = ["clip", { name = "clip", low = 0.1 }]
    [variants]
    "as it is" = {}
    "short / sharp" = { train = { steps = 5 } }
    """
    jobs = plan(write(tmp_path, text), tmp_path / "out")
    assert len(jobs) == len({job.path for job in jobs}) == 2 * 2 * 4 * 2
    last = jobs[-1]
    table = "{'name': 'clip', 'low': 0.1}"
    assert last.label == f"short / sharp, loop.lag = 1, objective.loss = {table}, mine"
    assert last.path.name == "short-sharp-loop.lag=1-objective.loss=-name-clip-low-0.1-mine-s4"
    recipe = last.recipe
    assert (recipe.seed, recipe.loop.lag, recipe.train.steps, recipe.rollout.batch) == (4, 1, 5, 60)
    assert recipe.objective.loss.low == 0.1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + '[grid]\n"loop.lagg" = [1]\n', "loop.lagg = 1: unknown setting 'loop.lagg'"),
        (HEAD + '[grid]\n"loop.lag" = [-1]\n', "loop.lag = -1: loop.lag must be greater"),
        (HEAD + '[grid]\n"loop.lag" = []\n', "grid.loop.lag must have at least 1 item"),
        (HEAD + '[variants]\n"a b" = { "train.bach" = 3 }\n', "a b: unknown setting 'train.bach'"),
        (HEAD + '[variants]\na = { "loop.lag" = 1 }\n' + GRID, "loop.lag is given twice"),
        (HEAD + "[variants]\na = { seed = 1 }\n", "a: seed is given twice"),
        (HEAD + '[grid]\n"loop.lag" = [1, 1]\n', "loop.lag=1-s0 are the same run"),
        (HEAD + "[variants]\na = {}\nb = {}\n", "a-s0 and b-s0 are the same run"),
        (HEAD.replace("[0, 1]", "[0, 0]"), "sort-s0 and sort-s0 are the same run"),
        (HEAD.replace("[0, 1]", "[]"), "seeds must have at least 1 item"),
        (HEAD.replace("recipes", "recipe"), "unknown setting 'recipe'; did you mean 'recipes'?"),
        (HEAD.replace('"sort"', '"sorted"'), "sorted: there is no recipe 'sorted'"),
        ("seeds = [0]", "recipes must have at least 1 item"),
        ("seeds = [0", "is not a TOML file"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_whole(tmp_path, text, told):
    with pytest.raises(ConfigError) as error:
        plan(write(tmp_path, text), tmp_path / "out")
    assert "lags.toml" in str(error.value)
    assert told in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_the_experiments_can_run(file, tmp_path, monkeypatch):
    if file.stem in AFTER_A_WARM_START:
        monkeypatch.setattr(sweep, "find_problems", lambda recipe: [])
    jobs = plan(file, tmp_path)
    responses = {job.recipe.train.steps * job.recipe.rollout.batch for job in jobs}
    # The same number of responses is learned from; presets sample the same number of tokens.
    assert len(responses) == 1 or file.stem == "presets"
    assert len({job.recipe.seed for job in jobs}) >= 3


def test_the_example_in_the_docs_can_run(tmp_path):
    page = (EXPERIMENTS[0].parents[1] / "docs" / "experiments.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    assert len(plan(write(tmp_path, text), tmp_path)) == 3 * 3 * 2


def start(job, **settings):
    return api.train(job.recipe, out=job.path, show=False, **settings)


@pytest.mark.slow
def test_finished_runs_are_kept_and_stopped_ones_resumed(tmp_path):
    file, out, said = write(tmp_path, HEAD), tmp_path / "out", []
    finished, stopped = plan(file, out)
    start(finished)
    start(stopped, stop=lambda: True)
    before = (finished.path / "summary.json").stat().st_mtime_ns
    assert sweep.run_sweep(file, out, said.append) == {}
    assert (finished.path / "summary.json").stat().st_mtime_ns == before
    assert (stopped.path / "restarts.txt").read_text() == "from step 1\n"
    assert said[0].startswith("2 runs, 1 of them finished before")
    assert said[-1] == "2 of 2 runs are done"
    assert (out / "sweep.html").is_file()
    other = HEAD.replace('"train.epochs" = 1', '"train.epochs" = 3')
    with pytest.raises(RunError, match=r"sort-s0 is a run of another recipe \(train.epochs: 1 → 3"):
        plan(write(tmp_path, other), out)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    file, out, said = write(tmp_path, HEAD + "checkpoints = false\n"), tmp_path / "out", []
    first, second = plan(file, out)
    first.path.mkdir(parents=True)
    (first.path / "notes.txt").touch()  # a run needs an empty directory
    failed = sweep.run_sweep(file, out, said.append)
    assert list(failed) == ["sort-s0"]
    assert "sort-s0 must be new or empty, but it contains notes.txt" in failed["sort-s0"]
    assert second.is_finished
    assert not (second.path / "checkpoints").exists()
    assert said[-1] == "2 of 2 runs are done"


def test_several_at_a_time_need_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "is_installed", lambda extra: extra != "ray")
    with pytest.raises(
        MissingExtra, match=r"--parallel needs the optional part 'ray'.*burnish\[ray"
    ):
        sweep.run_sweep(write(tmp_path, HEAD), tmp_path / "out", print, parallel=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def begin(file, out, *options):
    code = "from burnish.cli.main import main; main()"
    command = [sys.executable, "-c", code, "sweep", str(file), "--out", str(out), *options]
    how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=out.parent, **how)


def alive(folder):
    """Processes that were started in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_bytes())
    return found


def until(happened, seconds=180):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


LONG = HEAD.replace('"train.steps" = 2', '"train.steps" = 100000') + GRID


@pytest.mark.slow  # it waits for a run to begin, twice
@pytest.mark.parametrize("options", [(), ("--parallel", "2")])
def test_ctrl_c_ends_a_sweep_and_the_same_command_goes_on(tmp_path, options):
    if options:
        pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    file, out = write(tmp_path, LONG), tmp_path / "out"
    process = begin(file, out, *options)
    metrics = out / "loop.lag=0-s0" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size > 2000)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert alive(tmp_path) == []
    assert "stopped; the same command continues the sweep" in said
    saved = [path.name for path in (metrics.parent / "checkpoints").iterdir()]
    assert saved
    (job, *_) = plan(file, out)  # the run that is there is the sweep's own
    assert not job.is_finished


@pytest.mark.slow  # Ray starts twice
def test_a_sweep_on_ray_that_was_killed_goes_on(tmp_path):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    text = HEAD.replace('"train.steps" = 2', '"train.steps" = 3') + GRID
    file, out = write(tmp_path, text), tmp_path / "out"
    process = begin(file, out, "--parallel", "2")
    until(lambda: any(out.glob("*/summary.json")))
    process.kill()
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    again = begin(file, out, "--parallel", "2")
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert len(list(out.glob("*/summary.json"))) == 4
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "4 of 4 runs are done" in said
