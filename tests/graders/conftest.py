import pytest

from burnish.graders.answers import MathGrader
from burnish.graders.pool import GraderLimits


@pytest.fixture(scope="session")
def checker():
    """One pool for all tests that compare algebra: its worker takes seconds to start."""
    checker = MathGrader(limits=GraderLimits(workers=1, cpu_seconds=5))
    yield checker
    checker.close()
