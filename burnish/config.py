"""Recipes: pydantic models, TOML files that hold only settings that differ from the defaults, and
overrides.

``load`` is the one way from a recipe's name or file to a checked ``Recipe``. All problems of a
recipe are one ``ConfigError`` that says the rule, the value and the remedy. Between its file and
its model a recipe is a flat table of whole names, such as "train.steps".
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from burnish import pieces
from burnish.errors import ConfigError
from burnish.schema import Recipe, SorterConfig
from burnish.sections import OWN, as_table, nearest

RECIPES = Path(__file__).parent / "recipes"
CHOSEN = ("task", "model", *(f"objective.{kind}" for kind in pieces.KINDS))
"""Sections that a recipe chooses by name, out of several."""
LANGUAGE = [
    *("device", "engine", "train.recompute", "train.layers", "validation.max_tokens"),
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop"),
]
"""Settings that only a language model reads."""
SAMPLED = [
    *("rollout", "engine", "objective", "log.rollouts"),
    *("train.steps", "train.epochs", "train.log_kl"),
    *("validation.samples", "validation.temperature", "validation.max_tokens"),
]
"""Settings that a supervised run does not read, since it samples nothing."""
Table = Mapping[str, Any]
"""Settings as nested dicts."""
Overrides = Sequence[str | Table] | Table
"""Changes to a recipe: "section.key=value" texts and tables, or one table."""


def load(
    source: str | os.PathLike[str] | Table | Recipe,
    overrides: Overrides = (),
    *,
    seed: int | None = None,
) -> Recipe:
    """The recipe of a name, of a TOML file, of a table or as it is, with the overrides applied."""
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
    merged = _without_replaced(given, changes) | changes
    if seed is not None:
        merged["seed"] = seed
    before = _useless_alone(given)
    for key, reason in _useless(merged, _validate(merged)).items():
        if key in changes or key in before:
            raise ConfigError(f"{key} has no effect with {reason}; remove it")
        del merged[key]  # a setting of the recipe that an override deprived of its effect
    return _validate(merged)


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with ``precision`` in the place of 'auto', as it is run and recorded.

    A sampler whose precision is open takes the learner's: a policy that samples in another one
    learns less. The sorting model has a few hundred weights and always learns in fp32.
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


def read_recipe(name: str) -> dict[str, Any]:
    """The TOML table of a recipe in the package, or of a file."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = list_recipes()
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, known)}; `burnish recipes` lists "
            f"{', '.join(known)}, and a path that ends in .toml is read as a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def list_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def changed(overrides: Overrides) -> dict[str, Any]:
    """The settings that overrides change, by their whole names."""
    if isinstance(overrides, str):
        raise ConfigError(
            "overrides must be a list of 'section.key=value' or a dict of settings, got the text "
            f"{overrides!r}; write overrides=[{overrides!r}]"
        )
    result: dict[str, Any] = {}
    for given in [overrides] if isinstance(overrides, Mapping) else overrides:
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
        value = as_table(value) if path in CHOSEN else value
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


def unused(recipe: Recipe) -> dict[str, str]:
    """Settings and sections that have no effect in this recipe, each with the reason."""
    train, objective = recipe.train, recipe.objective
    no_ratio = "ratio" not in objective.loss.reads
    loss = f"objective.loss = '{objective.loss.name}'"
    rules = [
        (train.schedule == "constant", "train.schedule = 'constant'", ["train.decay_steps"]),
        (not train.log_kl, "train.log_kl = false", ["train.log_kl_responses"]),
        (recipe.is_supervised, "task.name = 'pairs'", SAMPLED),
        (isinstance(recipe.model, SorterConfig), "model.name = 'sorter'", LANGUAGE),
        (no_ratio, loss, ["objective.ratio"]),
        (no_ratio and not objective.reads_proximal_first, loss, ["objective.proximal"]),
    ]
    return {key: reason for holds, reason, keys in rules if holds for key in keys}


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
    text = json.dumps(value, ensure_ascii=False, default=pieces.name_of)
    return text.replace("\x7f", "\\u007f")


def _validate(settings: Table) -> Recipe:
    try:
        return Recipe.model_validate(nested(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(map(_explain, error.errors()))) from None


def _explain(problem: Any) -> str:
    """A problem that pydantic found, with the setting's whole name."""
    where, chosen = _place(problem["loc"])
    kind, told = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        known = [name for name in problem["ctx"]["expected_tags"].split("'")[1::2] if name != OWN]
        name = problem["ctx"]["tag"]
        return f"{where}.name must be {' or '.join(known)}, got {name!r}{nearest(name, known)}"
    if kind == "missing":
        return f"{where} is missing: {chosen!r} needs it; set it, as --set {where}=VALUE does"
    if kind == "value_error":  # a check in this package, which says the value itself
        return f"{where} {told}".strip()
    if kind != "extra_forbidden":
        return f"{where} {told.replace('Input should be', 'must be')}, got {problem['input']!r}"
    keys = list(_keys(Recipe))
    if where in keys:
        section = where.rpartition(".")[0]
        return f"{where} has no effect with {section} = {chosen!r}; remove it"
    sections = ", ".join(key for key in keys if "." not in key)
    return f"unknown setting {where!r}{nearest(where, keys) or f'; a recipe has {sections}'}"


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


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in _sections(field.annotation):
            yield from _keys(kind, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, one or those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _sections(part)


def _without_replaced(given: Table, changes: Table) -> dict[str, Any]:
    """A recipe's settings without those of each task, model or piece that changes replace."""
    kept = dict(given)
    for path in CHOSEN:
        before, now = given.get(f"{path}.name"), changes.get(f"{path}.name")
        is_language = path == "model" and not {before, now} & {None, "sorter", "scratch"}
        if now not in (None, before) and not is_language:
            kept = {key: kept[key] for key in kept if not key.startswith(f"{path}.")}
    return kept


def _useless(settings: Table, recipe: Recipe) -> dict[str, str]:
    """Those of the settings that have no effect in the recipe, and the reason."""
    return {
        key: reason
        for key in settings
        for part, reason in unused(recipe).items()
        if key == part or key.startswith(f"{part}.")
    }


def _useless_alone(given: Table) -> dict[str, str]:
    """The useless settings of a recipe before any change; none if it needs changes to be valid."""
    try:
        return _useless(given, _validate(given))
    except ConfigError:
        return {}
