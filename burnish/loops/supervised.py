"""Supervised learning with the same learner: cross-entropy of written answers.

    for step = 1 … steps:  π ← step on  −Σ log π(answer token) / number of answer tokens

That is REINFORCE with an advantage of 1 on answers that someone else wrote, reduced by the token
mean, so packing, precision, schedule and checkpoints are the same as in training. The prompt is
context. The answer is learned, with its end token: ``Completion.sampled`` marks its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from burnish.learner.learner import Learner
from burnish.learner.objective import compile
from burnish.learner.preferences import describe, rewards
from burnish.loops.sync import Step, count_tokens
from burnish.pieces.advantages import Raw
from burnish.pieces.losses import Reinforce, TokenMean
from burnish.pieces.objective import ObjectiveConfig
from burnish.progress import begin
from burnish.rl.preferences import bradley_terry
from burnish.rollout.packing import Pack, pack
from burnish.runs.metrics import Metrics, Timers
from burnish.schema.recipe import Recipe
from burnish.tasks.pairs import Pairs
from burnish.types import Group, LearnBatch, PackedBatch, Scores

PROGRAM = compile(ObjectiveConfig(advantage=Raw(), loss=Reinforce(), reduction=TokenMean()))
CONSTANT = ("train/ratio_min", "train/ratio_max", "train/advantage_std")
"""Metrics that are constant in a supervised run."""


def train(
    recipe: Recipe, *, pairs: Pairs, learner: Learner, timers: Timers, start: int = 0
) -> Iterator[Step]:
    """Learns from step ``start`` on, yielding after each step.

    ``learner`` has ``PROGRAM``, or learns a reward from pairs of responses.
    """
    for number in range(start, recipe.train.steps):
        groups = pairs.batch(number, recipe.train.batch)
        with timers("learn"):
            begin("learn", f"learning {len(groups)} rows")
            figures = learner.step(to_learn(learner, groups))
        metrics = {k: v for k, v in figures.items() if k not in CONSTANT}
        metrics |= {"train/version": learner.version, "train/tokens": count_tokens(groups)}
        yield Step(number + 1, metrics)


def to_learn(learner: Learner, groups: list[Group]) -> LearnBatch:
    batch, scores = pack(groups).to(learner.device), Scores()
    advantages = learner.program.advantages(batch, scores)
    (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
    return learn


def validate(
    measure: Callable[[Tensor, PackedBatch], Metrics],
    pairs: Pairs,
    learner: Learner,
    when: str = "",
) -> tuple[list[Group], Metrics]:
    """Figures of the held-out rows, which ``measure`` makes from the policy's stream [N]."""
    begin("evaluate", f"evaluating {len(pairs.validation)} rows {when}".rstrip())
    batch = pack(pairs.validation).to(learner.device)
    return [], measure(learner.logprobs(batch), batch)


def measure_answers(logprobs: Tensor, batch: PackedBatch) -> Metrics:
    """The mean loss over all answer tokens."""
    return {"validation/loss": -logprobs[batch.is_action].double().mean().item()}


def measure_preferences(stream: Tensor, batch: PackedBatch) -> Metrics:
    """The mean loss over all pairs, and how often the chosen response wins."""
    loss = bradley_terry(*rewards(stream, batch)).double().mean().item()
    return {"validation/loss": loss} | describe("validation", stream, batch)
