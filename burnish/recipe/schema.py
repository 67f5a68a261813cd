"""A JSON schema of recipe files, with which editors complete and check TOML.

The schema is draft 7, which editors for TOML support. It checks each section alone; the rules that
join sections are in ``burnish.recipe.rules``. Settings that only a script can pass are left out.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from burnish.recipe.base import OWN
from burnish.recipe.load import PRESETS, SHARES, list_recipes
from burnish.recipe.models import LanguageConfig, ScratchConfig, SorterConfig
from burnish.recipe.recipe import Recipe

REF = "#/definitions/"
LANGUAGE = REF + LanguageConfig.__name__
OTHER_MODELS = [kind.model_fields["name"].default for kind in (SorterConfig, ScratchConfig)]
"""Names of models that are not the names of language models."""
Schema = dict[str, Any]


class _Generator(GenerateJsonSchema):
    def field_is_present(self, field: Any) -> bool:
        """Leave out settings that only a script can pass."""
        return not field.get("serialization_exclude")


def recipe_schema() -> Schema:
    """Return the JSON schema of a recipe file."""
    made = Recipe.model_json_schema(schema_generator=_Generator, ref_template=f"{REF}{{model}}")
    definitions: dict[str, Schema] = made.pop("$defs")
    for name, key, _ in SHARES.values():  # a default that depends on other settings
        for table in definitions.values():
            if name in _names(table) and key in table.get("required", ()):
                table["required"].remove(key)
    made["properties"]["preset"] = {
        "enum": list_recipes(PRESETS),
        "description": "settings of a published algorithm, which replace those of the recipe",
    }
    found: Schema = _for_toml(made | {"definitions": definitions}, definitions)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found, "title": "Recipe"}


def _names(table: Schema) -> list[str]:
    """Return the names that select a kind of section; [] if its name may be any text."""
    name = table.get("properties", {}).get("name", {})
    return [name["const"]] if "const" in name else list(name.get("enum", ()))


def _for_toml(node: Any, definitions: dict[str, Schema]) -> Any:
    """Return a part of the schema in draft 7, without null, which TOML does not have, and with the
    short forms of sections."""
    if isinstance(node, list):
        return [_for_toml(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if "oneOf" in node:
        return _choice_of_kind(node, definitions)
    given = dict(node)
    if isinstance(given.get("title"), str):
        del given["title"]
    if isinstance(given.get("default", 0), dict | None):
        del given["default"]  # the sections in it have defaults of their own
    if "prefixItems" in given:
        given["items"] = given.pop("prefixItems")
    if isinstance(given.get("anyOf"), list):
        left = [one for one in given.pop("anyOf") if one != {"type": "null"}]
        given |= left[0] if len(left) == 1 else {"anyOf": left}
    return {key: _for_toml(value, definitions) for key, value in given.items()}


def _choice_of_kind(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section of which a recipe selects a kind by name.

    A table without a name has the default kind, and a bare name is the short form of a table. Some
    sections may also be a list of tables or bare names.
    """
    default = node.get("default")
    kinds: list[Schema] = []
    bare: list[str] = []
    members = [one for i, one in enumerate(node["oneOf"]) if one not in node["oneOf"][:i]]
    for one in members:
        if "$ref" not in one:
            names = _names(definitions[one["items"]["$ref"].removeprefix(REF)])
            one = _for_toml(one, definitions)
            kinds.append(one | {"items": {"anyOf": [{"enum": names}, one["items"]]}})
            continue
        table = definitions[one["$ref"].removeprefix(REF)]
        names = _names(table)
        is_default = default is not None and default["name"] in names
        rule: Schema = {} if is_default else {"required": ["name"]}
        if one["$ref"] == LANGUAGE:
            rule["properties"] = {"name": {"not": {"enum": OTHER_MODELS}}}
        kinds.append({"allOf": [one, rule]} if rule else one)
        if not {*table.get("required", ())} - {"name"} and OWN not in names:
            bare += names
    if default is not None:
        is_any = any(one.get("$ref") == LANGUAGE for one in members)
        kinds.insert(0, {"type": "string"} if is_any else {"enum": bare})
    return {"description": node.get("description", ""), "oneOf": kinds}
