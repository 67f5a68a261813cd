"""A recipe is resolved once, and few functions see it whole."""

import sys
import threading
from pathlib import Path

import pytest

import burnish
from burnish import api
from burnish.launch.resolve import Resolved
from burnish.recipe.recipe import Recipe

PACKAGE = Path(burnish.__file__).parent
LANGUAGE = [
    *("task.name=keywords", "task.chat=false", "task.validation_prompts=2", "task.must_end=false"),
    *("model.name=scratch", "model.tokenizer=bytes", "model.layers=1", "model.width=32"),
    *("model.heads=4", "model.d_ff=48", "model.context=256", "device=cpu", "engine.kv_mb=16"),
    *("rollout.batch=4", "rollout.group_size=2", "rollout.max_tokens=4", "train.batch=4"),
    "objective.kl=none",
]


@pytest.mark.parametrize(
    "changes", [[], LANGUAGE, [*LANGUAGE, "objective.proximal=behavior", "loop.lag=1"]]
)
def test_fewer_than_35_functions_receive_the_recipe_of_a_run(changes, tmp_path):
    """`api.train` followed through the code: the functions and methods of the package that get a
    Recipe or a Resolved as an argument. Properties of these two classes do not count."""
    seen = {}

    def watch(frame, event, _):
        code = frame.f_code
        if event != "call" or not Path(code.co_filename).is_relative_to(PACKAGE):
            return
        count = code.co_argcount + code.co_kwonlyargcount
        given = {name: frame.f_locals.get(name) for name in code.co_varnames[:count]}
        if any(isinstance(v, Recipe | Resolved) for name, v in given.items() if name != "self"):
            name = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"
            seen[name] = seen.get(name, 0) + 1

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        api.train("sort", overrides=["train.steps=1", *changes], out=tmp_path / "run", show=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert seen["launch/resolve.py:resolve"] == 1
    assert len(seen) < 35, sorted(seen)
