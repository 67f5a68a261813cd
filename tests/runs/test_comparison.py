import json

import numpy as np
import pytest

from burnish.errors import RunError
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs import comparison
from burnish.runs.directory import RunDirectory
from tests.runs.test_report import data_of


def make_run(path, rewards, *overrides, seed=0):
    recipe = load_recipe("sort", [*overrides, {"seed": seed}])
    with RunDirectory(path, recipe_to_toml(recipe)) as run:
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
        {
            "points": [[0, 1], [1, 3]],
            "spread": [0, 12.706],
            "each": [[[0, 1], [1, 2]], [[0, 1], [1, 4], [2, 5]]],
        },
        {"points": [[0, 3], [1, 3]], "spread": None, "each": None},
    ]


def test_four_seeds_have_a_band_instead_of_their_own_lines(tmp_path):
    runs = [make_run(tmp_path / str(seed), [1.0, seed], seed=seed) for seed in range(4)]
    comparison.write_comparison(runs, tmp_path / "out.html")
    (line,) = data_of(tmp_path / "out.html")["metrics"]["rollout/reward"]
    assert line["each"] is None
    assert line["spread"][0] == 0
    assert line["spread"][1] > 0


def test_settings_that_change_no_number_are_ignored(tmp_path):
    others = ["log.rollouts=1", "checkpoint.keep=5", "validation.every=3", "name=other"]
    runs = [make_run(tmp_path / "a", [1.0]), make_run(tmp_path / "b", [1.0], *others, seed=1)]
    (curve,) = comparison.group_by_settings(runs)
    assert curve.label == "sort"
    assert curve.seeds == [0, 1]
    rows = comparison.tabulate([curve])
    assert [row[0] for row in rows] == ["", "sort", "  a, seed 0", "  b, seed 1", "  mean", "  std"]


def test_runs_are_named_and_linked_relative_to_the_page(tmp_path):
    runs = [make_run(tmp_path / "my runs" / name, [1.0, 2.0]) for name in ("a:1", "b")]
    (runs[0] / "report.html").touch()
    page = tmp_path / "pages" / "out.html"
    page.parent.mkdir()
    comparison.write_comparison(runs, page)
    assert data_of(page)["runs"] == [
        [
            {"name": "a:1", "seed": 0, "href": "../my%20runs/a%3A1/report.html"},
            {"name": "b", "seed": 0, "href": None},
        ]
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
    assert (
        browser.evaluate("document.querySelectorAll('svg')[0].querySelectorAll('.run').length") == 3
    )
    assert browser.evaluate(cells) == [
        "sortrun 0, run 1, run 2",
        "3",
        "0 ± 0",
        "8 ± 0",
        "630",
        "900",
        "0",
    ]
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
    found = ["train.epochs = 10run 0, run 1", f"train.epochs = 2{evil}"]
    assert browser.evaluate(names) == found
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hacked") is None
    assert browser.problems == []


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
    (note,) = comparison.describe_columns([curve])
    assert "reward and KL are means over the last steps" in note
    ends = {name: value for name, (value,) in comparison.ends(curve).items()}
    assert np.isnan(ends.pop("KL k3"))
    assert ends == {
        "reward": 17.5,  # the last third: steps 15 to 20
        "held out": 0.5,
        "inclusion": 0.75,
        "ended": 0.5,
        "KL k1": pytest.approx(0.175),
    }


def test_runs_that_did_not_finish_or_have_fewer_steps_are_named(tmp_path):
    planned = [[f"train.steps={steps}"] for steps in (9, 9, 4)]
    lengths = {"full": 10, "stopped": 4, "short": 5}
    runs = [
        make_run(tmp_path / name, [1.0] * rows, *change)
        for (name, rows), change in zip(lengths.items(), planned, strict=True)
    ]
    for run in (runs[0], runs[2]):
        (run / "summary.json").write_text("{}")
    page = tmp_path / "out.html"
    told = comparison.describe_lengths(comparison.write_comparison(runs, page, about="Seeds"))
    assert told == [
        "note: stopped did not finish: it has 3 of 9 steps; the longest run has 9",
        "note: short has 4 of 4 steps; the longest run has 9",
    ]
    assert data_of(page)["about"] == ". ".join(["Seeds", *told])
    assert comparison.describe_lengths(comparison.group_by_settings([runs[0], runs[0]])) == []


def test_a_run_without_steps_cannot_be_compared(tmp_path):
    run = make_run(tmp_path / "a", [])
    (run / "metrics.jsonl").touch()
    with pytest.raises(RunError, match="no finished step"):
        comparison.group_by_settings([run])
    with pytest.raises(RunError, match=r"no recipe\.toml"):
        comparison.group_by_settings([tmp_path])
