import json
import os

from typer.testing import CliRunner

from burnish.cli import main
from burnish.runs import live_page
from burnish.runs.listing import best_result, list_run_rows, tabulate_runs
from burnish.runs.note import write_note
from tests.runs.test_comparison import make_run


def test_runs_are_listed_with_state_best_result_tags_and_note(tmp_path):
    old, new = (make_run(tmp_path / name, [1.0, 2.0]) for name in ("old", "new"))
    with (new / "metrics.jsonl").open("a") as file:
        for step, reward in ((2, 0.25), (3, 0.5), (4, 0.375)):
            file.write(json.dumps({"step": step, "validation/reward": reward}) + "\n")
    (new / "status.json").write_text(json.dumps({"state": "failed", "updated": 0.0}))
    write_note(old, "<b>first</b>", add=["base"])
    for file in old.iterdir():
        os.utime(file, (50.0, 50.0))
    for file in new.iterdir():
        os.utime(file, (100.0, 100.0))
    rows = list_run_rows(tmp_path, now=110.0)
    assert tabulate_runs(rows) == [
        ["run", "state", "held out, best", "last update", "tags", "note"],
        ["new", "failed, 4 of 100 steps", "0.500 at step 3", "10 seconds ago", "", ""],
        ["old", "stopped early, 1 of 100 steps", "", "60 seconds ago", "base", "<b>first</b>"],
    ]
    assert [row.path.name for row in list_run_rows(tmp_path, 110.0, ["base"])] == ["old"]
    assert list_run_rows(tmp_path, 110.0, ["base", "other"]) == []
    assert tabulate_runs(rows[:1])[0] == ["run", "state", "held out, best", "last update"]


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    make_run(tmp_path / "good", [1.0])
    damaged = make_run(tmp_path / "damaged", [1.0])
    (damaged / "note.json").write_text("[")
    states = {row.path.name: row.state for row in list_run_rows(tmp_path, now=0.0)}
    assert states["damaged"].startswith("can't be read")
    assert states["good"] == "stopped early, 0 of 100 steps"


def test_the_lowest_loss_of_a_supervised_run_is_its_best_result():
    series = {"validation/loss": [(0, 2.0), (1, 1.0), (2, 1.5)]}
    assert best_result(series, {}) == "loss 1.000 at step 1"
    assert best_result({}, {}) == ""


def test_the_recipes_metric_selects_the_best_result():
    series = {"validation/reward": [(0, 1.0)], "validation/ended": [(0, 0.5), (5, 0.25)]}
    assert best_result(series, {"metric": "validation/ended"}) == "ended 0.500 at step 0"
    lowest = {"metric": "validation/ended", "goal": "min"}
    assert best_result(series, lowest) == "ended 0.250 at step 5"


def test_commands_list_runs_and_change_notes(tmp_path):
    run = make_run(tmp_path / "a", [1.0])
    call = lambda *words: CliRunner().invoke(main.app, list(map(str, words)))  # noqa: E731
    assert call("note", run).output == "no note\n"
    assert call("note", run, "why", "--tag", "x").output == "x\nwhy\n"
    assert call("note", run, "--untag", "x").output == "why\n"
    assert "why" in call("runs", tmp_path).output
    assert "no runs with these tags" in call("runs", tmp_path, "--tag", "x").output
    assert call("runs", tmp_path / "absent").exit_code == 1


def test_the_live_pages_show_the_note(tmp_path):
    run = make_run(tmp_path / "a", [1.0])
    before = live_page.run_status(run, 0.0)["version"]
    write_note(run, "<i>why</i>", add=["x"])
    assert live_page.run_status(run, 0.0)["version"] != before
    assert "&lt;i&gt;why&lt;/i&gt;" in live_page.respond(tmp_path, "/").text
    data = json.loads(live_page.respond(tmp_path, "/run/a/data").text)
    assert data["note"] == {"text": "<i>why</i>", "tags": ["x"]}
