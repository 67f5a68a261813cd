"""Stops a run if sampler and learner assign too different probabilities to the same tokens."""

from __future__ import annotations

from torch import Tensor

from burnish.errors import MismatchError, Suspect
from burnish.learner.protocol import Metrics
from burnish.recipe.recipe import TrainConfig
from burnish.types import PackedBatch

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
SHOWN = 5
"""Number of tokens that the error shows."""
CONTEXT = 12
"""Number of preceding tokens that are shown with each of them."""


def check_mismatch(
    logprobs: Tensor, batch: PackedBatch, version: int, found: Metrics, train: TrainConfig
) -> None:
    """Raise a `MismatchError` if the metrics ``found``, the result of
    `burnish.learner.program.mismatch`, exceed ``train.mismatch_mean`` or ``train.mismatch_max``. A
    bound that is None is not checked.

    ``logprobs`` [N] are the learner's log-probabilities with the weights of ``version``. The error
    message compares them with the sampler's, on the tokens that the same version sampled.
    """
    bounds = {"mean": train.mismatch_mean, "max": train.mismatch_max}
    gaps = {name: found.get(f"mismatch/logprob_{name}", 0.0) for name in bounds}
    exceeded = [n for n, bound in bounds.items() if bound is not None and gaps[n] > bound]
    if not exceeded:
        return
    same = batch.is_action & (batch.versions == version)
    ours, theirs = logprobs[same].double(), batch.behavior_logprobs[same].double()
    rules = [
        f"mismatch/logprob_{n} = {gaps[n]:.3g} > train.mismatch_{n} = {bounds[n]:g}"
        for n in exceeded
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
    """Return the ids of up to `CONTEXT` tokens of the same sequence before a slot, in order."""
    found: list[int] = []
    while len(found) < CONTEXT and int(batch.predecessor[slot]) != slot:
        slot = int(batch.predecessor[slot])
        found.insert(0, int(batch.tokens[slot]))
    return found
