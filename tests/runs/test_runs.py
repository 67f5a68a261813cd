import json
import os
from dataclasses import replace

import numpy as np
import pytest

from burnish import config
from burnish.errors import RunError
from burnish.runs import comparison, responses
from burnish.runs.directory import RunDirectory, check_new, claimed
from burnish.runs.metrics import Timers, combine, iterate_rows, smooth, window
from burnish.runs.responses import readable
from tests.conftest import make_group
from tests.runs.test_report import data_of

RECIPE = config.load("sort")


def test_combine():
    rows = [
        {"a": 1.0, "b_min": 3.0, "c_max": 1.0, "train/skipped": 1.0},
        {"a": 3.0, "b_min": 2.0, "c_max": 5.0, "d": 7.0, "train/skipped": 1.0},
    ]
    assert combine(rows) == {"a": 2.0, "b_min": 2.0, "c_max": 5.0, "d": 7.0, "train/skipped": 2.0}


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
            RunDirectory(tmp_path / "run")
        run.append_row("metrics.jsonl", {"step": 0})
        assert list(iterate_rows(tmp_path / "run" / "metrics.jsonl")) == [{"step": 0}]
    with pytest.raises(RunError, match=r"must be new or empty.* with `burnish resume .*run`"):
        RunDirectory(tmp_path / "run", RECIPE)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for check in (check_new, lambda path: RunDirectory(path, RECIPE)):
        with pytest.raises(RunError, match=r"can't write to .* choose another --out"):
            check(tmp_path / "file" / "run")


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


def test_a_directory_is_taken_at_once_and_left_again_if_nothing_came_of_it(tmp_path):
    root = tmp_path / "runs"
    with claimed(None, "sort", root) as one, claimed(None, "sort", root) as two:
        assert [one.name, two.name] == ["sort-1", "sort-2"]
        with RunDirectory(two, RECIPE):
            pass
    assert [path.name for path in root.iterdir()] == ["sort-2"]
    with claimed(None, "other", tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
    with claimed(tmp_path / "mine", "sort", root) as path:
        assert path == tmp_path / "mine"
    assert not path.exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), claimed(None, "sort", tmp_path / "file"):
        pass


