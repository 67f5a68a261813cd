"""Exceptions for users. Their messages state the rule, the offending value and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class BurnishError(Exception):
    """Base class of all errors for users; the CLI prints the message without a traceback."""


class ConfigError(BurnishError):
    """A recipe or a setting is wrong."""


class DataError(BurnishError):
    """A prompt, a dataset row or a reward does not fit its task."""


class ModelError(BurnishError):
    """A model directory, a checkpoint or a tokenizer can't be used."""


class EngineError(BurnishError):
    """The rollout engine can't serve a request."""


class GraderError(BurnishError):
    """Grading failed as a whole: workers do not start, or too many grades are errors."""


class Suspect(NamedTuple):
    """A token whose probability differs between sampler and learner."""

    context: list[int]
    """Ids of the preceding tokens."""
    token: int
    sampler: float
    """Log-probability of the token when it was sampled."""
    learner: float
    """Log-probability of the token with the same weights in the learner."""


class MismatchError(BurnishError):
    """Log-probabilities of sampler and learner differ by more than the recipe allows. The text of
    the error ends with a table of the worst tokens."""

    decode: Callable[[Any], list[str]] | None = None
    """Function that converts token ids to one text per token. The run sets it before it raises the
    error again; None to show ids."""

    def __init__(self, message: str, worst: list[Suspect]) -> None:
        """``worst`` are the tokens with the largest differences, in the order of the table."""
        super().__init__(message, worst)
        self.message, self.worst = message, worst

    def __str__(self) -> str:
        lines = [
            self.message,
            "worst tokens: log-probability of the sampler, of the learner, and text",
        ]
        for one in self.worst:
            ids = [*one.context, one.token]
            texts = self.decode(ids) if self.decode else [f"{i} " for i in ids]
            shown = f"…{''.join(texts[:-1])!r} {texts[-1]!r}"
            lines.append(f"  {one.sampler:9.4f} {one.learner:9.4f}  {shown}")
        return "\n".join(lines)


class CallbackError(BurnishError):
    """A callback of a script, such as ``on_step``, raised an error."""


class RunError(BurnishError):
    """A run directory is missing, in use, or damaged."""


class ClusterError(RunError):
    """The run's Ray cluster does not answer, rejects this process, or was lost."""


class ChildError(BurnishError):
    """A child process could not be started, failed, or did not respond within its timeout."""


class ActorError(BurnishError):
    """An actor (a worker process of a run) did not respond, or died too often."""


class ActorDied(ActorError):
    """The learner died, or its tensors did not reach another actor; the run restarts from its last
    checkpoint."""


class MissingExtra(BurnishError):
    """An optional part of burnish (a pip extra) is not installed. The arguments are the name of the
    extra and the feature that needs it."""

    def __str__(self) -> str:
        extra, needed_for = self.args
        return f"{needed_for} needs the optional part '{extra}'; {install_hint(extra)}"


def install_hint(extra: str) -> str:
    """Return a clause that says how to install a pip extra of burnish, for error messages."""
    return f"install it: pip install 'burnish[{extra}]', or '.[{extra}]' in a checkout"
