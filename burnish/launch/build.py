"""Builds the components of a run for its runtime: this process, Ray, or the ranks of torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.launch.resolve import Resolved

if TYPE_CHECKING:
    from burnish.loops.recorder import RunComponents


def build_run(resolved: Resolved) -> RunComponents:
    """Build the components of a run with the builder that ``runtime.name`` selects."""
    if resolved.recipe.runtime.name == "ray":
        from burnish.launch.ray import build_on_ray

        return build_on_ray(resolved)
    if resolved.recipe.runtime.name == "torchrun":
        from burnish.launch.torchrun import build_on_ranks

        return build_on_ranks(resolved)
    from burnish.launch.local import build_local

    return build_local(resolved)
