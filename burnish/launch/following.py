"""Follows a run: loads each new checkpoint into the engine of a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Self

from burnish.errors import BurnishError, ConfigError
from burnish.launch.models import DTYPES, RunSource, open_run
from burnish.launch.resolve import resolve
from burnish.model import lora
from burnish.recipe.load import load_recipe
from burnish.runs import checkpoints
from burnish.types import Weights

INTERVAL = 2.0
"""Seconds between two looks at the run's checkpoints."""


class RunFollower:
    """Context manager that loads the newest checkpoint of a run, and in a thread of its own each
    later one. The version of the weights is the checkpoint's step.

    A checkpoint that can't be loaded, for example because the run has deleted it meanwhile, is
    reported once, and the old weights stay loaded.
    """

    def __init__(
        self,
        run: Path,
        precision: str,
        load: Callable[[Weights], Future[None]],
        report: Callable[[str], None],
    ) -> None:
        """``load`` loads weights of the type ``precision`` and returns a future that is done when
        they are loaded. ``report`` is called with one line of text for each checkpoint. Raise a
        ConfigError if ``run`` is not the directory of a run."""
        self._path, self._dtype, self._load, self._tell = run, DTYPES[precision], load, report
        self._source = _find_source(run)
        self._seen: tuple[str, int] | None = None
        """Name and time of the last checkpoint that was loaded or refused."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)

    def __enter__(self) -> Self:
        """Load the newest checkpoint, if there is one; raise its error if that fails."""
        self._update()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self._update()
            except (BurnishError, OSError) as error:
                if not self._ended.is_set():
                    self._tell(f"the old weights stay loaded: {error}")
            except CancelledError:
                pass  # the server is stopping

    def _update(self) -> None:
        """Load the newest checkpoint unless it is loaded already."""
        newest = checkpoints.latest(self._path)
        if newest is None:
            return
        try:
            found = newest.name, newest.stat().st_mtime_ns
        except FileNotFoundError:  # the run has just deleted it
            return
        if found == self._seen:
            return
        self._seen = found
        step = checkpoints.step_of(newest)
        transformer, _ = open_run(self._source, newest)
        lora.fold(transformer).learn().to(self._dtype)
        self._load(Weights(step, 0, dict(transformer.exchange()))).result()
        self._tell(f"loaded step {step} of {self._path}")


def _find_source(run: Path) -> RunSource:
    if not (run / "recipe.toml").is_file():
        raise ConfigError(
            f"a server follows the directory of a run, and {str(run)!r} has no recipe.toml"
        )
    recipe = load_recipe({"task": "keywords", "model": {"name": str(run)}})
    source = resolve(recipe, checks=False).source.run
    assert source is not None
    return source
