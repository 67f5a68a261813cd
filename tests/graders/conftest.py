import pytest

from burnish.graders.answers import AnswerChecker
from burnish.graders.pool import Limits


@pytest.fixture(scope="session")
def checker():
    """One pool for all tests that compare algebra: its worker takes seconds to start."""
    checker = AnswerChecker(Limits(workers=1, cpu_seconds=5))
    yield checker
    checker.close()
