"""The reference of all settings, for `burnish settings` and docs/settings.md.

Everything is read from the fields of the sections and from the TOML files of the built-in recipes
and presets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from burnish.errors import ConfigError
from burnish.recipe.aliases import explain_alias, find_alias
from burnish.recipe.base import OWN, nearest
from burnish.recipe.load import (
    PRESETS,
    SHARES,
    Table,
    flatten,
    format_value,
    list_recipes,
    nest,
    read_recipe_table,
)
from burnish.recipe.models import LanguageConfig
from burnish.recipe.recipe import Recipe

TYPES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "a name from the run's script",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
HEADER = """# Settings

This page is generated. `burnish settings` prints the same in a terminal; with a name, such as
`burnish settings rollout`, it prints only the settings whose names begin with it, and it answers
names from TRL and verl, such as `burnish settings num_generations`. The option
`--set rollout.batch=64` changes a setting; [recipes.md](recipes.md) explains recipes and presets,
and [objectives.md](objectives.md) has the formulas.

A section that has several kinds selects one by its `name`; a bare name is the short form, as in
`advantage = "raw"` under `[objective]`. A setting of another kind is an error, and so is any
setting that has no effect. "None" in the column of defaults means that the setting is absent.

A JSON schema lets editors complete and check recipe files. Editors that use taplo, such as VS Code
with Even Better TOML, read it if the first line of a recipe is `#:schema ./burnish.schema.json`:

```sh
burnish settings --schema > burnish.schema.json
```
"""
"""The beginning of docs/settings.md."""


class Setting(NamedTuple):
    """A setting of a section."""

    name: str
    """Full name, such as "train.steps"."""
    type: str
    default: str
    about: str
    set_by: dict[str, Any]
    """The values that built-in recipes and presets give it, by their names."""


class SectionEntry(NamedTuple):
    """A section, or one kind of a section of which a recipe selects a kind by name."""

    path: str
    kind: str
    """Name of the kind; "" if the section has only one kind."""
    about: str
    settings: list[Setting]

    @property
    def title(self) -> str:
        path = f"[{self.path}]" if self.path else "the beginning of the file"
        return f"{path} name = {self.kind}" if self.kind else path


def describe_sections() -> list[SectionEntry]:
    """Return all sections in the order of the recipe's fields, each kind as its own entry."""
    return list(_sections(Recipe, "", ""))


def find_settings(prefix: str) -> list[SectionEntry]:
    """Return the settings with the name ``prefix`` or in the section ``prefix``, by section. If
    there are none, return the settings whose last part is ``prefix``.

    Raise a ConfigError if there are none of these either.
    """
    entries = describe_sections()
    names = [one.name for entry in entries for one in entry.settings]
    matches = {name for name in names if f"{name}.".startswith(f"{prefix}.")}
    matches = matches or {name for name in names if name.rpartition(".")[2] == prefix}
    if matches:
        found = (
            entry._replace(settings=[one for one in entry.settings if one.name in matches])
            for entry in entries
        )
        return [entry for entry in found if entry.settings]
    remedy = nearest(prefix, names) or "; `burnish settings` lists all settings"
    raise ConfigError(f"there is no setting {prefix!r}{remedy}")


def answer_settings(prefix: str) -> str:
    """Return the text that `burnish settings` prints for a section, a setting or a name of another
    system; with "", all settings."""
    if not prefix:
        return format_settings(describe_sections())
    try:
        return format_settings(find_settings(prefix))
    except ConfigError:
        if (alias := find_alias(prefix)) is None:
            raise
        return f"{explain_alias(prefix)}\n\n{format_settings(find_settings(alias.setting))}"


def format_settings(entries: Sequence[SectionEntry]) -> str:
    """Return sections as a text for the terminal."""
    lines: list[str] = []
    for entry in entries:
        about = re.sub(r"\[([^\]]*)\]\(\S*\)", r"\1", entry.about)
        lines += [f"{entry.title}: {about}" if about else entry.title]
        for one in entry.settings:
            lines += [f"  {one.name} = {one.default}   ({one.type})", f"      {one.about}"]
            if one.set_by:
                values = (f"{name} = {format_value(value)}" for name, value in one.set_by.items())
                lines.append(f"      set by {', '.join(values)}")
        lines.append("")
    return "\n".join(lines).rstrip()


def settings_page() -> str:
    """Return the text of docs/settings.md; no file is written."""
    lines = [HEADER]
    level = None
    for entry in describe_sections():
        top = entry.path.partition(".")[0]
        if top != level:
            lines += [f"## {f'[{top}]' if top else 'The beginning of the file'}", ""]
            level = top
        if entry.kind or entry.path != top:
            lines += [f"### {entry.title}", ""]
        if entry.about:
            lines += [_wrap(entry.about), ""]
        if entry.settings:
            lines += ["| setting | type | default | meaning | set by |", "| " + "--- | " * 5]
        for one in entry.settings:
            by = ", ".join(one.set_by)
            cells = (f"`{one.name}`", one.type, one.default, one.about, by)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if entry.settings:
            lines.append("")
    return "\n".join(line.rstrip(" ") for line in lines).rstrip() + "\n"


