import struct

import pytest

from burnish import config
from burnish.runs import tensorboard
from burnish.runs.directory import EVENTS, RunDirectory


def test_crc32c_of_known_strings():
    """From RFC 3720, B.4, and the usual check value."""
    assert tensorboard.crc32c(b"123456789") == 0xE3069283
    assert tensorboard.crc32c(bytes(32)) == 0x8A9136AA
    assert tensorboard.crc32c(b"\xff" * 32) == 0x62A8AB43


def test_an_event_byte_by_byte():
    value = b"\x0a\x01a" + b"\x15" + struct.pack("<f", 0.5)
    expected = (
        b"\x09" + struct.pack("<d", 2.0) + b"\x10\xac\x02" + b"\x2a\x0a\x0a" + bytes([8]) + value
    )
    assert tensorboard.event(300, {"a": 0.5}, 2.0) == expected


def write(path, wall_time):
    scalars = {"rollout/reward": 0.25, "train/loss": -1e-3, "train/lag": 0, "größe": 1e300}
    with RunDirectory(path, config.load("sort")) as run:
        for step in range(200):
            tensorboard.append_scalars(
                run, step, scalars | {"step": float(step)}, wall_time=wall_time + step
            )
    return path / EVENTS


def test_the_same_run_writes_the_same_bytes(tmp_path):
    assert write(tmp_path / "a", 5.0).read_bytes() == write(tmp_path / "b", 5.0).read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_it(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path / "run", 1e9)
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"scalars": 0}).Reload()
    tags = ["größe", "rollout/reward", "step", "train/lag", "train/loss"]
    assert sorted(events.Tags()["scalars"]) == sorted(tags)
    rows = events.Scalars("step")
    assert [(row.wall_time, row.step, row.value) for row in rows] == [
        (1e9 + step, step, float(step)) for step in range(200)
    ]
    assert events.Scalars("train/loss")[0].value == struct.unpack("<f", struct.pack("<f", -1e-3))[0]
    assert events.Scalars("größe")[0].value == float("inf")
