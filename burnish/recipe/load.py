"""Read, override, validate and write recipes.

``load_recipe`` turns a recipe's name, file or table into a validated ``Recipe``. All problems of a
recipe are reported in one ``ConfigError`` that states the rule, the value and the remedy. A recipe
file holds only the settings that differ from the defaults. Between the file and the model, a recipe
is a flat table of full setting names, such as "train.steps".
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from burnish.errors import ConfigError
from burnish.recipe.aliases import explain_algorithm, explain_alias
from burnish.recipe.base import LIST, OWN, as_table, nearest
from burnish.recipe.objective.objective import KINDS
from burnish.recipe.objective.piece import name_of
from burnish.recipe.recipe import Recipe
from burnish.recipe.rules import find_contradictions, unread_settings

RECIPES = Path(__file__).parent / "builtin"
PRESETS = Path(__file__).parent / "presets"
"""Directory of the presets: settings of published algorithms, which can be applied to any
recipe."""
CHOSEN = ("task", "model", "loop", "length", "train.learn", *(f"objective.{k}" for k in KINDS))
"""Sections of which a recipe selects one of several kinds by name. If a preset or an override
selects another name, all other settings of the section are dropped."""
SWITCHED = ("engine", "runtime")
"""Further sections of which a recipe selects a kind by name. If a preset or an override selects
another name, only the settings that the new kind does not have are dropped."""
SHARES = {
    "objective.reduction": ("constant", "length", 1.0),
    "length": ("overlong", "buffer", 0.2),
}
"""Settings whose default is a share of the maximum response length, by section: the name of the
kind that has the setting, the setting, and the share."""
REMEDIES = {
    "rollout.temperature": (
        "; sampling for training needs randomness: 1 samples from the policy itself, and "
        "validation.temperature = 0 is greedy evaluation"
    ),
    "validation.every": "; task.validation_rows = 0 trains on rows of data without validation",
}
"""Ends of the messages about values outside a setting's bounds, by the setting."""
PARSED = {
    "float_parsing": "a number, such as 0.5 or 1e-5",
    "int_parsing": "a whole number, such as 8",
    "int_from_float": "a whole number, such as 8",
    "bool_parsing": "true or false",
}
"""Descriptions of the values of a setting, by the kind of the error that another value causes."""
Table = Mapping[str, Any]
"""Settings as nested dictionaries."""
Overrides = str | Table | Sequence[str | Table]
"""Changes to a recipe: one or several "section.key=value" strings and tables."""


