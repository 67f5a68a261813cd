"""The error tree. Every message a user can act on is one of these: rule, value, remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class BurnishError(Exception):
    """Base of all errors meant for the user; the CLI prints the message, not a traceback."""


class ConfigError(BurnishError):
    """A recipe or a setting is wrong."""


class DataError(BurnishError):
    """A prompt, a dataset row or a reward is not what its task needs."""


class ModelError(BurnishError):
    """A model directory, a checkpoint or a tokenizer can't be used."""


class EngineError(BurnishError):
    """A request that the rollout engine can't serve."""


class GraderError(BurnishError):
    """Grading as a whole failed: workers that do not start, or too many grades that are errors."""


class Suspect(NamedTuple):
    """A token whose probability differs between sampler and learner."""

    context: list[int]
    """Ids of tokens before it."""
    token: int
    sampler: float
    """Log-probability of the token when it was sampled."""
    learner: float
    """Log-probability of the token with the same weights in the learner."""


class MismatchError(BurnishError):
    """Sampler and learner disagree by more than the recipe allows."""

    decode: Callable[[Any], list[str]] | None = None
    """Gives a text for each token; None if nobody here knows the texts."""

    def __init__(self, told: str, worst: list[Suspect]) -> None:
        super().__init__(told, worst)
        self.told, self.worst = told, worst

    def __str__(self) -> str:
        lines = [
            self.told,
            "worst tokens: log-probability of the sampler, of the learner, and text",
        ]
        for one in self.worst:
            ids = [*one.context, one.token]
            texts = self.decode(ids) if self.decode else [f"{i} " for i in ids]
            shown = f"…{''.join(texts[:-1])!r} {texts[-1]!r}"
            lines.append(f"  {one.sampler:9.4f} {one.learner:9.4f}  {shown}")
        return "\n".join(lines)


class RunError(BurnishError):
    """A run directory is missing, in use, or damaged."""


class ActorError(BurnishError):
    """An actor did not answer, or died too often."""


class ActorDied(ActorError):
    """The learner died: the run goes back to its last checkpoint."""


class MissingExtra(BurnishError):
    """An optional part is not installed: the part, and the thing that needs it."""

    def __str__(self) -> str:
        extra, needed_for = self.args
        return f"{needed_for} needs the optional part '{extra}'; {installed(extra)}"


def installed(extra: str) -> str:
    """The commands that install an optional part."""
    return f"install it: pip install 'burnish[{extra}]', or '.[{extra}]' in a checkout"
