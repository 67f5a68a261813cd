import pickle

import pytest

import burnish
from burnish import errors


def test_a_missing_extra_says_what_to_install():
    error = errors.MissingExtra("ray", "running on a cluster")
    assert str(error) == (
        "running on a cluster needs the optional part 'ray'; "
        "install it: pip install 'burnish[ray]', or '.[ray]' in a checkout"
    )


def test_errors_travel_between_processes():
    for error in (errors.ConfigError("x"), errors.MissingExtra("hf", "reading a model")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert isinstance(again, errors.BurnishError)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        burnish.nothing  # noqa: B018
