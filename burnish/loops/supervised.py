"""The supervised loop: it trains a policy on written answers, or a reward model on preferences.

    for step = 1 … steps:  π ← step on  −Σ log π(answer token) / number of answer tokens

The cross-entropy is REINFORCE with an advantage of 1 on written answers, reduced by the token mean.
Packing, precision, schedule and checkpoints are therefore the same as in reinforcement learning.
The prompt is context. The answer is learned, including its end token: ``Completion.sampled`` marks
its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.console.progress import begin
from burnish.console.text import counted
from burnish.learner.program import compile
from burnish.learner.protocol import Learner, Step
from burnish.loops.sync import count_tokens
from burnish.recipe.objective.advantages import Raw
from burnish.recipe.objective.losses import Reinforce, TokenMean
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.rollout.packing import Pack, pack
from burnish.runs.metrics import Metrics, Timers
from burnish.tasks.pairs import Pairs
from burnish.types import Group, LearnBatch, Scores

PROGRAM = compile(ObjectiveConfig(advantage=Raw(), loss=Reinforce(), reduction=TokenMean()))
"""The objective of training on written answers: cross-entropy."""
CONSTANT = ("train/ratio_min", "train/ratio_max", "train/advantage_std")
"""Metrics that are constant in a supervised run, and are therefore left out."""


def train_supervised(
    total: int, batch: int, *, pairs: Pairs, learner: Learner, timers: Timers, start: int = 0
) -> Iterator[Step]:
    """Run the supervised loop after ``start`` finished steps until ``total`` steps are done, and
    yield each step. A step learns from ``batch`` rows.

    The learner's program is `PROGRAM` or `burnish.learner.preferences.PreferenceProgram`.
    """
    for number in range(start, total):
        groups = pairs.batch(number, batch)
        with timers("learn"):
            begin("learn", f"learning {len(groups)} rows")
            found = learner.step(make_learn_batch(learner, groups))
        metrics = {k: v for k, v in found.items() if k not in CONSTANT}
        metrics |= {"train/version": learner.version, "train/tokens": count_tokens(groups)}
        yield Step(number + 1, metrics)


def make_learn_batch(learner: Learner, groups: list[Group]) -> LearnBatch:
    """Pack groups of written responses into one train batch, with the advantages and loss weights
    of the learner's program."""
    batch, scores = pack(groups).to(learner.device), Scores()
    advantages = learner.program.advantages(batch, scores)
    (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
    return learn


def validate_supervised(
    pairs: Pairs, learner: Learner, when: str = "", max_errors: float | None = None
) -> tuple[list[Group], Metrics]:
    """Run the model over the held-out rows; return an empty list, because no responses are sampled,
    and the metrics, which are empty if no row is held out. ``when`` is displayed, such as "after
    step 10". ``max_errors`` is not used, because nothing is graded."""
    if not pairs.validation:
        return [], {}
    begin("evaluate", f"evaluating {counted(len(pairs.validation), 'row')} {when}".rstrip())
    return [], learner.held_out_metrics(pack(list(pairs.validation)).to(learner.device))
