"""Benchmarks for a GPU also run on a CPU, with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_steps_of_large_models_are_measured_beside_their_estimates(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/large.py", "--device", "cpu", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", str(file)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    steps = [measured for measured in found.values() if "planned seconds" in measured]
    assert len(steps) == 4
    for measured in steps:
        assert 0 <= measured["of which the optimizer"] < measured["seconds"]
        assert measured["planned GiB"] > 0
    assert found["7B, the loop"]["tokens/s"] > 0
