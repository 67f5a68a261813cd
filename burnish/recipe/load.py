"""Reading, changing, checking and writing recipes.

``load`` is the one way from a recipe's name or file to a checked ``Recipe``. All problems of a
recipe are one ``ConfigError`` that says the rule, the value and the remedy. A recipe file holds
only settings that differ from the defaults. Between its file and its model a recipe is a flat table
of whole names, such as "train.steps".
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from burnish.errors import ConfigError
from burnish.pieces.advantages import Teacher
from burnish.pieces.objective import KINDS
from burnish.pieces.piece import name_of
from burnish.schema.models import SorterConfig
from burnish.schema.recipe import Recipe
from burnish.schema.selection import endless
from burnish.sections import OWN, as_table, nearest

RECIPES = Path(__file__).parent / "recipes"
PRESETS = Path(__file__).parent / "presets"
"""Published algorithms: settings that go over those of any recipe."""
CHOSEN = ("task", "model", "loop", "length", "train.learn", *(f"objective.{k}" for k in KINDS))
"""Sections that a recipe chooses by name, out of several."""
LANGUAGE = [
    *("device", "engine", "train.learn", "train.recompute", "validation.max_tokens"),
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop"),
    *("rollout.top_p", "rollout.top_k", "rollout.truncated"),
    *("rollout.overlong", "rollout.think", "length"),
]
"""Settings that only a language model reads."""
SAMPLED = [
    *("rollout", "selection", "engine", "objective", "critic", "length", "log.rollouts"),
    *("loop", "buffer", "runtime", "teacher", "reward_model"),
    *("train.steps", "train.epochs", "train.log_kl", "train.mismatch_mean", "train.mismatch_max"),
    *("validation.samples", "validation.temperature", "validation.max_tokens"),
]
"""Settings that a supervised run does not read, since it samples nothing."""
FILLING = ["selection.max_asked", "selection.on_bound"]
"""Settings that only a run reads which asks other prompts in the place of dead groups."""
HISTORY = ["selection.leave_at", "selection.target", "selection.floor"]
"""Settings that only a run reads whose prompts come again."""
APART = [
    *("runtime.address", "runtime.generators", "runtime.generator", "runtime.learner"),
    *("runtime.threads", "runtime.transport", "runtime.deadline"),
]
"""Settings that only a run with actors reads."""
TOGETHER = ["runtime.threads", "runtime.deadline"]
"""Those of them that a run on a mesh reads, too."""
SHARES = {
    "objective.reduction": ("constant", "length", 1.0),
    "length": ("overlong", "buffer", 0.2),
}
"""Settings of a piece that are a share of the longest response, unless they are given."""
Table = Mapping[str, Any]
"""Settings as nested dicts."""
Overrides = str | Table | Sequence[str | Table]
"""Changes to a recipe: "section.key=value" texts and tables, one or several."""


def load(source: str | os.PathLike[str] | Table | Recipe, overrides: Overrides = ()) -> Recipe:
    """The recipe of a name, a TOML file, a table or a recipe, with the overrides applied.

    ``preset`` names settings of a published algorithm. They go over the recipe's own, and overrides
    go over both.
    """
    if isinstance(source, Recipe):
        objects = {key: getattr(source.task, key, None) for key in ("rows", "function")}
        given = flat(effective(source)) | {
            f"task.{key}": value for key, value in objects.items() if value is not None
        }
    elif isinstance(source, Mapping):
        given = flat(source)
    else:
        name = os.fspath(source)
        given = {"name": Path(name).stem} | flat(read_recipe(name))
    changes = changed(overrides)
    preset = changes.pop("preset", given.pop("preset", None))
    chosen = {} if preset is None else flat(read_recipe(str(preset), PRESETS))
    is_sorter = given.get("task.name", "sort") == "sort"
    left_out = ("description", "model.fp32_head") if is_sorter else ("description",)
    chosen = {key: value for key, value in chosen.items() if key not in left_out}
    merged = given
    for over in (chosen, changes):
        merged = _without_replaced(merged, over) | over
    recipe = _validate(merged)
    useless = _useless(merged, recipe)
    for key, cause in useless.items():
        # An override may deprive a setting of the recipe of its effect, and a preset may hold one
        # that this task or model does not have: then it is left out.
        is_asked = key in changes or (key in given and cause not in chosen | changes)
        if is_asked and key not in chosen.keys() - changes.keys():
            value = _toml(flat(recipe.model_dump())[cause])
            raise ConfigError(f"{key} has no effect with {cause} = {value}; remove it")
    return _validate({key: merged[key] for key in merged if key not in useless})


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with ``precision`` in the place of 'auto', as it is run and recorded.

    A sampler whose precision is open takes the learner's, because a policy that samples in another
    one learns less. The sorting model has a few hundred weights and always learns in fp32.
    """
    if isinstance(recipe.model, SorterConfig):
        precision = "fp32"
    changes = {}
    for name in ("train", "engine"):
        section = getattr(recipe, name)
        precision = precision if section.precision == "auto" else section.precision
        changes[name] = section.model_copy(update={"precision": precision})
    return recipe.model_copy(update=changes)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """A supervised recipe, once the number of its rows says how many steps its epochs are."""
    train = recipe.train.model_copy(update={"steps": steps})
    return recipe.model_copy(update={"train": train})


