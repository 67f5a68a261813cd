"""The section that selects the groups a step learns from and the prompts that are sampled again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.recipe.base import Section


class SelectionConfig(Section):
    """What happens to dead groups, and which prompts are sampled again.

    A group, the responses to one prompt, is dead if nothing can be learned from it. The solve rate
    of a prompt is the share of correct responses in its most recent group.
    """

    dead_groups: Literal["keep", "drop", "dynamic", "active"] = Field(
        "keep",
        description="treatment of dead groups; drop: the batch gets smaller; dynamic: further "
        "prompts are sampled in rounds until the batch is full (DAPO); active: each dead group is "
        "replaced immediately (OLMo 3), which is the same as dynamic with the free loop",
    )
    dead_by: Literal["advantage", "correct"] = Field(
        "advantage",
        description="advantage: a group is dead if every response has an advantage of 0; correct: "
        "if none or all of its responses are correct, before length penalties (DAPO)",
    )
    max_asked: int = Field(
        10, ge=2, description="maximum number of groups sampled for each group of a rollout"
    )
    on_bound: Literal["stop", "learn"] = Field(
        "stop", description="action if max_asked groups did not fill the batch"
    )

    leave_at: float | None = Field(
        None,
        gt=0,
        le=1,
        description="solve rate at which a prompt is retired for the rest of the run (ScaleRL); "
        "None: prompts are never retired",
    )
    target: float | None = Field(
        None,
        ge=0,
        le=1,
        description="preferred solve rate: the further a prompt's solve rate is from it, the less "
        "often the prompt is sampled; None: all prompts are sampled equally often",
    )
    floor: float = Field(
        0.1, gt=0, lt=1, description="smallest probability of sampling a prompt, with a target"
    )

    @property
    def remembers(self) -> bool:
        """Whether prompts are selected by their solve rates."""
        return self.leave_at is not None or self.target is not None

    @property
    def fills(self) -> bool:
        """Whether further prompts are sampled to replace dead groups."""
        return self.dead_groups in ("dynamic", "active")
