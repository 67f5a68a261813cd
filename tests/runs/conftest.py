import pytest

from tests.runs.browser import EXECUTABLE, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if EXECUTABLE is None:
        pytest.skip("Chromium is not installed; get it with: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
