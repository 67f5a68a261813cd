"""Threads that wait give their core away; a run keeps the number of threads that it began with."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from burnish.machine.threads import share_cores
share_cores()
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "passive 1000"),
        ({"OMP_WAIT_POLICY": "active"}, "active None"),
        ({"GOMP_SPINCOUNT": "9"}, "None 9"),
    ],
)
def test_threads_soon_sleep_unless_the_user_says_otherwise(given, policy):
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=kept | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == policy
