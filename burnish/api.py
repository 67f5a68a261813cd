"""What the CLI calls, and what a script calls: ``burnish.train`` and its kin."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import build, config, inputs, preflight
from burnish.build import AnyPath, AnyRecipe, Prompts, Reward
from burnish.config import (
    FilesTask,
    KeywordsTask,
    Overrides,
    Recipe,
    Rows,
    SorterConfig,
    Table,
)
from burnish.errors import ConfigError, RunError
from burnish.progress import Progress, Show, begin, showing_compiles, silent
from burnish.runs import checkpoints, resuming
from burnish.runs.directory import (
    ENVIRONMENT,
    PROMPTS,
    RunDirectory,
    claimed,
    environment,
    read_json,
)
from burnish.runs.metrics import iterate_rows, read_rows
from burnish.runs.run import Run

if TYPE_CHECKING:
    from burnish.loops.generate import Answer
    from burnish.runs.results import Evaluation
    from burnish.tasks.text import Messages

Shown = Show | bool | None
"""What progress is shown to: a callable; None or True for a display on stderr; False for nobody."""


def train(
    recipe: AnyRecipe,
    *,
    prompts: Prompts = None,
    data: AnyPath | None = None,
    reward: Reward | str | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
    out: AnyPath | None = None,
    show: Shown = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Runs a recipe and returns the run.

    ``recipe`` is a name that ``burnish recipes`` lists, a TOML file, a dict of sections or a
    ``Recipe``. ``settings`` are sections to change, as in ``train={"steps": 10}``; ``overrides``
    say the same as "train.steps=10", or as a dict. ``out`` is a new directory, by default
    runs/NAME-1, runs/NAME-2, … ``prompts`` (texts, or rows with a "prompt") or ``data`` (a JSONL
    file, or a directory with train.jsonl and validation.jsonl) and ``reward`` (a function of
    response text and row, or "FILE.py:NAME") replace the recipe's task.

    Progress is shown on stderr, unless ``show`` is False or a function, which is then called with
    every ``burnish.progress.Progress``; those of phase "step" carry a finished step's metrics.
    """
    _check_given(prompts, data)
    if isinstance(recipe, Recipe) and data is not None:
        recipe = config.effective(recipe)
    is_own = prompts is not None or data is not None or reward is not None
    own: list[str] = []
    if is_own and not isinstance(recipe, Recipe):
        own = own_task(recipe, data=None if data is None else Path(data), reward=reward)
    recipe = build.load_recipe(recipe, [*own, config.changed(overrides), settings], seed=seed)
    rows = None if prompts is None else inputs.as_rows(prompts)
    recipe = _as_given(recipe, rows, reward)
    place = None if out is None else Path(out)
    with claimed(place, recipe.name) as path, shown(show, path.name) as tell:
        tell(Progress("check", "checking the recipe and its data"))
        is_new = not path.exists() or not any(path.iterdir())
        preflight.check(recipe, path, prompts=rows, reward=reward)
        recipe = build.prepare(recipe, tell)
        build.check_room(recipe, path, tell)
        from burnish.loops.recorder import record

        read = _hashes(recipe, rows, reward, tell)
        parts = build.build(recipe, prompts=rows, reward=reward, show=tell)
        try:
            kept = None if rows is None else inputs.to_jsonl(rows)
            with RunDirectory(path, recipe, inputs=read, prompts=kept) as directory:
                record(directory, parts, show=tell, stop=stop)
        except KeyboardInterrupt:
            if is_new and not has_learned(path):
                shutil.rmtree(path)
            raise
        finally:
            parts.close()
    return Run(path)


