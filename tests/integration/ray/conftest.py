"""One Ray for all tests of this folder: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(
        "local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield
    ray.shutdown()
