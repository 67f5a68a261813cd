"""The alarm: a run stops if sampler and learner give the same tokens different probabilities."""

from __future__ import annotations

from torch import Tensor

from burnish.errors import MismatchError, Suspect
from burnish.learner.objective import Metrics
from burnish.schema.recipe import TrainConfig
from burnish.types import PackedBatch

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
SHOWN = 5
"""Tokens that the error shows."""
CONTEXT = 12
"""Tokens that are shown before each of them."""


def check(
    logprobs: Tensor, batch: PackedBatch, version: int, found: Metrics, train: TrainConfig
) -> None:
    """Raises if the gap that was ``found`` passes a bound of the recipe.

    ``logprobs`` [N] are the learner's, of this ``version``; they are compared on the tokens that
    the same version sampled.
    """
    bounds = {"mean": train.mismatch_mean, "max": train.mismatch_max}
    gaps = {name: found.get(f"mismatch/logprob_{name}", 0.0) for name in bounds}
    passed = [n for n, bound in bounds.items() if bound is not None and gaps[n] > bound]
    if not passed:
        return
    same = batch.is_action & (batch.versions == version)
    ours, theirs = logprobs[same].double(), batch.behavior_logprobs[same].double()
    rules = [
        f"mismatch/logprob_{n} = {gaps[n]:.3g} > train.mismatch_{n} = {bounds[n]:g}" for n in passed
    ]
    columns = {"gap": (ours - theirs).abs(), "sampler": theirs, "learner": ours}
    table = "\n".join(_row(name, values) for name, values in columns.items())
    heads = "".join(f"{f'{q:.0%}':>10}" for q in QUANTILES)
    worst = columns["gap"].topk(min(SHOWN, len(ours))).indices
    slots = same.nonzero().squeeze(1)[worst].tolist()
    raise MismatchError(
        f"sampler and learner disagree on the log-probabilities of {len(ours):,} tokens: "
        f"{' and '.join(rules)}. Nothing was learned from this rollout. Sample and learn in one "
        "precision (engine.precision, train.precision), set model.fp32_head = true, correct the "
        "gap by objective.importance, or raise the bound.\n"
        f"quantiles {heads}\n{table}",
        [
            Suspect(_before(batch, slot), int(batch.tokens[slot]), theirs[i].item(), ours[i].item())
            for slot, i in zip(slots, worst.tolist(), strict=True)
        ],
    )


def _row(name: str, values: Tensor) -> str:
    quantiles = values.quantile(values.new_tensor(QUANTILES))
    return f"{name:10}" + "".join(f"{value:10.4f}" for value in quantiles.tolist())


def _before(batch: PackedBatch, slot: int) -> list[int]:
    """The tokens before a slot, oldest first."""
    found: list[int] = []
    while len(found) < CONTEXT and int(batch.predecessor[slot]) != slot:
        slot = int(batch.predecessor[slot])
        found.insert(0, int(batch.tokens[slot]))
    return found