def load_recipe(
    source: str | os.PathLike[str] | Table | Recipe, overrides: Overrides = ()
) -> Recipe:
    """Load a recipe from its name, a TOML file, a table or another recipe, apply overrides, and
    validate it.

    The setting ``preset`` names a published algorithm, whose settings override those of the recipe;
    ``overrides`` override both. Raise a ConfigError for an invalid recipe, and for a setting that
    has no effect. Settings of a preset without effect are dropped instead, and so are settings of
    the recipe that lose their effect by the preset or an override.
    """
    if isinstance(source, Recipe):
        objects = {key: getattr(source.task, key, None) for key in ("rows", "function", "rewards")}
        given = flatten(effective_settings(source)) | {
            f"task.{key}": value for key, value in objects.items() if value is not None
        }
        if not source.train.has_own_rate:  # a default stays a default, which some models refuse
            given.pop("train.learning_rate", None)
    elif isinstance(source, Mapping):
        given = flatten(source)
    else:
        name = os.fspath(source)
        given = {"name": Path(name).stem} | flatten(read_recipe_table(name))
    changes = parse_overrides(overrides)
    preset = changes.pop("preset", given.pop("preset", None))
    chosen = {} if preset is None else flatten(read_recipe_table(str(preset), PRESETS))
    is_sorter = given.get("task.name", "sort") == "sort"
    left_out = ("description", "model.fp32_head") if is_sorter else ("description",)
    chosen = {key: value for key, value in chosen.items() if key not in left_out}
    merged = given
    for over in (chosen, changes):
        merged = _without_replaced(merged, over) | over
    _check_lists(merged)
    recipe = _parse(merged)
    useless = _without_effect(merged, unread_settings(recipe))
    problems = []
    for key, cause in useless.items():
        # A setting of the recipe that has no effect because of an override or a preset is dropped,
        # and so is a preset's setting without effect. Other settings without effect are errors.
        is_explicit = key in changes or (key in given and cause not in chosen | changes)
        if is_explicit and key not in chosen.keys() - changes.keys():
            value = format_value(flatten(recipe.model_dump())[cause])
            problems.append(f"{key} has no effect with {cause} = {value}; remove it")
    recipe = _parse({key: merged[key] for key in merged if key not in useless})
    if problems := [*find_contradictions(recipe), *problems]:
        raise ConfigError("\n".join(problems))
    return recipe


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """Return the recipe with ``precision`` in place of "auto", for the learner and the engine.

    An engine with precision "auto" uses the learner's precision, because a policy that samples in
    another precision learns less. If the model has a fixed precision, that is used instead of
    ``precision``.
    """
    precision = recipe.model.fixed_precision or precision
    changes = {}
    for name in ("train", "engine"):
        section = getattr(recipe, name)
        precision = precision if section.precision == "auto" else section.precision
        changes[name] = section.model_copy(update={"precision": precision})
    return recipe.model_copy(update=changes)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return a copy of a supervised recipe whose number of steps, which results from its rows and
    epochs, is ``steps``."""
    train = recipe.train.model_copy(update={"steps": steps})
    return recipe.model_copy(update={"train": train})


def read_recipe_table(name: str, folder: Path = RECIPES) -> dict[str, Any]:
    """Return the TOML table of a recipe.

    ``name`` is the path of a file if it ends in .toml, otherwise the name of a recipe in
    ``folder``. Raise a ConfigError if there is no such recipe or it is not valid TOML.
    """
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
    """Return the table in a TOML file. Raise a ConfigError if it is not valid TOML, or an OSError
    if it can't be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def list_recipes(folder: Path = RECIPES) -> list[str]:
    """Return the names of the recipes in a directory, in alphabetical order."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def parse_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return all settings that the overrides change, by full name; later overrides win.

    Raise a ConfigError for a text that is not of the form section.key=value.
    """
    result: dict[str, Any] = {}
    for given in [overrides] if isinstance(overrides, str | Mapping) else overrides:
        found = flatten(parse_override(given) if isinstance(given, str) else given)
        for path in CHOSEN:  # a list of sections and a single section replace each other
            kinds = [_chosen_kind(settings, path) for settings in (result, found)]
            if LIST in kinds and None not in kinds:
                result = _without_section(result, path)
        result |= found
    return result


def parse_override(text: str) -> dict[str, Any]:
    """Return the setting of ``a.b=c`` as {"a.b": c}. The value is TOML or, if it is not valid TOML,
    a plain string. Raise a ConfigError if the text has another form."""
    key, separator, value = text.partition("=")
    if not separator or not all(key.strip().split(".")):
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        return {key.strip(): tomllib.loads(f"value = {value}")["value"]}
    except tomllib.TOMLDecodeError:
        return {key.strip(): value.strip()}


