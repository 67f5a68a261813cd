"""These tests import Ray, but do not start it; `tests/integration/ray` has the tests that do."""

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
