import json
import os

import pytest

from burnish import config
from burnish.errors import RunError
from burnish.runs import plots
from burnish.runs.directory import RunDirectory, next_directory
from burnish.runs.metrics import combine, read_rows
from burnish.runs.rollouts import readable
from burnish.runs.timers import Timers
from tests.conftest import make_group

RECIPE = config.load("sort")


def test_combine():
    rows = [
        {"a": 1.0, "b_min": 3.0, "c_max": 1.0},
        {"a": 3.0, "b_min": 2.0, "c_max": 5.0, "d": 7.0},
    ]
    assert combine(rows) == {"a": 2.0, "b_min": 2.0, "c_max": 5.0, "d": 7.0}


def test_timers_account_for_every_second():
    now = iter([0.0, 1.0, 4.0, 4.0, 5.0, 6.0, 7.0, 9.0, 10.0])
    timers = Timers(clock=lambda: next(now))
    with timers("a"):
        pass
    with timers("b"):
        pass
    assert timers.take() == {"time/a": 3.0, "time/b": 1.0, "time/other": 2.0, "time/step": 6.0}
    with timers("a"):
        pass
    assert timers.take() == {"time/a": 2.0, "time/other": 2.0, "time/step": 4.0}


def test_a_directory_belongs_to_one_run(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        with pytest.raises(RunError, match="in use by another run"):
            RunDirectory(tmp_path / "run", RECIPE)
        run.append_row("metrics.jsonl", {"step": 0})
        assert read_rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 0}]  # already on disk
    with pytest.raises(RunError, match="already holds a run"):
        RunDirectory(tmp_path / "run", RECIPE)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't write to .* choose another --out"):
        RunDirectory(tmp_path / "file" / "run", RECIPE)


def test_writes_replace_files_whole(tmp_path):
    with RunDirectory(tmp_path / "run", RECIPE) as run:
        run.write("a.txt", "one")
        run.write("a.txt", "two")
    assert (tmp_path / "run" / "a.txt").read_text() == "two"
    assert sorted(os.listdir(tmp_path / "run")) == [
        ".lock",
        "a.txt",
        "environment.json",
        "recipe.toml",
    ]
    packages = json.loads((tmp_path / "run" / "environment.json").read_text())["packages"]
    assert packages["numpy"]


def test_next_directory(tmp_path):
    assert next_directory(tmp_path, "sort").name == "sort-1"
    (tmp_path / "sort-1").mkdir()
    assert next_directory(tmp_path, "sort").name == "sort-2"


def test_rows_of_a_crashed_run_are_read_up_to_the_crash(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_rows(file) == [{"step": 0}, {"step": 1}]
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2, is not JSON"):
        read_rows(file)
    with pytest.raises(RunError, match="not a run directory"):
        read_rows(tmp_path / "none" / "metrics.jsonl")


def test_readable_counts_equal_responses_and_escapes_text():
    group = make_group(0, [1], [[2], [2], [3]], [1.0, 1.0, 0.0])
    text = readable(4, [group], [0.5, 0.5, -1.0])
    assert text.splitlines() == [
        "step 4",
        "  prompt '1'",
        "      2 × '2'  reward 1 ()  advantage +0.5000",
        "      1 × '3'  reward 0 ()  advantage -1.0000",
    ]


def make_run(path, rewards, *overrides, seed=0):
    recipe = config.load("sort", overrides, seed=seed)
    with RunDirectory(path, recipe) as run:
        for step, reward in enumerate(rewards):
            run.append_row(
                "metrics.jsonl", {"step": step, "rollout/reward": reward, "train/loss": 0}
            )
    return path


def test_runs_that_differ_only_in_their_seed_share_a_curve(tmp_path):
    runs = [
        make_run(tmp_path / "a", [1.0, 2.0], "objective.advantage=raw"),
        make_run(tmp_path / "b", [1.0, 4.0], "objective.advantage=raw", seed=1),
        make_run(tmp_path / "c", [3.0, 3.0]),
    ]
    out = tmp_path / "out.png"
    curves = plots.draw_comparison(runs, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    labels = {curve.label: curve.seeds for curve in curves}
    assert labels == {"advantage = raw": [0, 1], "advantage = group_mean": [0]}
    assert plots.final_reward(curves[0], window=1) == (3.0, 1.0)
    assert plots.final_reward(curves[0]) == (2.0, 0.5)


def test_a_run_without_steps_cannot_be_compared(tmp_path):
    run = make_run(tmp_path / "a", [])
    (run / "metrics.jsonl").touch()
    with pytest.raises(RunError, match="no finished step"):
        plots.draw_comparison([run], tmp_path / "out.png")
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        plots.draw_comparison([tmp_path], tmp_path / "out.png")


def test_smoothing_is_a_trailing_mean():
    import numpy as np

    values = np.arange(8.0)
    expected = [values[max(0, i - 4) : i + 1].mean() for i in range(8)]
    np.testing.assert_allclose(plots._smooth(values), expected)