def _wrap(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > 99:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _sections(section: type[BaseModel], path: str, kind: str) -> Iterator[SectionEntry]:
    """Yield an entry for a section, and entries for the sections in it."""
    own, inner = [], []
    for key, field in section.model_fields.items():
        name = f"{path}.{key}" if path else key
        is_tag = bool(kind) and key == "name" and section is not LanguageConfig
        if field.exclude or is_tag:
            continue
        members = section_classes(field.annotation)
        is_union = len(members) > 1 or any(_tags(member) for member in members)
        kind_of_container = _container(field.annotation)
        table = f"{name}.NAME" if kind_of_container is dict else name
        for member in members:
            names = " or ".join(map(_quote, _tags(member))) if is_union else ""
            if member is LanguageConfig:
                names = "any other name"
            inner += [(member, table, names)]
        if not members or kind_of_container is not None:
            own.append(_setting(name, field, _users(name, section, kind)))
        elif is_union:
            own.append(_choice(name, field, members))
    yield SectionEntry(path, kind, _about(section), own)
    done = set[tuple[type[BaseModel], str]]()
    for member, table, names in inner:
        if table == "task.tasks.NAME":  # the sections of the parts of a mixture are the tasks'
            continue
        if (member, table) not in done:
            done.add((member, table))
            yield from _sections(member, table, names)


def section_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in an annotation: one, all members of a union, or none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in section_classes(part)]


def _container(annotation: Any) -> type | None:
    """Return dict or list if the annotation is a table or a list, possibly absent; else None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _container(arguments[0])
    left = [part for part in arguments if part is not NoneType]
    if origin in (Union, UnionType) and len(left) == 1:
        return _container(left[0])
    return origin if origin in (dict, list) else None


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    """Return the names that select a kind of section; () if it has no name, or any name."""
    field = section.model_fields.get("name")
    is_literal = field is not None and get_origin(field.annotation) is Literal
    return get_args(field.annotation) if field is not None and is_literal else ()


def _about(section: type[BaseModel]) -> str:
    """Return the first paragraph of a section's own docstring, or the source of a piece."""
    text = section.__dict__.get("__doc__") or getattr(section, "paper", "") or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def _setting(name: str, field: FieldInfo, set_by: dict[str, Any]) -> Setting:
    about = field.description or ""
    default = _show_default(field)
    section, _, key = name.rpartition(".")
    if key == SHARES.get(section, ("", "", 0))[1]:
        default = f"{SHARES[section][2]:.0%} of the maximum length"
    bounds = ", ".join(
        f"{sign} {getattr(rule, bound):.9g}"
        for rule in field.metadata
        for bound, sign in BOUNDS.items()
        if isinstance(getattr(rule, bound, None), int | float)
    )
    return Setting(
        name, " ".join(filter(None, [_type(field.annotation), bounds])), default, about, set_by
    )


def _choice(name: str, field: FieldInfo, members: Sequence[type[BaseModel]]) -> Setting:
    """Return the setting that selects the kind of a section."""
    # A setting that is one piece or a list of pieces has the same member several times.
    tags = dict.fromkeys(tag for member in members for tag in _tags(member) if tag != OWN)
    kinds = ", ".join(map(_quote, tags))
    if LanguageConfig in members:
        kinds += ", or a language model's name"
    default = getattr(field.default, "name", None)
    set_by = _users(f"{name}.name", None, "")
    return Setting(
        f"{name}.name",
        kinds,
        "None" if default is None else _quote(default),
        field.description or "",
        set_by,
    )


def _show_default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.is_required() else "…"
    return "None" if field.default is None else format_value(field.default)


def _quote(text: Any) -> str:
    return f'"{text}"' if isinstance(text, str) else str(text)


def _type(annotation: Any) -> str:
    """Return the type of a setting in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(map(_quote, arguments))
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not NoneType)
    if origin is list:
        is_section = bool(section_classes(arguments[0]))
        return "list of sections" if is_section else f"list of: {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if origin is dict:
        is_section = bool(section_classes(arguments[1]))
        return "table of sections" if is_section else f"table of: {_type(arguments[1])}"
    return TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))


@cache
def _builtin_settings() -> dict[str, dict[str, Any]]:
    """Return the settings of all built-in recipes and presets by full name."""
    tables = {name: read_recipe_table(name) for name in list_recipes()}
    tables |= {f"preset {name}": read_recipe_table(name, PRESETS) for name in list_recipes(PRESETS)}
    return {name: flatten(table) for name, table in tables.items()}


def _users(name: str, section: type[BaseModel] | None, kind: str) -> dict[str, Any]:
    """Return the values of a setting in built-in recipes and presets.

    If the setting belongs to a kind of section, only tables that select this kind count.
    """
    path = name.rpartition(".")[0]
    found = {}
    for user, table in _builtin_settings().items():
        mine = {key: table[key] for key in table if key == name or key.startswith(f"{name}.")}
        is_mine = section is None or not kind or _is_kind(section, table, path)
        if mine and is_mine and name not in ("name", "description"):
            found[user] = mine.get(name, nest({key[len(name) + 1 :]: mine[key] for key in mine}))
    return found


def _is_kind(section: type[BaseModel], table: Table, path: str) -> bool:
    """Return whether a table selects this kind of the section ``path``."""
    default: Any = Recipe()
    for key in f"{path}.name".split("."):
        default = getattr(default, key, None)
    name = table.get(f"{path}.name", default)
    if section is LanguageConfig:
        return name not in ("sorter", "scratch")
    return name in _tags(section)