def sft(
    recipe: AnyRecipe = "sft",
    *,
    data: AnyPath | Iterable[Mapping[str, Any]] | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
    out: AnyPath | None = None,
    show: Shown = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Learns written answers, prompt by prompt, and returns the run: a warm start for ``train``.

    ``data`` is a JSONL file of rows with "prompt" and "answer", a directory with train.jsonl and
    validation.jsonl, or the rows themselves; the rest is as in ``train``.
    """
    file, rows = None, None
    if isinstance(data, str | os.PathLike):
        file = Path(data)
    elif data is not None:
        rows = list(data)
    if not isinstance(recipe, Recipe):
        recipe = config.load(recipe, own_pairs(recipe, data=file, is_given=rows is not None))
    recipe = build.load_recipe(recipe, [config.changed(overrides), settings], seed=seed)
    return train(recipe, prompts=rows, out=out, show=show, stop=stop)


def _check_given(prompts: Prompts, data: AnyPath | None) -> None:
    if isinstance(prompts, str | Mapping):
        raise ConfigError(
            f"prompts must be a list of texts or rows, got one, {prompts!r}; write "
            f"prompts=[{prompts!r}], or give the name of a JSONL file as data"
        )
    if prompts is not None and data is not None:
        raise ConfigError(f"prompts and data = {os.fspath(data)!r}: give one of the two")


def _as_given(recipe: Recipe, rows: list[Any] | None, reward: Reward | str | None) -> Recipe:
    """The recipe without the rows and the reward that a script gives others for: they are not what
    the run reads. (A task that takes none is refused later.)"""
    changes: dict[str, Any] = {} if rows is None else {"train": None}
    if reward is not None and isinstance(recipe.task, FilesTask):
        changes["reward"] = reward if isinstance(reward, str) else None
    if not isinstance(recipe.task, Rows):
        return recipe
    return recipe.model_copy(update={"task": recipe.task.model_copy(update=changes)})


def _hashes(
    recipe: Recipe, rows: list[Any] | None, reward: Reward | str | None, show: Show
) -> dict[str, str]:
    """Of all that a run reads, its model included."""
    given = None if isinstance(reward, str) else reward
    read = inputs.hashes(recipe, rows=rows, reward=given)
    return read if (model := build.digest(recipe, show)) is None else read | {"model": model}


@contextmanager
def shown(show: Shown, name: str) -> Iterator[Show]:
    """What to call with progress inside the block."""
    if callable(show):
        with showing_compiles(show):
            yield show
    elif show is False:
        yield silent
    else:
        from rich.console import Console

        from burnish.display import Display

        console = Console(stderr=True, highlight=False)
        with Display(name, console) as display, showing_compiles(display):
            yield display


def has_learned(run_path: Path) -> bool:
    """Whether a run has finished a step."""
    return any(row["step"] > 0 for row in iterate_rows(run_path / "metrics.jsonl"))


def own_task(
    recipe: AnyPath | Table, *, data: Path | None = None, reward: Reward | str | None = None
) -> list[str]:
    """Overrides that put prompts and a reward of one's own in the place of a recipe's task.

    ``data`` is a JSONL file, or a directory with train.jsonl and validation.jsonl. Without a
    reward, a keyword recipe keeps its own.
    """
    overrides = ["task.name=files"]
    files = {} if data is None else _data_files(data)
    overrides += [f"task.{key}={json.dumps(file)}" for key, file in files.items()]
    if isinstance(reward, str):
        overrides.append(f"task.reward={json.dumps(reward)}")
    task = config.load(recipe).task
    if reward is None and isinstance(task, KeywordsTask):
        overrides += [f"task.reward={task.reward}", f"task.must_end={json.dumps(task.must_end)}"]
    return overrides


def own_pairs(
    recipe: AnyPath | Table,
    *,
    data: Path | None = None,
    model: str | None = None,
    is_given: bool = False,
) -> list[str]:
    """Overrides that make a recipe a supervised one, on rows of one's own, from a model.

    ``is_given``: a script passes the rows themselves.
    """
    files = {} if data is None else _data_files(data)
    if data is None and not is_given and not config.load(recipe).is_supervised:
        raise ConfigError(f"recipe {recipe} has no answers to learn; give --data FILE.jsonl")
    overrides = ["task.name=pairs", *(f"task.{k}={json.dumps(v)}" for k, v in files.items())]
    return overrides + ([] if model is None else [f"model.name={json.dumps(model)}"])


def _data_files(data: Path) -> dict[str, str]:
    """A JSONL file, or a directory with train.jsonl and validation.jsonl."""
    if not data.is_dir():
        return {"train": str(data)}
    return {name: str(data / f"{name}.jsonl") for name in ("train", "validation")}


def resume(
    run_path: AnyPath,
    *,
    overrides: Overrides = (),
    from_checkpoint: str | None = None,
    anyway: bool = False,
    reward: Reward | str | None = None,
    show: Shown = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Continues a run from its last checkpoint, bit for bit as if it had never stopped.

    ``overrides`` and ``settings`` (see ``train``) may ask for more steps or another cadence; what
    would change the mathematics is refused. ``from_checkpoint`` names another checkpoint of the
    run, such as "step-00000040". A function that was the run's ``reward`` is given again; a run
    keeps its prompts itself. ``anyway`` resumes a run although its machine, its packages or what
    it reads has changed.
    """
    path = Path(run_path)
    with RunDirectory(path) as directory, shown(show, path.name) as tell:
        recipe = resuming.resumed_recipe(path, [config.changed(overrides), settings])
        chosen = (
            checkpoints.latest(path)
            if from_checkpoint is None
            else checkpoints.choose(path, from_checkpoint)
        )
        tell(Progress("check", "checking the recipe and its data"))
        before = read_json(path / ENVIRONMENT)
        resuming.check_reward(path, recipe, before.get("inputs", {}), reward)
        rows = read_rows(path / PROMPTS) if "prompts" in before.get("inputs", {}) else None
        preflight.check(recipe, prompts=rows, reward=reward)
        recipe = build.prepare(recipe, tell, before.get("threads"))
        now = environment(recipe) | {"inputs": _hashes(recipe, rows, reward, tell)}
        resuming.check_environment(before, now, anyway=anyway)
        build.check_room(recipe, path, tell)
        from burnish.learner.learner import State
        from burnish.loops.recorder import record

        parts = build.build(recipe, prompts=rows, reward=reward, show=tell)
        try:
            start = 0
            positions: dict[str, int] = {}
            if chosen is not None:
                tell(Progress("load", f"loading the checkpoint {chosen.name}"))
                saved = checkpoints.load(chosen)
                parts.learner.load_state(State(saved.tensors, saved.state["learner"]))
                if parts.prompts is not None:
                    parts.prompts.load_state(saved.state["prompts"])
                start, positions = saved.step, saved.state["positions"]
                directory.check_positions(positions)  # nothing is deleted before all is checked
                checkpoints.return_to(path, chosen, keep=recipe.checkpoint.keep)
            directory.cut_back(positions)
            directory.write("recipe.toml", config.to_toml(config.effective(recipe)))
            parts.learner.incarnation = directory.restart(start)
            record(directory, parts, start=start, show=tell, stop=stop)
        finally:
            parts.close()
    return Run(path)


def evaluate(
    recipe: AnyRecipe,
    *,
    model: AnyPath | Table | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
    out: AnyPath | None = None,
    show: Shown = None,
    **settings: Any,
) -> Evaluation:
    """Measures a model on held-out prompts, as training measures it at its start.

    ``recipe`` may also be a run, whose model is meant then, or a task's name; ``settings`` are
    sections to change, as in ``train``. With ``out``, every response is kept in that directory,
    with a report; what it holds of this very evaluation, begun before, is not sampled again.
    """
    changes = [config.changed(overrides), settings]
    recipe = build.evaluation_recipe(recipe, model=model, overrides=changes, seed=seed)
    preflight.check(recipe)
    with shown(show, recipe.name if out is None else Path(out).name) as tell:
        recipe = build.prepare(recipe, tell)
        from burnish.engine.protocol import require
        from burnish.loops.evaluate import Evaluator, figures
        from burnish.runs import results

        task, engine, decode = build.build_sampler(recipe, show=tell)
        try:
            require(engine.capabilities, repeats=False)
            depends = build.evaluation_settings(recipe, show=tell)
            if not engine.capabilities.counter_draws:
                depends["draws"] = "the engine's own"
            evaluator = Evaluator(recipe, task, engine, decode)
            if out is None:
                parts = evaluator.answered(show=tell)
                rows: Any = [row for groups in parts for row in evaluator.rows(groups)]
                return results.Evaluation(recipe.name, depends, figures(rows), rows, None)
            path = Path(out)
            evaluator.evaluate_into(path, depends, show=tell)
            tell(Progress("report", "writing the report"))
            results.write_evaluation([path], path / "report.html")
            return results.read(path)
        finally:
            task.close()


def generate(
    prompts: str | Sequence[str | Messages],
    *,
    model: AnyPath = "smollm2-135m",
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    max_tokens: int = 128,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    show: Shown = None,
    write: Callable[[str], object] = lambda text: None,
) -> list[Answer]:
    """Samples ``n`` answers to each prompt, and returns them in the prompts' order.

    ``model`` is a name, a directory, hf:ORG/NAME or a run; temperature 0 is greedy; ``chat`` puts
    a prompt through the model's chat template where it has one. ``write`` gets the text of the
    first answer, piece by piece, as it is sampled.
    """
    from burnish.loops import generate as loop
    from burnish.types import SamplingParams

    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=seed,
    )
    with shown(show, os.fspath(model)) as tell:
        engine, tokenizer = build.open_engine(model, dtype=dtype, device=device, show=tell)
        report = begin(tell, "generate", f"sampling {n * len(texts)} responses", unit="responses")
        return loop.generate(
            engine, tokenizer, texts, n=n, params=params, chat=chat, write=write, report=report
        )


def export(run_path: AnyPath, out: AnyPath, *, which: str = "best", show: Shown = None) -> Path:
    """Writes a run's model as a Hugging Face directory; returns the checkpoint it came from.

    ``which`` is "best" (by validation; the last where there was none), "last" or a checkpoint's
    name.
    """
    path, target = Path(run_path), Path(out)
    recipe = resuming.resumed_recipe(path, ())
    if isinstance(recipe.model, SorterConfig):
        raise ConfigError("the sorting model is not a language model and can't be exported")
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{target} is not empty; choose another directory")
    chosen = checkpoints.choose(path, which)
    with shown(show, path.name) as tell:
        tell(Progress("load", "loading torch"))
        from burnish.model import checkpoint as models

        model, _, source = build.open_model(recipe, dtype="float32", show=tell)
        build.take_weights(model, chosen)
        tell(Progress("export", f"writing {target}"))
        models.save(model, target, source=source)
    return chosen
