"""What several rooms of the tests share."""

from pathlib import Path

import pytest

from burnish.errors import ModelError
from burnish.model import hub


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's directory, downloaded once into the user's cache."""
    try:
        return hub.resolve(hub.DEFAULT)
    except ModelError as error:
        if "can't be downloaded" in str(error):
            pytest.skip(str(error))
        raise