def test_rows_of_a_crashed_run_are_read_up_to_the_crash(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert list(iterate_rows(file)) == [{"step": 0}, {"step": 1}]
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*{\"st.* is not JSON"):
        list(iterate_rows(file))


def read(groups, advantages):
    decode = lambda ids: [str(i) for i in ids]  # noqa: E731
    return readable(list(responses.rows(4, groups, decode=decode, advantages=advantages)))


def test_readable_counts_equal_responses_and_escapes_text():
    group = make_group(0, [1], [[2], [2], [3]], [1.0, 1.0, 0.0])
    assert read([group], [0.5, 0.5, -1.0]).splitlines() == [
        "step 4",
        "  prompt '1'",
        "      2 × '2'  reward 1, advantage 0.5",
        "      1 × '3'  reward 0, advantage -1",
    ]


def test_the_readable_log_has_what_was_asked():
    group = make_group(0, [1], [[2]], [1.0])
    asked = replace(group.prompt, text="<|user|>Sort it<|end|>", asked="Sort it")
    assert read([replace(group, prompt=asked)], [0.0]).splitlines()[1] == "  prompt 'Sort it'"


def test_the_readable_log_has_no_negative_zero_and_no_grade_that_is_missing():
    text = read([make_group(0, [1], [[2], [3]], [-0.0, float("nan")])], [-0.0, 0.5])
    assert "'2'  reward 0, advantage 0\n" in text
    assert "'3'  advantage 0.5\n" in text


@pytest.mark.parametrize(
    ("versions", "ranges"),
    [
        ([3], [[3, 1]]),
        ([3, 3, 5, 6, 6, 6], [[3, 2], [5, 1], [6, 3]]),
        ([3, 4, 3], [[3, 1], [4, 1], [3, 1]]),
        ([], []),
    ],
)
def test_rows_have_the_version_of_every_token(versions, ranges):
    """Weights may come while a response is sampled."""
    group = make_group(0, [1], [list(range(len(versions)))], [1.0])
    changed = replace(group.completions[0], versions=np.array(versions, np.int64))
    group = replace(group, completions=(changed,))
    (row,) = responses.rows(1, [group], decode=lambda ids: [str(i) for i in ids])
    assert row["versions"] == ranges
    assert row["version"] == (versions[0] if versions else None)


def test_rows_say_what_a_response_was(tmp_path):
    groups = [
        make_group(4, [1], [[2, 3], [2]], [1.0, float("nan")], version=7),
        make_group(5, [6], [[], [8]], [0.5, 0.0]),
    ]

    def decode(ids):
        return [f"<{i}>" for i in ids]

    advantages = [0.25, float("nan"), 0.0, -1.0]
    learner = [np.array(x, dtype=np.float32) for x in ([-0.1, -0.30004], [-np.inf], [], [-2])]
    written = list(
        responses.rows(3, groups, decode=decode, advantages=advantages, learner_logprobs=learner)
    )
    assert written[0] == {
        "step": 3,
        "group": 4,
        "prompt_id": "p4",
        "prompt": "1",
        "asked": "1",
        "sample": 0,
        "response": "2 3",
        "tokens": ["<2>", "<3>"],
        "logprobs": [-0.1, -0.2],
        "learner_logprobs": [-0.1, -0.3],
        "forced": [],
        "reward": 1.0,
        "parts": {},
        "status": "scored",
        "correct": True,
        "advantage": 0.25,
        "finish": "stop",
        "version": 7,
        "versions": [[7, 2]],
    }
    assert (written[1]["reward"], written[1]["advantage"]) == (None, None)
    assert written[1]["learner_logprobs"] == [None]
    assert (written[2]["tokens"], written[2]["version"], written[2]["versions"]) == ([], None, [])
    assert [row["advantage"] for row in responses.rows(0, groups, decode=decode)] == [None] * 4

    with RunDirectory(tmp_path / "run", RECIPE) as run:
        for row in written:
            run.append_row("rollouts.jsonl", row)
    assert list(iterate_rows(tmp_path / "run" / "rollouts.jsonl")) == written
    assert list(iterate_rows(tmp_path / "none.jsonl")) == []


def test_a_limit_takes_every_groups_first_response_first():
    groups = [make_group(g, [1], [[1], [2], [3]], [0, 0, 0]) for g in range(3)]

    def kept(limit):
        some = responses.rows(0, groups, decode=lambda ids: [str(i) for i in ids], limit=limit)
        return [(row["group"], row["sample"]) for row in some]

    assert kept(0) == []
    assert kept(2) == [(0, 0), (1, 0)]
    assert kept(4) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert len(kept(100)) == len(kept(None)) == 9


def test_a_reopened_run_is_cut_back_to_its_checkpoint(tmp_path):
    def work(run, steps):
        for step in steps:
            run.append_row("metrics.jsonl", {"step": step})
            run.append("log.txt", f"step {step} 🙂\n")
            if step > 3:
                run.append_row("evaluations.jsonl", {"step": step})

    def contents(path):
        return {f.name: f.read_bytes() for f in path.iterdir() if f.is_file()}

    with RunDirectory(tmp_path / "whole", RECIPE) as run:
        work(run, range(6))
    with RunDirectory(tmp_path / "killed", RECIPE) as run:
        work(run, range(3))
        positions = run.positions()
        work(run, range(3, 5))
        run.append("metrics.jsonl", '{"step": 5, "rew')
        run.write("summary.json", "{}")
    assert sorted(positions) == ["log.txt", "metrics.jsonl"]
    with RunDirectory(tmp_path / "killed") as run:
        with pytest.raises(RunError, match="in use by another run; watch it with `burnish watch`"):
            RunDirectory(tmp_path / "killed")
        run.append("metrics.jsonl", "written before the cut\n")
        run.cut_back(positions)
        assert run.positions() == positions
        work(run, range(3, 6))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunDirectory(tmp_path, RECIPE) as run:
        for step in range(5):
            run.append_scalars(step, {"rollout/reward": step / 4, "größe": 1e300})
    with RunDirectory(tmp_path) as run:
        for step in (3, 4, 5):
            run.append_scalars(step, {"rollout/reward": step / 2})
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(row.step, row.value) for row in events.Scalars("rollout/reward")]
    assert found == [(0, 0), (1, 0.25), (2, 0.5), (3, 1.5), (4, 2), (5, 2.5)]
    assert events.Scalars("größe")[0].value == float("inf")


