import numpy as np
import pytest

from burnish.errors import RunError
from burnish.runs.metrics import Timers, combine, iterate_rows, smooth, window


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


def test_waiting_for_environments_is_a_phase_of_its_own():
    """2 of 5 seconds of sampling, and 1 of 3 outside of all phases, were waiting."""
    now, waited = iter([0.0, 1.0, 6.0, 8.0]), iter([10.0, 10.5, 12.5, 13.0])
    timers = Timers(clock=lambda: next(now), waited=lambda: next(waited))
    with timers("generate"):
        pass
    assert timers.take() == {
        "time/generate": 3.0,
        "time/environments": 3.0,
        "time/other": 2.0,
        "time/step": 8.0,
    }


def test_waiting_in_an_evaluation_is_a_part_of_it():
    """Comparisons of runs subtract the time of evaluations."""
    now, waited = iter([0.0, 1.0, 6.0, 8.0]), iter([10.0, 10.5, 12.5, 13.0])
    timers = Timers(clock=lambda: next(now), waited=lambda: next(waited))
    with timers("evaluate"):
        pass
    assert timers.take() == {
        "time/evaluate": 5.0,
        "time/environments": 1.0,
        "time/other": 2.0,
        "time/step": 8.0,
    }


def test_rows_of_a_crashed_run_are_read_up_to_the_crash(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert list(iterate_rows(file)) == [{"step": 0}, {"step": 1}]
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*{\"st.* is not JSON"):
        list(iterate_rows(file))


@pytest.mark.parametrize(
    ("steps", "wanted"), [(1, 1), (2, 1), (3, 1), (6, 2), (29, 9), (30, 10), (900, 10)]
)
def test_a_runs_ends_are_ten_steps_or_a_third_of_a_short_run(steps, wanted):
    assert window(steps) == wanted


def test_smoothing_takes_as_many_neighbours_on_both_sides():
    values = [float(step * step) for step in range(40)]
    expected = [values[i - 2 : i + 3] for i in range(2, 38)]
    found = smooth(values)
    assert found[2:38] == pytest.approx(np.mean(expected, axis=1))
    assert (found[0], found[1], found[-1]) == (0, pytest.approx(5 / 3), 39 * 39)
    assert smooth(values[:15]) == values[:15]
