"""Runs with the real trackers, offline; what they stored is read back."""

import json
import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from burnish import api
from burnish.runs import checkpoints
from burnish.runs.trackers import trackers
from tests.loops.test_recorder import fingerprint, stopper

SORT = ["train.steps=4", "validation.every=2", "checkpoint.every=2", "log.samples=5"]
SAME = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl")


def names(*given):
    return [*SORT, f"log.trackers={json.dumps(given)}", "log.project=proofs", "log.group=g"]


def kept(run, tracker):
    return json.loads((run / f"trackers/{tracker}.json").read_text())


def cut_back(run, step):
    """Make a run look as if it had been killed after its last step, when only the checkpoint of
    ``step`` was saved."""
    for path in checkpoints.list_checkpoints(run.path):
        if checkpoints.step_of(path) > step:
            path.unlink()


def values_of(run):
    """The metrics and timings of each step, as trackers get them."""
    rows = zip(run.metrics, run.timings, strict=True)
    return {a["step"]: {k: v for k, v in (a | b).items() if k != "step"} for a, b in rows}


def trackio_rows(tmp_path):
    with sqlite3.connect(tmp_path / "trackio/proofs.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = base.execute("select config from configs").fetchall()
        alerts = base.execute("select title from alerts order by id").fetchall()
        artifacts = base.execute("select name from artifacts order by id").fetchall()
    base.close()
    return rows, [json.loads(text) for (text,) in configs], alerts, [name for (name,) in artifacts]


@pytest.mark.slow
def test_trackio_stores_a_run_that_was_stopped_resumed_and_cut_back(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    asked = names("trackio")
    run = api.train("sort", overrides=asked, out=tmp_path / "run", stop=stopper(3))
    assert kept(run, "trackio")["logged"] == 3
    before = values_of(run)
    cut_back(run, 2)
    api.resume(run)
    rows, (config,), alerts, artifacts = trackio_rows(tmp_path)
    assert {name for name, _, _ in rows} == {kept(run, "trackio")["id"]}
    stored = {step: json.loads(text) for _, step, text in rows}
    assert [step for _, step, _ in rows] == [0, 1, 2, 3, 4]
    wanted = values_of(run) | {3: before[3]}  # the clock's values of the step that was sent first
    for step, values in stored.items():
        tables = {name: values.pop(name) for name in list(values) if name.startswith("samples/")}
        assert values == pytest.approx(wanted[step])
        assert tables.keys() == {
            0: {"samples/validation"},
            2: {"samples/validation", "samples/rollouts"},
            4: {"samples/validation", "samples/rollouts"},
        }.get(step, set())
        assert all(len(table["_value"]) <= 5 for table in tables.values())
    wanted = [row["response"] for row in run.rollouts if row["step"] == 4][:5]
    text = next(text for _, step, text in rows if step == 4)
    assert [r["response"] for r in json.loads(text)["samples/rollouts"]["_value"]] == wanted
    assert config["train"]["steps"] == 4
    assert config["environment"]["packages"]["torch"]
    assert config["_Group"] == "g"
    assert [title for (title,) in alerts] == ["The run stopped", "The run finished"]
    assert any(name.endswith("report.html") for name in artifacts)


def test_a_run_has_the_same_results_with_a_tracker_that_fails(tmp_path, monkeypatch):
    """The tracker can't write; this is reported once, on the display and in log.txt."""
    pytest.importorskip("trackio", reason="trackio is not installed")
    whole = api.train("sort", overrides=SORT[:3], out=tmp_path / "whole")
    (tmp_path / "trackio").write_text("a file, not a directory")
    notes = []
    asked = {"overrides": names("trackio"), "show": notes.append}
    run = api.train("sort", out=tmp_path / "run", **asked)
    for name in SAME:
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    mine, other = fingerprint(run), fingerprint(whole)
    assert mine["checkpoints/step-00000004"] == other["checkpoints/step-00000004"]
    (_, told) = [note.doing for note in notes if note.phase == "note"]
    assert re.match(r"the tracker trackio failed: \w*Error: .*trackio\.log.*burnish resume", told)
    lines = (run / "log.txt").read_text().splitlines()
    assert [line for line in lines if "tracker" in line] == [told]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    (tmp_path / "trackio").unlink()
    api.resume(run)  # as the message says
    assert [step for _, step, _ in trackio_rows(tmp_path)[0]] == [0, 1, 2, 3, 4]
    assert "tracker" not in (run / "log.txt").read_text()


def test_no_tracker_at_all(tmp_path):
    run = api.train("sort", overrides=[*SORT[:3], "log.trackers=[]"], out=tmp_path / "run")
    assert not list(run.path.glob("events.*"))
    assert not (run / "trackers").exists()


def test_a_broken_tensorboard_stops_no_run(tmp_path, monkeypatch):
    from burnish.runs.trackers.tensorboard import TensorboardTracker

    def fail(self, step, values, tables):
        raise OSError("no space left")

    monkeypatch.setattr(TensorboardTracker, "log", fail)
    notes = []
    asked = [*SORT[:3], "log.trackers=tensorboard"]
    api.train("sort", overrides=asked, out=tmp_path / "run", show=notes.append)
    (_, told) = [note.doing for note in notes if note.phase == "note"]
    assert told.startswith("the tracker tensorboard failed: OSError: no space left")


def test_a_tracker_that_hangs_is_stopped_at_the_end(tmp_path, monkeypatch):
    """W&B's server accepts connections and never answers."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        notes = []
        asked = {"overrides": names("wandb"), "show": notes.append}
        run = api.train("sort", out=tmp_path / "run", **asked)
    (_, told) = [note.doing for note in notes if note.phase == "note"]
    assert "the tracker wandb failed: it has not sent everything within 1 s" in told
    assert len(run.metrics) == 5
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data, place, part = open(sys.argv[1], "rb").read(), 7, b""  # after the header
while place < len(data):  # LevelDB's log: blocks of 32 KiB with records in parts
    left = 32768 - place % 32768
    if left < 7:
        place += left
        continue
    length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
    part += data[place + 7 : place + 7 + length]
    place += 7 + length
    if kind in (1, 4):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(part)
        part, which = b"", record.WhichOneof("record_type")
        if which in ("history", "summary"):
            rows = record.history.item if which == "history" else record.summary.update
            keys = {"/".join(r.nested_key) or r.key: json.loads(r.value_json) for r in rows}
            print(json.dumps([which, keys]))
        if which == "run":
            config = {r.key: json.loads(r.value_json) for r in record.run.config.update}
            about = {k: getattr(record.run, k) for k in ("run_id", "project", "run_group")}
            print(json.dumps([which, about | {"config": config}]))
        if which == "artifact":
            files = [c.path for c in record.artifact.manifest.contents]
            print(json.dumps([which, {"type": record.artifact.type, "files": files}]))
        if which == "exit":
            print(json.dumps([which, record.exit.exit_code]))
"""


def wandb_records(folder):
    """The records of an offline run of W&B, by kind."""
    (file,) = folder.glob("run-*.wandb")
    read = subprocess.run([sys.executable, "-c", READER, file], stdout=subprocess.PIPE, check=True)
    found = {}
    for line in read.stdout.splitlines():
        kind, content = json.loads(line)
        found.setdefault(kind, []).append(content)
    return found


@pytest.mark.slow
def test_wandb_stores_a_run_that_was_stopped_resumed_and_cut_back(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    run = api.train("sort", overrides=names("wandb"), out=tmp_path / "run", stop=stopper(3))
    before = values_of(run)
    cut_back(run, 2)
    api.resume(run)
    folders = sorted(run.path.glob("trackers/wandb/offline-run-*"))
    first, second = map(wandb_records, folders)
    (about,), (again,) = first["run"][:1], second["run"][:1]
    assert about["run_id"] == again["run_id"] == kept(run, "wandb")["id"]
    assert (about["project"], about["run_group"]) == ("proofs", "g")
    assert about["config"]["train"]["steps"] == 4
    assert about["config"]["environment"]["threads"]
    steps = [[row["_step"] for row in part["history"]] for part in (first, second)]
    assert steps == [[0, 1, 2, 3], [4]]
    wanted = values_of(run) | {3: before[3]}
    for row in [*first["history"], *second["history"]]:
        values = {k: v for k, v in row.items() if not k.startswith(("_", "samples/"))}
        assert values == pytest.approx(wanted[row["_step"]])
        is_validated = row["_step"] % 2 == 0
        assert any(name.startswith("samples/validation") for name in row) == is_validated
    (table,) = folders[1].rglob("rollouts_*.table.json")
    table = json.loads(table.read_text())
    rows = [r["response"] for r in run.rollouts if r["step"] == 4][:5]
    assert [row[table["columns"].index("response")] for row in table["data"]] == rows
    for part in (first, second):
        (report,) = [one for one in part["artifact"] if one["type"] == "report"]
        assert "report.html" in report["files"]
    assert first["exit"] == [255]
    assert second["exit"] == [0]
    states = [s["state"] for part in (first, second) for s in part["summary"] if "state" in s]
    assert list(dict.fromkeys(states)) == ["stopped", "finished"]


@pytest.mark.slow
def test_mlflow_stores_a_run_that_was_stopped_resumed_and_cut_back(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    run = api.train("sort", overrides=names("mlflow"), out=tmp_path / "run", stop=stopper(3))
    before = values_of(run)
    cut_back(run, 2)
    api.resume(run, train={"steps": 6})
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        ((identity, name, status, place),) = base.execute(
            "select run_uuid, name, status, artifact_uri from runs"
        ).fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
        metrics = base.execute("select step, key, value from metrics").fetchall()
        tags = dict(base.execute("select key, value from tags").fetchall())
        experiments = base.execute("select name from experiments").fetchall()
    base.close()
    assert (identity, name, status) == (kept(run, "mlflow")["id"], "run", "FINISHED")
    assert ("proofs",) in experiments
    assert (tags["state"], tags["group"]) == ("finished", "g")
    assert params["train.steps"] == "4"  # MLflow keeps a parameter's first value
    assert params["task.name"] == "sort"
    assert params["environment.packages.torch"]
    wanted = values_of(run) | {3: before[3]}
    assert len(metrics) == sum(len(values) for values in wanted.values())
    for step, key, value in metrics:
        assert value == pytest.approx(wanted[step][key])
    assert (Path(place) / "report.html").read_bytes() == (run / "report.html").read_bytes()
    assert "steps = 6" in (Path(place) / "recipe.toml").read_text()
    table = json.loads((Path(place) / "samples/rollouts/step-00000006.json").read_text())
    rows = [r["response"] for r in run.rollouts if r["step"] == 6][:5]
    assert [row[table["columns"].index("response")] for row in table["data"]] == rows
    assert len(list(Path(place).glob("samples/*/*.json"))) == 7  # steps 0, 2, 4 and 6


@pytest.mark.slow
def test_a_server_that_can_not_be_reached_stops_no_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nothing listens there once it is closed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    notes = []
    asked = {"overrides": names("mlflow"), "show": notes.append}
    run = api.train("sort", out=tmp_path / "run", **asked)
    (_, told) = [note.doing for note in notes if note.phase == "note"]
    assert told.startswith("the tracker mlflow failed: MlflowException: ")
    assert len(run.metrics) == 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    api.resume(run)  # as the message says
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        steps = base.execute("select distinct step from metrics order by step").fetchall()
    base.close()
    assert steps == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.slow
def test_a_missing_key_stops_no_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))  # without a stored key
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    notes = []
    asked = {"overrides": names("wandb"), "show": notes.append}
    run = api.train("sort", out=tmp_path / "run", **asked)
    (_, told) = [note.doing for note in notes if note.phase == "note"]
    assert told.startswith("the tracker wandb failed: ")
    assert "key" in told
    assert len(run.metrics) == 5
