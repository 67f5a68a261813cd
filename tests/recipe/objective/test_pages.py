"""The tables of docs/objectives.md show what each piece declares: formula, settings, paper."""

from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
from pydantic_core import PydanticUndefined

from burnish.recipe.base import OWN
from burnish.recipe.length import Penalty
from burnish.recipe.objective.advantages import AnyAdvantage
from burnish.recipe.objective.kl import KL, Importance
from burnish.recipe.objective.losses import AnyLoss, AnyReduction
from burnish.recipe.objective.objective import RATIO_PAPERS, RATIOS

PAGE = Path(__file__).parents[3] / "docs" / "objectives.md"
REQUIRED = {"k": 4, "length": 48, "buffer": 10, "tokens": 100, "parts": {"answer": 1.0}}
"""Values for settings without a default, as the page shows them."""


def members(union):
    """Return the classes of a union of pieces, without those for functions from a script."""
    if get_origin(union) is Annotated:
        union = get_args(union)[0]
    return [kind for kind in get_args(union) if kind.model_fields["name"].default != OWN]


def shown(name, formula, settings, paper):
    cells = [name, formula.replace(",  ", ", "), settings, paper]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings_of(piece):
    texts = []
    for name, field in type(piece).model_fields.items():
        if name != "name":
            is_required = field.default is PydanticUndefined or name == "parts"
            value = "none" if field.default is None else field.default
            value = str(value).lower() if isinstance(value, bool) else value
            texts.append(name if is_required else f"{name} = {value}")
    return ", ".join(texts)


def piece_rows():
    kinds = [k for union in (AnyAdvantage, AnyLoss, AnyReduction, Penalty) for k in members(union)]
    for kind in kinds:
        given = {k: v for k, v in REQUIRED.items() if k in kind.model_fields}
        piece = kind(**given)
        yield shown(piece.name, piece.formula(), settings_of(piece), piece.paper)
    for name in ("k1", "k2", "k3"):
        kl = KL(name=name, where="reward")
        yield shown(name, kl.formula(), settings_of(kl), kl.paper)
    for name, paper in Importance.papers.items():
        weight = Importance(name=name)
        yield shown(f"importance = {name}", weight.formula(), settings_of(weight), paper)
    for name, formula in RATIOS.items():
        yield shown(f"ratio = {name}", formula, "", RATIO_PAPERS[name])


@pytest.mark.parametrize("row", list(piece_rows()), ids=lambda row: row.split(" | ")[0].strip("| "))
def test_the_page_shows_the_piece(row):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(row) for line in lines), f"docs/objectives.md needs the row {row}"
