"""Rubrics, and the sections of a judge and of the criteria that it proposes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from burnish.recipe.base import Section

Weight = Annotated[float, Field(allow_inf_nan=False)]


def _check_rubric(rubric: list[tuple[str, float]]) -> list[tuple[str, float]]:
    if not any(weight > 0 for _, weight in rubric):
        weights = ", ".join(f"{weight:g}" for _, weight in rubric) or "no criteria"
        raise ValueError(f"needs a criterion with a positive weight, got {weights}; add one")
    for text, weight in rubric:
        if not text.strip() or not weight:
            raise ValueError(
                f"needs criteria with a text and a weight other than 0, got {[text, weight]}"
            )
    return rubric


Rubric = Annotated[list[tuple[str, Weight]], AfterValidator(_check_rubric)]
"""Criteria, each a text with a weight. A negative weight makes the criterion a penalty."""


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible endpoint, for example `burnish serve`."""

    url: str = Field(
        pattern=r"^https?://[^/]", description="the endpoint, such as http://127.0.0.1:8421/v1"
    )
    model: str = Field(description="the model's name at the endpoint")
    key: str | None = Field(
        None,
        pattern=r"^[A-Z_][A-Z0-9_]*$",
        description="environment variable with the endpoint's API key; None if it needs no key",
    )
    max_tokens: int = Field(256, ge=1, description="limit for each of the judge's answers")
    think_tokens: int = Field(
        0, ge=0, description="further tokens per answer, for a judge that thinks in <think> tags"
    )
    temperature: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="0: the judge's most likely answer"
    )
    tries: int = Field(3, ge=1, description="maximum number of requests per response")
    seconds: float = Field(60.0, gt=0, description="timeout per response, over all tries")
    parallel: int = Field(8, ge=1, description="maximum number of concurrent requests")


class EvolveConfig(Section):
    """Criteria that the judge proposes during the run."""

    most: int = Field(4, ge=1, description="maximum number of active proposed criteria")
    every: int = Field(1, ge=1, description="steps between two proposals")
    min_std: float = Field(
        0.1, ge=0, lt=0.5, description="a criterion is removed if its std over groups is lower"
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="weight of each proposed criterion"
    )