def read_recipe(name: str, folder: Path = RECIPES) -> dict[str, Any]:
    """The TOML table of a recipe or preset in the package, or of a file."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    try:
        return read_toml(path)
    except OSError:
        known, kind = list_recipes(folder), "preset" if folder is PRESETS else "recipe"
        raise ConfigError(
            f"there is no {kind} {name!r}{nearest(name, known)}; `burnish recipes` lists "
            f"{', '.join(known)}, and a path that ends in .toml is read as a file"
        ) from None


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def list_recipes(folder: Path = RECIPES) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def changed(overrides: Overrides) -> dict[str, Any]:
    """The settings that overrides change, by their whole names."""
    result: dict[str, Any] = {}
    for given in [overrides] if isinstance(overrides, str | Mapping) else overrides:
        result |= flat(parse_override(given) if isinstance(given, str) else given)
    return result


def parse_override(text: str) -> dict[str, Any]:
    """The setting of ``a.b=c``; its value is read as TOML, or else taken as a string."""
    key, separator, value = text.partition("=")
    if not separator or not all(key.strip().split(".")):
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        return {key.strip(): tomllib.loads(f"value = {value}")["value"]}
    except tomllib.TOMLDecodeError:
        return {key.strip(): value.strip()}


def flat(table: Table, prefix: str = "") -> dict[str, Any]:
    """The settings of nested tables by their whole names, "section.key".

    A path becomes its text, and a bare name that chooses a section becomes the section's name.
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = as_table(value) if path in (*CHOSEN, "runtime") else value
        result |= flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return result


def nested(settings: Table) -> dict[str, Any]:
    """The tables of settings with whole names; the inverse of ``flat``."""
    result: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")
        table = result
        for section in sections:
            if not isinstance(table.get(section), dict):
                table[section] = {}
            table = table[section]
        table[key] = value
    return result


def effective(recipe: Recipe) -> dict[str, Any]:
    """The tables of a recipe, without settings that have no effect."""
    settings = flat(recipe.model_dump())
    useless = _useless(settings, recipe)
    return nested({key: value for key, value in settings.items() if key not in useless})


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of scalars, lists of scalars and sub-tables as TOML; None is left out."""
    lines = [f"{k} = {_toml(v)}" for k, v in table.items() if not isinstance(v, dict | None)]
    for name, section in table.items():
        if isinstance(section, dict):
            path = f"{prefix}{name}"
            lines += ["", f"[{path}]", to_toml(section, f"{path}.").rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False, default=name_of)
    return text.replace("\x7f", "\\u007f")


def _without_replaced(given: Table, changes: Table) -> dict[str, Any]:
    """A recipe's settings, less those of each task, model or piece that the changes name anew."""
    kept = dict(given)
    for path in CHOSEN:
        if changes.get(f"{path}.name") not in (None, given.get(f"{path}.name")):
            kept = {key: kept[key] for key in kept if not key.startswith(f"{path}.")}
    return kept


