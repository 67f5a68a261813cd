"""Rubrics, and the sections of a judge and of criteria that it proposes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from burnish.sections import Section

Weight = Annotated[float, Field(allow_inf_nan=False)]


def _checked(rubric: list[tuple[str, float]]) -> list[tuple[str, float]]:
    if not any(weight > 0 for _, weight in rubric):
        weights = ", ".join(f"{weight:g}" for _, weight in rubric) or "no criteria"
        raise ValueError(f"needs a criterion with a positive weight, got {weights}; add one")
    for text, weight in rubric:
        if not text.strip() or not weight:
            raise ValueError(
                f"needs criteria with a text and a weight other than 0, got {[text, weight]}"
            )
    return rubric


Rubric = Annotated[list[tuple[str, Weight]], AfterValidator(_checked)]
"""Criteria, each a text with its weight; a negative weight makes a criterion a penalty."""


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible endpoint, such as that of `burnish serve`."""

    url: str = Field(pattern=r"^https?://[^/]", description="such as http://127.0.0.1:8421/v1")
    model: str = Field(description="the model's name at the endpoint")
    key: str | None = Field(None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """The environment variable that holds the endpoint's key; None if it needs none."""
    max_tokens: int = Field(256, ge=1, description="per answer of the judge")
    tries: int = Field(3, ge=1, description="requests per response at most")
    seconds: float = Field(60.0, gt=0, description="per response, all its tries together")
    parallel: int = Field(8, ge=1, description="requests at once")


class EvolveConfig(Section):
    """Criteria that the judge proposes during the run."""

    most: int = Field(4, ge=1, description="active at once")
    every: int = Field(1, ge=1, description="steps between two proposals")
    min_std: float = Field(0.1, ge=0, lt=0.5, description="over a group, or the criterion leaves")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="of each")
