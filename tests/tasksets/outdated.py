"""An environment for verifiers before 0.4."""


def load_environment(**settings):
    raise AssertionError("not called")
