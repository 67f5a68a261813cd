import pytest

from burnish.runs.trackers.tensorboard import TensorboardTracker
from burnish.runs.trackers.tracker import TrackedRun


@pytest.mark.filterwarnings("ignore")
def test_each_step_of_a_resumed_run_is_shown_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of the same second are read in the order of this number's text, in which 10 precedes 9.
    counter = type(event_file_writer._global_uid)(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)

    def process(steps, scale):
        tracker = TensorboardTracker()
        tracker.start(TrackedRun(tmp_path, "p", None, {}, {}), None)
        for step in steps:
            values = {"rollout/reward": step * scale, "größe": 1e300}
            tracker.log(step, values, {"rollouts": [{"response": "a"}]})
        tracker.finish("finished", [])

    process(range(5), 0.25)
    process((3, 4, 5, 4, 5), 0.5)  # the process itself goes back to step 3
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(row.step, row.value) for row in events.Scalars("rollout/reward")]
    assert found == [(0, 0), (1, 0.25), (2, 0.5), (3, 1.5), (4, 2), (5, 2.5)]
    assert events.Scalars("größe")[0].value == float("inf")
