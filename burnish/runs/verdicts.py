"""Warnings about a run that has finished and probably has not learned, each with two remedies.

    not graded              grading failed for at least 95% of the responses
    nothing to learn from   at least 95% of the groups were dead
    truncated               at least 95% of the responses reached the length limit
    nothing learned         the reward (or the loss) moved by less than two standard errors
    too far                 KL to the initial model above 1 nat per token, or not finite

All of these are functions of the metrics and of the recipe's settings. A remedy names a setting
only if the recipe is valid with the new value.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, NamedTuple

from burnish.console.text import printable
from burnish.errors import BurnishError
from burnish.recipe.load import flatten, format_toml, load_recipe
from burnish.recipe.recipe import Recipe, RolloutConfig
from burnish.runs.directory import read_recipe
from burnish.runs.metrics import Series, collect, iterate_rows, window

NEARLY_ALL = 0.95
"""Share of dead groups or of truncated responses that is reported."""
ERRORS = 2.0
"""Number of standard errors by which the reward has to move."""
FAR = 1.0
"""KL to the initial model, in nats per token, above which the policy counts as too far from it."""
TO_INITIAL = ("kl/held_out_k1", "kl/initial_k1")
TO_REFERENCE = ("kl/reference_k1",)
"""Metrics of the distance to the initial model, and to the reference, which are read if the run has
none of the former. The estimator k3 can be dominated by a single token, so it is not read."""
MOVED = 0.1
"""KL in nats per token from which on the learning rate is not the reason that nothing was
learned."""
LONGEST = 300
"""Maximum number of characters of a quoted error."""
Points = Sequence[tuple[float, float]]
Settings = Mapping[str, Any]
"""Settings of a recipe by their full names."""


class Remedy(NamedTuple):
    """A change that may help."""

    text: str
    changes: Settings = MappingProxyType({})
    """New values by setting; empty if the remedy is not a setting."""


class Movement(NamedTuple):
    """A measure at the start and at the end of a run: means over windows of steps."""

    first: float
    last: float
    error: float
    """Standard error of the difference."""

    @property
    def is_clear(self) -> bool:
        """Whether the difference is larger than ``ERRORS`` standard errors, in either direction."""
        return abs(self.last - self.first) > ERRORS * self.error


def read_warnings(run: Path, *, is_over: bool | None = None) -> list[str]:
    """Return the warnings about a run, from its files.

    ``is_over`` as in ``find_warnings``; if it is None, a run with a summary.json is over.
    """
    rows = iterate_rows(run / "metrics.jsonl")
    is_over = (run / "summary.json").exists() if is_over is None else is_over
    series = collect(rows, finite=False)
    error = most_frequent_error(run) if _is_ungraded(series) else None
    return find_warnings(series, read_recipe(run), is_over=is_over, error=error)


def most_frequent_error(run: Path) -> str | None:
    """Return the most frequent message of a grader that rollouts.jsonl has; None if it has none."""
    found = (row.get("message") for row in iterate_rows(run / "rollouts.jsonl"))
    counts = Counter[str](message for message in found if message)
    return max(counts, key=lambda message: counts[message], default=None)


def find_warnings(
    series: Series, recipe: Mapping[str, Any], *, is_over: bool = True, error: str | None = None
) -> list[str]:
    """Return sentences about what went wrong in a run, with remedies; an empty list if nothing was
    found.

    ``series`` are the metrics, including values that are not finite. ``recipe`` is the content of
    recipe.toml. Whether the reward moved is judged only if the run ``is_over``: all steps are done.
    ``error`` is the most frequent message of the grader.
    """
    settings = _settings(recipe)
    lost = _ungraded(series, settings, error) or _dead(series, settings)
    found = [lost, _truncated(series, settings)]
    if lost is None and is_over:
        found.append(_unmoved(series, settings))
    found.append(_far(series, settings))
    warnings = []
    for text, remedies in filter(None, found):
        works = [remedy for remedy in remedies if is_possible(recipe, remedy.changes)]
        told = [_describe(remedy, settings) for remedy in works[:2]]
        warnings.append(
            f"{text} Likely remedies in a new run: {', or '.join(told)}." if told else text
        )
    return warnings


Finding = tuple[str, list[Remedy]] | None
"""A sentence and its remedies, the likeliest first."""


def _is_ungraded(series: Series) -> bool:
    return (_mean(_finite(series, "rollout/grades_error")) or 0.0) >= NEARLY_ALL


def _ungraded(series: Series, settings: Settings, error: str | None) -> Finding:
    """Name the error because of which nearly all responses have no grade."""
    if not _is_ungraded(series):
        return None
    failed, aborted = (
        _mean(_finite(series, f"rollout/{name}")) or 0.0 for name in ("grades_error", "aborted")
    )
    text = f"{_percent(failed)} of the responses were not graded, so next to nothing was learned."
    if failed == 1:
        text = "No response was graded, so nothing was learned."
    if aborted > failed / 2:
        return f"{text} The engine aborted most of them.", [_slower(settings)]
    if error is not None:
        lines = error.strip().splitlines() or [error]
        said = shorten(printable(lines[0]), LONGEST, placeholder=" …").rstrip(".")
        text += f" The most frequent error: {said}."
    graded_by = {"judged": "judge", "environment": "environment or its reward"}
    graded_by |= {"verifiers": "taskset or its settings"}
    wrong = graded_by.get(str(settings.get("task.name")), "reward")
    strict = {"rollout.max_errors": RolloutConfig.model_fields["max_errors"].default}
    return text, [Remedy(f"a corrected {wrong}"), Remedy("a limit that ends such a run", strict)]


def _dead(series: Series, settings: Settings) -> Finding:
    share = _mean(_finite(series, "rollout/dead_groups"))
    if share is None or share < NEARLY_ALL:
        return None
    least, most = (_finite(series, f"rollout/reward_{end}") for end in ("min", "max"))
    rewards = {value for points in (least, most) for _, value in points}
    level, lowest, highest = (
        _mean(_finite(series, f"rollout/{name}")) for name in ("reward", "reward_min", "reward_max")
    )
    is_easy = level is not None and level > ((lowest or 0.0) + (highest or 0.0)) / 2
    if level is not None and lowest == highest:  # all responses of a step earned the same
        is_easy = level >= 1 - 1e-6
    same = "all responses to a prompt earned the same reward"
    if settings.get("selection.dead_by") == "correct":
        same = "none or all responses to a prompt were correct"
    text = f"{_percent(share)} of the groups were dead ({same}), so there was little to learn from."
    remedies = [*(_harder(settings) if is_easy else _easier(settings))]
    if share == 1 and len(rewards) == 1:
        text = (
            f"Every response earned exactly {rewards.pop():z.6g}, so nothing was learned from it."
        )
        remedies.insert(0, Remedy("a corrected reward, if it should tell responses apart"))
    return text, remedies


def _harder(settings: Settings) -> Iterable[Remedy]:
    """Yield remedies for a task that the model has solved before it learns."""
    match settings.get("task.name"):
        case "sort":
            longer = settings.get("task.length", 3) + 1
            yield Remedy("a harder task", {"task.length": longer})
        case "keywords":
            more = {
                "task.least": settings.get("task.most", 4),
                "task.most": settings.get("task.most", 4) + 2,
            }
            yield Remedy("a harder task", more)
        case _:
            yield Remedy("harder prompts, or a reward that tells good responses apart")
    yield Remedy(
        "other prompts in place of dead groups",
        {"selection.dead_groups": "dynamic", "selection.on_bound": "learn"},
    )
    yield Remedy("a reward that tells good responses apart")


def _easier(settings: Settings) -> Iterable[Remedy]:
    """Yield remedies for a task that the model never solves."""
    match settings.get("task.name"):
        case "sort":
            yield Remedy("an easier task", {"task.length": settings.get("task.length", 3) - 1})
        case "keywords" if settings.get("task.most", 4) > 1:
            fewer = {"task.least": 1, "task.most": settings.get("task.most", 4) - 1}
            yield Remedy("an easier task", fewer)
        case _:
            yield Remedy("easier prompts, or a reward with partial credit")
    group, batch = settings["rollout.group_size"], settings["rollout.batch"]
    larger = {"rollout.group_size": 2 * group, "rollout.batch": 2 * batch}
    yield Remedy("more responses per prompt", larger | {"train.batch": 2 * settings["train.batch"]})
    yield Remedy("a warm start with `burnish sft` on good responses")


def _truncated(series: Series, settings: Settings) -> Finding:
    share = _mean(_finite(series, "rollout/truncated"))
    if share is None or share < NEARLY_ALL:
        return None
    limits = {end: _mean(_finite(series, f"rollout/truncated_{end}")) or 0.0 for end in REMEDIES}
    reached = max(limits, key=lambda end: limits[end])
    if limits[reached] > share / 2:
        reason, remedy = REMEDIES[reached]
        return f"{_percent(share)} of the episodes were truncated, most by {reason}.", [remedy]
    limit = settings.get("rollout.max_tokens")
    text = f"{_percent(share)} of the responses were truncated at rollout.max_tokens = {limit}."
    if not isinstance(limit, int):
        return text, [Remedy("a higher rollout.max_tokens")]
    longer = {"rollout.max_tokens": 2 * limit}
    if micro := settings.get("train.micro_tokens"):
        longer["train.micro_tokens"] = max(micro, 4 * limit)
    if settings.get("task.name") in ("environment", "agent", "verifiers"):
        most, turns = settings["task.turns"], _mean(_finite(series, "rollout/turns"))
        return _truncated_episodes(share, turns, most, longer)
    return text, [
        Remedy("a higher limit", longer),
        *([] if settings.get("task.must_end") else [MUST_END]),
        Remedy("a text in rollout.stop that ends a response"),
    ]


def _truncated_episodes(
    share: float, turns: float | None, most: int, longer: Settings
) -> tuple[str, list[Remedy]]:
    """Name the limit that truncated most episodes: the one of ``most`` turns if their mean number
    is near it. ``longer`` are settings that double the number of tokens."""
    text = f"{_percent(share)} of the episodes were truncated at"
    if turns is not None and turns >= most - 0.5:
        more = Remedy("more turns", {"task.turns": 2 * most, **longer})
        sooner = Remedy("an environment that ends its episodes sooner")
        return f"{text} task.turns = {most}.", [more, sooner]
    limit = longer["rollout.max_tokens"] // 2
    shorter = Remedy("shorter messages of the environment (task.observation_tokens)")
    return f"{text} rollout.max_tokens = {limit}.", [Remedy("more tokens", longer), shorter]


REMEDIES = {
    "context": (
        "the model's context",
        Remedy("a lower task.observation_tokens or task.turn_tokens, or a longer model.context"),
    ),
    "time": ("task.episode_seconds", Remedy("a higher task.episode_seconds")),
}
"""Descriptions and remedies of further limits of episodes, by the ending of their metrics."""
MUST_END = Remedy("no reward for a response that does not end", {"task.must_end": True})


def _unmoved(series: Series, settings: Settings) -> Finding:
    """Compare the first and the last steps of the run by its reward, by its KL to the teacher if it
    is distilled, or by its loss if it is supervised."""
    if "kl/teacher_k1" in series:
        return _loss_unmoved(series, settings, "KL to the teacher", "kl/teacher_k1")
    if "rollout/responses" not in series:
        return _loss_unmoved(series, settings, "loss", "train/loss")
    if not _is_rewarded(settings):
        return None
    move = reward_movement(series)
    if move is None or (move.is_clear and move.last > move.first):
        return None
    held_out = accuracy_movement(series)
    if held_out is not None and held_out.is_clear and held_out.last > held_out.first:
        return None
    values = f"{move.first:z.4g} at first, {move.last:z.4g} at last"
    if move.is_clear:
        text = f"The reward fell: {values}."
        return text, [_slower(settings), _closer(settings), _longer_rollouts(settings)]
    text = (
        f"The reward did not move measurably: {values}, a difference of less than two standard "
        f"errors (one is {move.error:.2g})."
    )
    if _farthest(series)[2] > MOVED:
        return text, [_longer_rollouts(settings), _slower(settings)]
    return text, [_faster(settings), _more_steps(settings)]


def _loss_unmoved(series: Series, settings: Settings, label: str, name: str) -> Finding:
    move, held_out = step_movement(_finite(series, name)), _finite(series, "validation/loss")
    fell_held_out = len(held_out) > 1 and held_out[-1][1] < held_out[0][1]
    if move is None or fell_held_out or (move.is_clear and move.last < move.first):
        return None
    values = f"{move.first:z.4g} at first, {move.last:z.4g} at last"
    if move.is_clear:
        return f"The {label} rose: {values}.", [_slower(settings), _clipped(settings)]
    text = (
        f"The {label} did not move measurably: {values}, a difference of less than two standard "
        f"errors (one is {move.error:.2g})."
    )
    return text, [_faster(settings), _more_steps(settings)]


def _far(series: Series, settings: Settings) -> Finding:
    for name in (*TO_INITIAL, *TO_REFERENCE, "kl/initial_k3", "kl/reference_k3"):
        for step, value in series.get(name, []):
            if not math.isfinite(value):
                text = f"KL to the {_model_of(name)} was not finite at step {step:g}."
                wide = {"train.precision": "fp32", "engine.precision": "fp32"}
                is_wide = settings.get("train.precision") == "fp32"
                fp32 = [] if is_wide else [Remedy("more exact numbers", wide)]
                return text, [_slower(settings), *fp32, _clipped(settings), _closer(settings)]
    # The KL of a model that begins with random weights says nothing: it has to grow.
    if settings.get("model.name") in ("sorter", "scratch"):
        return None
    name, step, value = _farthest(series)
    if value <= FAR:
        return None
    text = (
        f"KL to the {_model_of(name)} reached {value:.3g} nats per token (step {step:g}, {name}, a "
        "single step): the policy has probably lost other abilities."
    )
    return text, [_closer(settings), _slower(settings)]


def _farthest(series: Series) -> tuple[str, float, float]:
    """Return the largest KL to the initial model, or else to the reference: the metric, the step
    and the value, which is 0 if none was measured."""
    for names in (TO_INITIAL, TO_REFERENCE):
        found = [(name, *point) for name in names for point in _finite(series, name)]
        if found:
            return max(found, key=lambda one: one[2])
    return "", 0.0, 0.0


def _model_of(name: str) -> str:
    return "reference" if "reference" in name else "initial model"


def reward_movement(series: Series) -> Movement | None:
    """Return the movement of the reward; None if the run has fewer than two steps, or if the
    standard error is unknown.

    The variance of a step's mean is the larger of two estimates: the variance between the steps of
    a window, and the variance of the step's rewards divided by the number of its responses.
    """
    reward = _finite(series, "rollout/reward")
    deviation = dict(_finite(series, "rollout/reward_std"))
    counts = dict(_finite(series, "rollout/responses"))
    sampled = {
        step: deviation[step] ** 2 / counts[step]
        for step, _ in reward
        if step in deviation and counts.get(step)
    }
    return step_movement(reward, sampled)


def step_movement(
    points: Points, variances: Mapping[float, float] | None = None
) -> Movement | None:
    """Return the movement between the windows of first and last steps (``metrics.window``); None if
    there are fewer than two points, or if the standard error is unknown.

    ``variances`` are known variances of values by step. Without them, a window needs two steps.
    """
    size = window(len(points))
    if len(points) < 2 or (size < 2 and not variances):
        return None
    means, squares = [], 0.0
    for part in (points[:size], points[-size:]):
        mean = sum(value for _, value in part) / size
        between = sum((value - mean) ** 2 for _, value in part) / max(1, size - 1)
        known = [(variances or {}).get(step, 0.0) for step, _ in part]
        squares += max(between, sum(known) / size) / size
        means.append(mean)
    return Movement(means[0], means[1], math.sqrt(squares))


def accuracy_movement(series: Series) -> Movement | None:
    """Return the movement of the held-out accuracy from the first to the last validation; None if
    there are fewer than two.

    The standard error is computed as for two independent samples.
    """
    names = ("accuracy", "accuracy_low", "accuracy_high")
    columns = [_finite(series, f"validation/{name}") for name in names]
    if min(map(len, columns)) < 2:
        return None
    middle, low, high = ([points[i][1] for i in (0, -1)] for points in columns)
    widths = [(b - a) / (2 * 1.96) for a, b in zip(low, high, strict=True)]
    return Movement(middle[0], middle[1], math.hypot(*widths))


def is_possible(recipe: Mapping[str, Any], changes: Settings) -> bool:
    """Return whether a recipe with these changes is valid, and each of them has an effect. True if
    the recipe itself can't be read, because it has pieces from Python."""
    try:
        load_recipe(recipe)
    except BurnishError:
        return True
    try:
        load_recipe(recipe, changes)
    except BurnishError:
        return False
    return True