def _useless(settings: Table, recipe: Recipe) -> dict[str, str]:
    """The settings that have no effect in the recipe, each with the setting that is the cause."""
    loss, train, chosen = recipe.objective.loss, recipe.train, recipe.selection
    advantage = recipe.objective.advantage
    is_separate = recipe.critic is not None and not recipe.critic.shared
    is_gae, is_taught = advantage.name == "gae", isinstance(advantage, Teacher)
    is_compared = loss.compares or recipe.objective.reads_proximal_first
    unread = [
        *["objective.ratio"] * ("ratio" not in loss.reads),
        *["objective.proximal"] * (not is_compared),
    ]
    on_mesh = recipe.runtime.name == "torchrun"
    written = [name for name in SAMPLED if name != "runtime" or not on_mesh]
    is_unscaled = not advantage.is_scaled and recipe.objective.kl.where != "reward"
    causes = {
        "train.schedule": ["train.decay_steps"] if train.schedule == "constant" else [],
        "train.log_kl": [] if train.log_kl else ["train.log_kl_responses"],
        "objective.advantage.values": ["critic"] * (is_gae and not advantage.reads_critic),
        "critic.shared": ["critic.coefficient"] if is_separate else [],
        "selection.dead_groups": [] if chosen.fills else FILLING,
        "selection.target": ["selection.floor"] if chosen.target is None else [],
        **dict.fromkeys(endless(recipe), HISTORY),
        "task.name": written if recipe.is_supervised else [],
        "engine.url" if recipe.engine.url else "engine.name": recipe.engine.useless,
        "runtime.name": {
            "local": [*APART, "mesh"],
            "ray": [],
            "torchrun": [name for name in APART if name not in TOGETHER],
        }[recipe.runtime.name],
        "model.name": LANGUAGE if isinstance(recipe.model, SorterConfig) else [],
        "objective.loss.name": unread,
        "objective.advantage.name": [
            *["task.scales"] * is_unscaled,
            *["teacher"] * (not is_taught),
            *["critic"] * (not is_gae),
        ],
    }
    return {
        key: cause
        for key in settings
        for cause, parts in causes.items()
        if any(key == part or key.startswith(f"{part}.") for part in parts)
    }


def _validate(settings: Table) -> Recipe:
    settings = dict(settings)
    for section, (name, setting, share) in SHARES.items():
        is_chosen = settings.get(f"{section}.name") == name
        if is_chosen and f"{section}.{setting}" not in settings:
            longest = "task.length" if settings.get("task.name") == "sort" else "rollout.max_tokens"
            tokens = settings.get(longest) or _default(longest)
            settings[f"{section}.{setting}"] = max(1, round(share * tokens))
    try:
        return Recipe.model_validate(nested(settings))
    except ValidationError as error:
        raise ConfigError(explain(error, list(_keys(Recipe)))) from None


def _default(key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(Recipe(), section), name)


def explain(error: ValidationError, keys: Sequence[str]) -> str:
    """A line for each problem that pydantic found; ``keys`` are all settings by whole names."""
    return "\n".join(_explain(problem, keys) for problem in error.errors())


def _explain(problem: Any, keys: Sequence[str]) -> str:
    where, chosen = _place(problem["loc"])
    kind, told = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        known = [name for name in problem["ctx"]["expected_tags"].split("'")[1::2] if name != OWN]
        name = problem["ctx"]["tag"]
        return f"{where}.name must be {' or '.join(known)}, got {name!r}{nearest(name, known)}"
    if kind == "missing":
        needs = chosen or where.rpartition(".")[0]
        return f"{where} is missing: {needs!r} needs it; set it, as --set {where}=VALUE does"
    if kind == "value_error":  # a check in this package, which says the value itself
        return f"{where} {told}".strip()
    if kind != "extra_forbidden":
        told = re.sub("(Input|String|List) should", "must", told)
        return f"{where} {told}, got {problem['input']!r}"
    if where in keys:
        section = where.rpartition(".")[0]
        return f"{where} has no effect with {section} = {chosen!r}; remove it"
    sections = ", ".join(key for key in keys if "." not in key)
    return f"unknown setting {where!r}{nearest(where, keys) or f'; there are {sections}'}"


def _place(loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """The setting that a problem is in, and the name of the section that was chosen there."""
    path, chosen, is_name = "", None, False
    for part in map(str, loc):
        if is_name:
            chosen, is_name = part, False
            continue
        path = f"{path}.{part}" if path else part
        is_name = path in CHOSEN or (path.startswith("task.tasks.") and path.count(".") == 2)
    return path, chosen


def _keys(annotation: Any, prefix: str = "") -> Iterator[str]:
    """The whole names of the settings of a section, or of the sections of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield prefix + name
            yield from _keys(field.annotation, f"{prefix}{name}.")
    else:
        for part in get_args(annotation):
            yield from _keys(part, prefix)