def test_a_file_shorter_than_its_checkpoint_is_an_error_and_nothing_is_cut(tmp_path):
    with RunDirectory(tmp_path, RECIPE) as run:
        run.append("log.txt", "0123456789")
        run.append("metrics.jsonl", "0123456789")
        with pytest.raises(RunError, match=r"metrics\.jsonl holds 10 bytes.*recorded 12.*--from"):
            run.cut_back({"log.txt": 5, "metrics.jsonl": 12})
        assert run.positions() == {"log.txt": 10, "metrics.jsonl": 10}


def test_only_a_run_can_be_reopened(tmp_path):
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        RunDirectory(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def make_run(path, rewards, *overrides, seed=0):
    recipe = config.load("sort", [*overrides, {"seed": seed}])
    with RunDirectory(path, recipe) as run:
        for step, reward in enumerate(rewards):
            row = {"step": step, "rollout/reward": reward, "train/version": step}
            run.append_row("metrics.jsonl", row)
    return path


def test_runs_that_differ_only_in_their_seed_share_a_curve(tmp_path):
    runs = [
        make_run(tmp_path / "a", [1.0, 2.0], "objective.advantage=raw"),
        make_run(tmp_path / "b", [1.0, 4.0, 5.0], "objective.advantage=raw", seed=1),
        make_run(tmp_path / "c", [3.0, 3.0]),
    ]
    curves = comparison.write_comparison(runs, tmp_path / "out.html")
    labels = {curve.label: curve.seeds for curve in curves}
    assert labels == {"objective.advantage = raw": [0, 1], "objective.advantage = group_mean": [0]}
    ends = comparison.ends(curves[0])
    assert ends["reward"] == [2.0, 5.0]
    assert np.isnan(ends["KL k1"]).all()
    data = data_of(tmp_path / "out.html")
    assert data["labels"] == ["objective.advantage = raw", "objective.advantage = group_mean"]
    assert data["seeds"] == [2, 1]
    assert data["metrics"]["rollout/reward"] == [
        # The steps that both seeds have; 2 and 4 have s = √2, and t s / √2 is t.
        {"points": [[0, 1], [1, 3]], "spread": [0, 12.706]},
        {"points": [[0, 3], [1, 3]], "spread": None},
    ]


def test_the_interval_of_a_mean_is_students():
    values = np.array([1.0, 2.0, 3.0])  # s = 1, and t for two degrees of freedom is 4.303
    assert comparison.half_width(values) == pytest.approx(4.303 / 3**0.5)
    assert comparison.half_width(values[:1]) == 0
    for runs, t in [(10, 2.262), (11, 2.228), (12, 2.201), (31, 2.042), (121, 1.980)]:
        many = np.arange(runs, dtype=float)
        assert comparison.half_width(many) == pytest.approx(
            t * many.std(ddof=1) / runs**0.5, rel=1.5e-3
        )


def test_curves_know_what_they_cost(tmp_path):
    run = make_run(tmp_path / "a", [1.0, 2.0, 3.0])
    with RunDirectory(run) as opened:
        for step, evaluated in enumerate([5.0, 0.0, 5.0]):
            times = {"step": step, "time/step": 1.0 + evaluated, "time/evaluate": evaluated}
            opened.append_row("timings.jsonl", times)
            opened.append_row("metrics.jsonl", {"step": step, "train/tokens": 10 * step})
    comparison.write_comparison([run], tmp_path / "out.html", labels=["<b>"], title="one")
    data = data_of(tmp_path / "out.html")
    assert (data["title"], data["labels"]) == ("one", ["<b>"])
    lines = {name: data["metrics"][f"sum/{name}"][0]["points"] for name in ("tokens", "seconds")}
    assert lines["tokens"] == [[0, 0], [1, 10], [2, 30]]
    assert lines["seconds"] == [[0, 1], [1, 2], [2, 3]]  # without evaluations


def test_a_browser_switches_the_axis_and_draws_one_chart_alone(browser, tmp_path):
    runs = [make_run(tmp_path / f"run {i}", range(9), seed=i) for i in range(3)]
    for run in runs:
        with RunDirectory(run) as opened:
            for step in range(9):
                tokens = {"rollout/tokens_sampled": 70, "train/tokens": 100}
                opened.append_row("metrics.jsonl", {"step": step} | tokens)
    page = tmp_path / "out.html"
    comparison.write_comparison(runs, page)
    browser.check(page.as_uri())
    cells = "[...document.querySelectorAll('tr:last-child td')].map(e => e.textContent)"
    assert browser.evaluate(cells) == ["sort", "3", "0 ± 0", "8 ± 0", "630", "900", "0"]
    label = "document.querySelector('svg').getAttribute('aria-label')"
    assert browser.evaluate(label) == "rollout/reward, by step"
    for button, axis in enumerate(["sampled tokens", "learned tokens"], 1):
        browser.evaluate(f"document.querySelectorAll('.toggle button')[{button}].click()")
        assert browser.evaluate(label) == f"rollout/reward, by {axis}"
    browser.check(f"{page.as_uri()}#metric=rollout/reward&x=tokens", width=390)
    assert browser.evaluate("document.querySelectorAll('svg').length") == 1
    assert browser.evaluate(label) == "rollout/reward, by learned tokens"
    assert browser.problems == []


@pytest.mark.parametrize("width", [390, 1300])
def test_a_browser_lays_runs_over_each_other(browser, tmp_path, width):
    evil = "<img src=x onerror=window.hacked=1>"
    runs = [make_run(tmp_path / f"run {i}", range(9), seed=i % 2) for i in range(2)]
    runs.append(make_run(tmp_path / evil, range(40), "train.epochs=2"))
    with (runs[2] / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": s, f"custom/{evil}": 1}) + "\n" for s in (50, 51))
    page = tmp_path / "out.html"
    comparison.write_comparison(runs, page)
    browser.check(page.as_uri(), width=width)
    titles = "[...document.querySelectorAll('h3')].map(e => e.textContent)"
    assert browser.evaluate(titles) == ["rollout/reward", f"custom/{evil}", "train/version"]
    names = "[...document.querySelectorAll('td:first-child')].map(e => e.textContent)"
    assert browser.evaluate(names) == ["train.epochs = 10", "train.epochs = 2"]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hacked") is None
    assert browser.problems == []


@pytest.mark.parametrize(
    ("steps", "wanted"), [(1, 1), (2, 1), (3, 1), (6, 2), (29, 9), (30, 10), (900, 10)]
)
def test_a_runs_ends_are_ten_steps_or_a_third_of_a_short_run(steps, wanted):
    assert window(steps) == wanted


def test_what_runs_came_to_is_read_from_their_last_rows(tmp_path):
    run = make_run(tmp_path / "a", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(21):
            row = {"step": step, "validation/reward": 0.5} if step % 10 == 0 else {"step": step}
            if step:
                row |= {"rollout/reward": step, "train/version": 0, "kl/initial_k1": step / 100}
            if step == 20:
                row |= {"validation/part_inclusion": 0.75, "validation/ended": 0.5}
            file.write(json.dumps(row) + "\n")
    (curve,) = comparison.group_by_settings([run])
    ends = {name: value for name, (value,) in comparison.ends(curve).items()}
    assert np.isnan(ends.pop("KL k3"))
    assert ends == {
        "reward": 17.5,  # the last third: steps 15 to 20
        "held out": 0.5,
        "inclusion": 0.75,
        "ended": 0.5,
        "KL k1": pytest.approx(0.175),
    }


def test_a_run_without_steps_cannot_be_compared(tmp_path):
    run = make_run(tmp_path / "a", [])
    (run / "metrics.jsonl").touch()
    with pytest.raises(RunError, match="no finished step"):
        comparison.group_by_settings([run])
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        comparison.group_by_settings([tmp_path])


def test_smoothing_takes_as_many_neighbours_on_both_sides():
    values = [float(step * step) for step in range(40)]
    expected = [values[i - 2 : i + 3] for i in range(2, 38)]
    found = smooth(values)
    assert found[2:38] == pytest.approx(np.mean(expected, axis=1))
    assert (found[0], found[1], found[-1]) == (0, pytest.approx(5 / 3), 39 * 39)
    assert smooth(values[:15]) == values[:15]