def smaller_passes(recipe: Path) -> str | None:
    """Return a command that starts a new run from the file ``recipe``, a run's recipe.toml, with
    one setting changed so that forward passes need less memory; None if no setting does that."""
    try:
        table = read_recipe(recipe.parent)
    except (BurnishError, OSError):
        return None
    settings = _settings(table)
    batch = settings.get("train.batch") or 1
    sequences, tokens = (settings.get(f"train.micro_{kind}") for kind in ("sequences", "tokens"))
    candidates: list[Settings] = []
    if tokens is None and (sequences or batch) > 1:
        candidates.append({"train.micro_sequences": max(1, (sequences or batch) // 2)})
    elif tokens is not None:
        longest = 2 * settings.get("rollout.max_tokens", 0)
        candidates.append({"train.micro_tokens": max(tokens // 2, longest)})
    candidates.append({"train.recompute": True})
    for changes in candidates:
        is_new = any(settings.get(key) != value for key, value in changes.items())
        if is_new and is_possible(table, changes):
            words = [word for change in _written(changes) for word in ("--set", change)]
            return shlex.join(["burnish", "train", str(recipe), *words])
    return None


def _faster(settings: Settings) -> Remedy:
    return Remedy("a higher learning rate", _rate(settings, 3.0))


def _slower(settings: Settings) -> Remedy:
    return Remedy("a lower learning rate", _rate(settings, 1 / 3))


def _rate(settings: Settings, factor: float) -> Settings:
    rate = settings.get("train.learning_rate", 1e-3) * factor
    return {"train.learning_rate": float(f"{rate:.1g}")}


def _more_steps(settings: Settings) -> Remedy:
    """More steps, or in a supervised run more epochs."""
    if "task.epochs" in settings:
        return Remedy("more epochs", {"task.epochs": 2 * settings["task.epochs"]})
    more = {"train.steps": 2 * settings.get("train.steps", 1)}
    if decay := settings.get("train.decay_steps"):
        more["train.decay_steps"] = 2 * decay
    return Remedy("more steps", more)


def _closer(settings: Settings) -> Remedy:
    """A larger KL penalty, or one if there is none."""
    if coefficient := settings.get("objective.kl.coefficient"):
        larger = float(f"{3 * coefficient:.2g}")
        return Remedy("a stronger KL penalty", {"objective.kl.coefficient": larger})
    kl = {"objective.kl.name": "k3", "objective.kl.coefficient": 0.05}
    return Remedy("a KL penalty", kl)


def _longer_rollouts(settings: Settings) -> Remedy:
    batches = {key: 2 * settings.get(key, 1) for key in ("rollout.batch", "train.batch")}
    return Remedy("more responses per step, for a less noisy gradient", batches)


def _clipped(settings: Settings) -> Remedy:
    norm = settings.get("train.clip_norm", math.inf)
    return Remedy("smaller steps", {"train.clip_norm": 0.1 if norm > 1 else norm / 10})


def _describe(remedy: Remedy, settings: Settings) -> str:
    """Return the text of a remedy with its new values, and with the present values of these
    settings if the recipe has them."""
    if not remedy.changes:
        return remedy.text
    present = [settings[key] for key in remedy.changes if settings.get(key) is not None]
    now = f", now {' and '.join(map(_toml, present))}" if present else ""
    return f"{remedy.text} ({', '.join(_written(remedy.changes))}{now})"


def _written(changes: Settings) -> list[str]:
    return [f"{key}={_toml(value)}" for key, value in changes.items()]


def _toml(value: Any) -> str:
    return format_toml({"x": value}).removeprefix("x = ").strip()


def _settings(recipe: Mapping[str, Any]) -> Settings:
    """Return all settings of a recipe, with defaults also if it has pieces from Python."""
    try:
        return flatten(load_recipe(recipe).model_dump())
    except BurnishError:
        return flatten(Recipe().model_dump()) | flatten(recipe)


def _is_rewarded(settings: Settings) -> bool:
    """Return whether responses get a reward, from a task or from a reward model."""
    rewards = [value for key, value in settings.items() if key.endswith(".reward")]
    learned = [settings[key] for key in settings if key.startswith("reward_model")]
    return any(map(bool, learned)) or any(name != "none" for name in rewards or [""])


def _finite(series: Series, name: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in series.get(name, []) if math.isfinite(value)]


def _mean(points: Points) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


def _percent(share: float) -> str:
    return "All" if share == 1 else f"{100 * share:.3g}%"
