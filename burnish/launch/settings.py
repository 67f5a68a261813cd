"""Converts the sections of a recipe to the settings that loops, rollouts and evaluation take."""

from __future__ import annotations

from dataclasses import replace

from burnish.engine.protocol import Sampler
from burnish.loops.evaluate import Decode, Evaluator
from burnish.loops.recorder import RunSettings
from burnish.loops.sync import StepSettings
from burnish.recipe.recipe import Recipe
from burnish.recipe.tasks import EnvironmentTask
from burnish.rollout.dead_groups import find_judge
from burnish.rollout.length import length_penalty
from burnish.rollout.rollout import sampling_params
from burnish.rollout.settings import RolloutSettings
from burnish.runs.early_stopping import Target
from burnish.runs.trackers.trackers import TrackerSettings
from burnish.tasks.task import Task


def rollout_settings(recipe: Recipe) -> RolloutSettings:
    rollout, task = recipe.rollout, recipe.task
    params = sampling_params(rollout, recipe.stop, recipe.seed)
    if isinstance(task, EnvironmentTask) and task.turn_temperatures is not None:
        params = replace(params, turn_temperatures=tuple(task.turn_temperatures))
    return RolloutSettings(
        prompts=recipe.prompts_per_rollout,
        group_size=rollout.group_size,
        params=params,
        overlong=rollout.overlong,
        max_errors=rollout.max_errors,
        selection=recipe.selection,
        is_dead=find_judge(recipe.selection.dead_by, recipe.objective),
        penalize=length_penalty(recipe.length, rollout.overlong, rollout.max_tokens),
    )


def step_settings(recipe: Recipe) -> StepSettings:
    return StepSettings(recipe.train.batch, recipe.train_batches, recipe.train.epochs)


def run_settings(recipe: Recipe) -> RunSettings:
    log, validation, metric = recipe.log, recipe.validation, recipe.target_metric
    target = None
    if metric is not None:
        patience, delta = validation.patience, validation.min_delta
        is_required = patience is not None or validation.metric is not None
        target = Target(metric, recipe.is_lower_better, patience, delta, is_required)
    return RunSettings(
        steps=recipe.train.steps,
        validate_every=recipe.validation.every,
        checkpoint_every=recipe.checkpoint.every,
        checkpoint_keep=recipe.checkpoint.keep,
        log_rollouts=log.rollouts,
        target=target,
        trackers=TrackerSettings(log.trackers, log.project, log.group, log.samples),
        max_errors=recipe.rollout.max_errors,
    )


def make_evaluator(recipe: Recipe, task: Task, engine: Sampler, decode: Decode) -> Evaluator:
    """Build the evaluator of a recipe's held-out prompts. It samples with the settings of
    ``validation`` (samples, temperature, max_tokens) and without top_p, top_k, min_p and repetition
    penalty; the other sampling settings, such as the seed, are the same as in training."""
    config = recipe.validation
    params = replace(
        sampling_params(recipe.rollout, recipe.stop, recipe.seed),
        temperature=config.temperature,
        top_p=1.0,
        top_k=None,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=config.max_tokens or recipe.rollout.max_tokens,
    )
    return Evaluator(
        params,
        config.samples,
        task,
        engine,
        decode,
        max_running=recipe.engine.max_running,
        logs_kl=recipe.train.log_kl,
    )
