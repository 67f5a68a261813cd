"""A Ray cluster that requires a token: a real one, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = pytest.mark.slow

OWN = "0123456789abcdef" * 2
CLUSTER = """
import ray, sys
told = ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error")
print(told.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = str(tmp_path_factory.mktemp("home"))
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": OWN, "HOME": home},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        yield said.readline().strip()
    process.communicate("", timeout=60)


def join(address: str, folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-m", "burnish", "train", "sort", "--address", address]
    return subprocess.run(
        [*command, "--quiet", "--set", "train.steps=1", "--out", "run"],
        env={**kept, "HOME": str(folder), **given},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )


MODE = {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        MODE,
        MODE | {"RAY_AUTH_TOKEN": "f" * 32},
        MODE | {"RAY_AUTH_TOKEN": ""},
        MODE | {"RAY_AUTH_TOKEN_PATH": "nowhere"},
    ],
    ids=["no token", "mode alone", "another token", "empty token", "no file"],
)
def test_a_missing_or_wrong_token_is_named(
    address: str, tmp_path: Path, given: dict[str, str]
) -> None:
    done = join(address, tmp_path, **given)
    assert done.returncode == 1, done.stderr
    assert f"runtime.address = '{address}': the Ray cluster there requires a token" in done.stderr
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr
    assert "no Ray cluster answers" not in done.stderr
    assert "Traceback" not in done.stderr
    recorded = json.loads((tmp_path / "run" / "status.json").read_text())
    assert recorded["state"] == "failed"
    assert "the Ray cluster there requires a token" in recorded["error"]["message"]


def test_a_run_joins_with_the_token(address: str, tmp_path: Path) -> None:
    """From the environment here; actors get it from their cluster."""
    done = join(address, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=OWN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.extra
def test_a_token_in_its_usual_file_is_used(address: str, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(OWN)
    done = join(address, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