def flatten(table: Table, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into one table whose keys are full setting names, such as
    "train.steps".

    ``prefix`` is put before each key as it is, so it ends with a dot. Paths become strings. A
    section in ``CHOSEN`` or ``SWITCHED`` may be given as just a name or a function; it is expanded
    to a table.
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = as_table(value) if path in (*CHOSEN, *SWITCHED) else value
        result |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return result


def nest(settings: Table) -> dict[str, Any]:
    """Return settings with full names as nested tables; the inverse of ``flatten``."""
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


def effective_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe as nested tables, without settings that have no effect."""
    settings = flatten(recipe.model_dump())
    useless = _without_effect(settings, unread_settings(recipe))
    return nest({key: value for key, value in settings.items() if key not in useless})


def recipe_to_toml(recipe: Recipe) -> str:
    """Return the text of a run's recipe.toml: every setting that has an effect."""
    return format_toml(effective_settings(recipe))


def format_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Format a table of scalars, lists and sub-tables as TOML. Keys whose value is None are left
    out.

    ``prefix`` is put before the names of sub-tables as it is, so it ends with a dot.
    """
    lines = [f"{k} = {format_value(v)}" for k, v in table.items() if not isinstance(v, dict | None)]
    for name, section in table.items():
        if isinstance(section, dict):
            path = f"{prefix}{name}"
            lines += ["", f"[{path}]", format_toml(section, f"{path}.").rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def format_value(value: Any) -> str:
    """Format a scalar or a list as TOML; a function is its name."""
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        inner = (f"{key} = {format_value(own)}" for key, own in value.items() if own is not None)
        return f"{{ {', '.join(inner)} }}"
    text = json.dumps(value, ensure_ascii=False, default=name_of)
    return text.replace("\x7f", "\\u007f")


def _without_replaced(given: Table, changes: Table) -> dict[str, Any]:
    """Return a recipe's settings without those that are dropped because the changes select another
    kind of section by name (see ``CHOSEN`` and ``SWITCHED``)."""
    kept = dict(given)
    for path in CHOSEN:
        before, after = (_chosen_kind(settings, path) for settings in (given, changes))
        if after not in (None, before):
            kept = _without_section(kept, path)
    for path in SWITCHED:
        if (name := changes.get(f"{path}.name")) is not None:
            kept = {key: kept[key] for key in kept if not _is_lost(key, path, name)}
    if "task.judge.url" in changes and "task.reward" not in changes:
        kept.pop("task.reward", None)  # the judge takes the place of an environment's reward
    return kept


def _without_section(settings: Table, path: str) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != path and not k.startswith(f"{path}.")}


def _chosen_kind(settings: Table, path: str) -> str | None:
    """Return the kind of the section ``path`` that settings select: its name, "list" if they give a
    list of sections, or None if they select none."""
    is_list = isinstance(settings.get(path), list | tuple)
    return LIST if is_list else settings.get(f"{path}.name")


def _check_lists(settings: Table) -> None:
    """Raise a ConfigError for a setting of a section that is given as a list of sections."""
    for path in CHOSEN:
        own = next((key for key in settings if key.startswith(f"{path}.")), None)
        if own is not None and isinstance(settings.get(path), list | tuple):
            raise ConfigError(
                f"{own} has no effect, because {path} is a list; change the list itself, with "
                f"--set '{path}=[...]'"
            )


def _is_lost(key: str, path: str, name: str) -> bool:
    """Return whether the setting ``key`` belongs to the section ``path``, but the kind ``name`` of
    this section does not have it."""
    section, _, setting = key.partition(".")
    names = _names_with(path, setting.partition(".")[0]) if section == path else []
    return bool(names) and name not in names


def _names_with(path: str, setting: str) -> list[str]:
    """Return the names of the kinds of the section ``path`` that have the setting."""
    members: tuple[type[BaseModel], ...] = get_args(Recipe.model_fields[path].annotation)
    found = [member for member in members if setting in member.model_fields]
    return [member.model_fields["name"].default for member in found]


def _without_effect(settings: Table, unread: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the names of the settings that are not read, each with the name of the setting that
    causes this.

    ``unread`` is the result of ``unread_settings``: settings and whole sections, by their cause.
    """
    return {
        key: cause
        for key in settings
        for cause, parts in unread.items()
        if any(key == part or key.startswith(f"{part}.") for part in parts)
    }


def _parse(settings: Table) -> Recipe:
    settings = dict(settings)
    for section, (name, setting, share) in SHARES.items():
        is_chosen = settings.get(f"{section}.name") == name
        if is_chosen and f"{section}.{setting}" not in settings:
            longest = "task.length" if settings.get("task.name") == "sort" else "rollout.max_tokens"
            tokens = settings.get(longest) or _default(longest)
            settings[f"{section}.{setting}"] = max(1, round(share * tokens))
    try:
        return Recipe.model_validate(nest(settings))
    except ValidationError as error:
        raise ConfigError(explain_errors(error, list(setting_names(Recipe)), settings)) from None


def _default(key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(Recipe(), section), name)


def explain_errors(error: ValidationError, keys: Sequence[str], given: Iterable[str] = ()) -> str:
    """Return the text of an error for users: one line per different problem.

    ``keys`` are the full names of all settings, from which the text suggests a spelling; ``given``
    are the names of the settings that the recipe has.
    """
    lines = (_explain(problem, keys, given) for problem in error.errors())
    return "\n".join(dict.fromkeys(lines))


def _explain(problem: Any, keys: Sequence[str], given: Iterable[str]) -> str:
    where, chosen = _place(problem["loc"])
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        tags = problem["ctx"]["expected_tags"].split("'")[1::2]
        known = [name for name in tags if name not in (OWN, LIST)]
        name = problem["ctx"]["tag"]
        remedy = nearest(name, known)
        if where in ("objective.loss", "objective.advantage") and (said := explain_algorithm(name)):
            remedy = f"; {said}"
        return f"{where}.name must be {' or '.join(known)}, got {name!r}{remedy}"
    if kind == "missing" and chosen == LIST:
        return f"{where} is missing; add it to the list"
    if kind == "missing":
        needs = chosen or where.rpartition(".")[0]
        return f"{where} is missing: {needs!r} needs it; set it, as --set {where}=VALUE does"
    if kind == "value_error":  # a validator of this package, whose message states the value
        return f"{where} {message}".strip()
    if kind == "extra_forbidden" and chosen == LIST:
        section, _, setting = where.rpartition(".")
        whole = section.partition("[")[0]
        known = [key.removeprefix(f"{whole}.") for key in keys if key.startswith(f"{whole}.")]
        return f"unknown setting {where!r}{nearest(setting, known)}"
    if kind in ("model_type", "model_attributes_type"):
        first = next((key for key in keys if key.startswith(f"{where}.")), where)
        return f"{where} is a section, got {problem['input']!r}; set its settings, such as {first}"
    if kind != "extra_forbidden":
        message = re.sub("(Input|String|List) should", "must", message)
        if kind in PARSED:
            message = f"must be {PARSED[kind]}"
        return f"{where} {message}, got {problem['input']!r}{REMEDIES.get(where, '')}"
    if where in keys:
        section, _, setting = where.rpartition(".")
        remedy = "remove it"
        if section in SWITCHED:
            others = _names_with(section, setting)
            remedy = f"remove it, or use {section}.name = {' or '.join(map(repr, others))}"
            if others == ["sglang"]:
                remedy = f"{remedy} with engine.url"
        return f"{where} has no effect with {section} = {chosen!r}; {remedy}"
    # A name of another system has sections of its own, so the error's place is only its beginning.
    unknown = [key for key in given if key == where or key.startswith(f"{where}.")] or [where]
    return "\n".join(_explain_unknown(key, keys) for key in unknown)


def _explain_unknown(name: str, keys: Sequence[str]) -> str:
    """Return the error for an unknown setting: the name of this package for the same thing."""
    if said := explain_alias(name):
        return f"unknown setting {name!r}: {said}"
    parts = name.split(".")
    ends = [".".join(parts[cut:]) for cut in range(1, len(parts))]
    same = [end for end in ends if end in keys][:1]
    same = same or sorted({key for key in keys if key.rpartition(".")[2] == name})
    # A setting of a piece is rejected unless the piece is selected, so plain sections come first.
    pieces = (*CHOSEN, *SWITCHED)
    same = [key for key in same if key.rpartition(".")[0] not in pieces] or same
    if same:
        return f"unknown setting {name!r}; did you mean {' or '.join(map(repr, same))}?"
    sections = ", ".join(key for key in keys if "." not in key)
    return f"unknown setting {name!r}{nearest(name, keys) or f'; there are {sections}'}"


def _place(loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """Return the full name of the setting at a validation error's location ``loc``, and the name of
    the kind of section selected on the way (None if no section on the way has kinds)."""
    path, chosen, is_name = "", None, False
    for part in map(str, loc):
        if is_name:
            chosen, is_name = part, False
            continue
        if chosen == LIST and part.isdigit():
            path = f"{path}[{part}]"
            continue
        path = f"{path}.{part}" if path else part
        is_name = path in (*CHOSEN, *SWITCHED) or (
            path.startswith("task.tasks.") and path.count(".") == 2
        )
    return path, chosen


def setting_names(annotation: Any, prefix: str = "") -> Iterator[str]:
    """Yield the full names of the sections and settings in a section class, or in all classes of a
    union, recursively."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield prefix + name
            yield from setting_names(field.annotation, f"{prefix}{name}.")
    else:
        for part in get_args(annotation):
            yield from setting_names(part, prefix)
