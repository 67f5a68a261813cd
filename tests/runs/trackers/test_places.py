"""The line at the beginning of a run that says where a tracker stores it."""

import typing
from pathlib import Path

import pytest

from burnish import api
from burnish.recipe.recipe import TrackerName
from burnish.runs.trackers.places import PLACES, tracker_place

RUN = Path("runs/a b-1")


@pytest.mark.parametrize(
    ("tracker", "variables", "said"),
    [
        (
            "wandb",
            {"WANDB_MODE": "offline"},
            "writes to runs/a b-1/trackers/wandb, offline; upload it with: wandb sync "
            "'runs/a b-1/trackers/wandb'/offline-run-*",
        ),
        (
            "wandb",
            {"WANDB_DIR": "/w", "WANDB_BASE_URL": "http://here"},
            "writes to the project p at http://here; its local files are in /w/wandb",
        ),
        ("wandb", {}, "p at wandb.ai; its local files are in runs/a b-1/trackers/wandb"),
        ("tensorboard", {}, "writes to runs/a b-1; display it with: tensorboard --logdir 'runs/a"),
        (
            "mlflow",
            {},
            "sqlite:///mlflow.db; display it with: mlflow ui --backend-store-uri sqlite",
        ),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "https://me:key@m"},
            "p at https://m; its page",
        ),
        ("trackio", {"TRACKIO_SERVER_URL": "https://t/?write_token=1"}, "at https://t/; its page"),
        ("trackio", {}, "local database; display it with: trackio show --project p"),
        ("trackio", {"TRACKIO_SPACE_ID": "me/space"}, "the project p at me/space; its page"),
    ],
)
def test_each_tracker_has_a_place(tracker, variables, said):
    place = tracker_place(tracker, RUN, "p", variables)
    assert place.startswith(f"the tracker {tracker} writes to ")
    assert said in place


def test_every_tracker_is_described_and_a_run_prints_the_places_of_those_that_it_names(tmp_path):
    assert PLACES.keys() == set(typing.get_args(TrackerName))
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for name, count in (("tensorboard", 1), (None, 0)):
        told, out = [], tmp_path / str(name)
        given = ["train.steps=1", *([] if name is None else [f"log.trackers={name}"])]
        api.train("sort", overrides=given, out=out, show=told.append)
        said = [p.doing for p in told if p.phase == "note" and "writes to" in p.doing]
        assert said == [tracker_place("tensorboard", out, "burnish", {})] * count
