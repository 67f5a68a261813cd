import errno
import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from burnish.errors import RunError
from burnish.runs import checkpoints

TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3)}


def names(run):
    return sorted(os.listdir(run / "checkpoints"))


def test_what_is_saved_is_loaded(tmp_path):
    fused = torch.randn(4, 3, dtype=torch.float64)
    tensors = TENSORS | {
        "half": torch.randn(5).bfloat16(),
        "view": fused[1:3].t(),
        "other view": fused[:1],
    }
    state = {"version": 7, "positions": {"log.txt": 3}, "best": 0.1 + 0.2, "name": "é\u2028"}
    path = checkpoints.save_checkpoint(tmp_path, 40, tensors, state, score=0.5)
    assert path == checkpoints.latest(tmp_path) == checkpoints.best(tmp_path)
    assert names(tmp_path) == ["step-00000040"]
    assert checkpoints.read_info(path) == (path.name, 40, 0.5, path, True)
    loaded, found = checkpoints.load_checkpoint(path)
    assert found == state
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_a_run_without_checkpoints(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.best(tmp_path) is None
    with pytest.raises(RunError, match=r"is damaged: No such file"):
        checkpoints.load_checkpoint(tmp_path / "checkpoints" / "step-00000001")


def test_the_last_and_the_best_are_kept(tmp_path):
    scores = {10: 0.1, 20: 0.9, 30: 0.9, 40: float("nan"), 50: 0.2, 60: None}
    for step, score in scores.items():
        checkpoints.save_checkpoint(tmp_path, step, TENSORS, {}, score=score, keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000050", "step-00000060"]
    assert checkpoints.best(tmp_path).name == "step-00000020"


def test_resuming_from_an_earlier_one_discards_the_later(tmp_path):
    paths = [checkpoints.save_checkpoint(tmp_path, step, TENSORS, {}, keep=5) for step in (1, 2, 3)]
    checkpoints.return_to(tmp_path, paths[1])
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_a_killed_process_had_no_time_to_delete_goes_when_the_run_resumes(tmp_path):
    for step in (1, 2, 3):
        last = checkpoints.save_checkpoint(tmp_path, step, TENSORS, {}, keep=5)
    (tmp_path / "checkpoints" / ".step-00000000.new").touch()
    (tmp_path / "checkpoints" / ".tmp01").touch()  # as safetensors writes
    checkpoints.return_to(tmp_path, last, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_one_that_was_not_planned_goes_with_the_next(tmp_path):
    """Here of highest score: until the next is saved it is the best."""
    for step, score in ((10, 0.5), (20, 0.1), (25, 0.9)):
        checkpoints.save_checkpoint(tmp_path, step, TENSORS, {}, score=score, keep=1, every=10)
    assert names(tmp_path) == ["step-00000010", "step-00000025"]
    assert checkpoints.best(tmp_path).name == "step-00000025"
    checkpoints.save_checkpoint(tmp_path, 30, TENSORS, {}, keep=1, every=10)
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


def test_the_last_one_of_a_run_that_is_extended_stays_if_it_is_the_best(tmp_path):
    def save(step, score, ends=True):
        checkpoints.save_checkpoint(
            tmp_path, step, TENSORS, {}, score=score, keep=1, every=10, ends=ends
        )
        return [int(name.removeprefix("step-")) for name in names(tmp_path)]

    assert [save(*one) for one in ((10, 0.5), (20, 0.1), (23, None))][-1] == [10, 23]
    assert save(25, 0.9) == [10, 25]
    assert checkpoints.best(tmp_path).name == "step-00000025"
    assert save(30, None) == [10, 25, 30]  # 10: the best that an uninterrupted run has
    assert checkpoints.best(tmp_path).name == "step-00000025"
    assert save(40, 0.95) == [40]


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damage_is_named_with_what_to_do(tmp_path, damage):
    first = checkpoints.save_checkpoint(tmp_path, 1, TENSORS, {"a": 1})
    last = checkpoints.save_checkpoint(tmp_path, 2, TENSORS, {"a": 2})
    if damage == "missing":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[:-3])
        assert checkpoints.read_info(last).score is None
    with pytest.raises(RunError, match=r"resume from an earlier one with --from") as caught:
        checkpoints.load_checkpoint(last)
    assert f"{last} is damaged" in str(caught.value)
    assert checkpoints.load_checkpoint(first)


def test_a_file_that_cannot_grow_leaves_the_previous_intact_and_no_litter(tmp_path):
    """The kernel refuses the write half way, as on a full disk."""
    first = checkpoints.save_checkpoint(tmp_path, 1, TENSORS, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RunError, match=r"can't save .* of step 2 .*earlier checkpoints are"):
            checkpoints.save_checkpoint(tmp_path, 2, {"large": torch.zeros(10**6)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.load_checkpoint(first)[1] == {"a": 1}


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fills_at_the_end_is_the_same(tmp_path, monkeypatch, call):
    checkpoints.save_checkpoint(tmp_path, 1, TENSORS, {})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(RunError, match=r"No space left on device.*are intact.*free disk space"):
            checkpoints.save_checkpoint(tmp_path, 2, TENSORS, {})
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.load_checkpoint(checkpoints.latest(tmp_path))


def test_a_state_that_is_not_json_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        checkpoints.save_checkpoint(tmp_path, 1, TENSORS, {"a": object()})
    assert checkpoints.latest(tmp_path) is None


def test_a_read_only_directory_is_a_clear_error():
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        first = checkpoints.save_checkpoint(run, 1, TENSORS, {})
        run.chmod(0o755)
        (run / "checkpoints").chmod(0o555)
        root = os.geteuid() == 0
        if root:  # whom no permission stops
            os.seteuid(65534)
        try:
            with pytest.raises(RunError, match=r"Permission denied.*are intact"):
                checkpoints.save_checkpoint(run, 2, TENSORS, {})
        finally:
            if root:
                os.seteuid(0)
            (run / "checkpoints").chmod(0o755)
        assert names(run) == ["step-00000001"]
        assert checkpoints.load_checkpoint(first)


def save_until_killed(run, step):
    """Tensors are small, so that torch uses no threads, which a forked process does not have."""
    while True:
        tensors = {f"x{k}": torch.full((30_000,), float(step)) for k in range(4)}
        tensors["y"] = torch.arange(step % 7 + 1)
        checkpoints.save_checkpoint(
            run, step, tensors, {"step": step}, score=float(step % 5), keep=2
        )
        step += 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_moment_a_run_has_a_whole_checkpoint(tmp_path):
    rng = random.Random(0)
    step, littered = 0, 0
    for _ in range(10):
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(tmp_path, step)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        while (last := checkpoints.latest(tmp_path)) is None or int(last.name[5:]) < step + 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        littered += any(name.startswith(".") for name in names(tmp_path))
        found = checkpoints.list_checkpoints(tmp_path)
        assert 2 <= len(found) <= 4  # two, the best, and one that was about to go
        for path in found:
            tensors, state = checkpoints.load_checkpoint(path)
            found = checkpoints.step_of(path)
            assert state == {"step": found}
            for k in range(4):
                assert torch.equal(tensors[f"x{k}"], torch.full((30_000,), float(found)))
            assert torch.equal(tensors["y"], torch.arange(found % 7 + 1))
        step = found + 1
    assert littered  # some were killed in the middle of a write
    checkpoints.save_checkpoint(tmp_path, step, TENSORS, {})
    assert not [name for name in names(tmp_path) if name.startswith(".")]
