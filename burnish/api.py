"""The functions that scripts and the command line call: ``burnish.train`` and its kin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import config, inputs, preflight
from burnish.config import Overrides, Table
from burnish.errors import ConfigError, RunError
from burnish.model import hub
from burnish.preflight import Given, Prompts
from burnish.progress import Progress, Show, begin, showing_compiles, silent
from burnish.runs import checkpoints, directory, resuming
from burnish.runs.directory import PROMPTS, RunDirectory
from burnish.runs.metrics import iterate_rows
from burnish.runs.run import Run
from burnish.schema import KeywordsTask, Recipe, SorterConfig, SortTask
from burnish.tasks.rows import DataRow, read_rows
from burnish.threads import share_cores

if TYPE_CHECKING:
    from burnish.loops.generate import Answer
    from burnish.runs.results import Evaluation

AnyPath = str | os.PathLike[str]
AnyRecipe = AnyPath | Table | Recipe
"""A name that ``burnish recipes`` lists, a TOML file, a table of settings, or a ``Recipe``."""
Shown = Show | bool | None
"""How progress is shown: by a callable, on stderr if it is None or True, not at all if False."""
TORCH = Progress("load", "loading torch")
MEASURED = ("model", "task", "engine", "validation")
"""Sections of a recipe that an evaluation depends on."""


def train(
    recipe: AnyRecipe,
    *,
    prompts: Prompts = None,
    data: AnyPath | None = None,
    reward: Given = None,
    overrides: Overrides = (),
    out: AnyPath | None = None,
    show: Shown = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Runs a recipe and returns the run.

    ``recipe`` is a name that ``burnish recipes`` lists, a TOML file, a dict of sections or a
    ``Recipe``. ``settings`` are sections to change, as in ``train={"steps": 10}``, or ``seed=1``;
    ``overrides`` say the same as "train.steps=10", or as a dict. ``out`` is a new directory, by
    default runs/NAME-1, runs/NAME-2, … ``prompts`` (texts, or rows with a "prompt") or ``data`` (a
    JSONL file, or a directory with train.jsonl and validation.jsonl) and ``reward`` (a function of
    response text and row, or "FILE.py:NAME") replace the recipe's task. ``model`` may be a pair of
    objects, a model and its tokenizer, of burnish or of transformers.

    Progress is shown on stderr, unless ``show`` is False or a function, which is then called with
    every ``burnish.progress.Progress``; one of phase "step" carries a finished step's metrics.
    """
    if isinstance(prompts, str | Mapping):
        raise ConfigError(
            f"prompts must be a list of texts or rows, got one, {prompts!r}; write "
            f"prompts=[{prompts!r}], or give the name of a JSONL file as data"
        )
    rows = None if prompts is None else inputs.as_rows(prompts)
    if "model" in settings:
        settings["model"] = hub.as_setting(settings["model"])
    changes = [config.changed(overrides), settings]
    recipe = recipe_of(recipe, changes, rows=rows, data=data, reward=reward)
    with (
        directory.claimed(None if out is None else Path(out), recipe.name) as path,
        shown(show, path.name) as tell,
    ):
        tell(Progress("check", "checking the recipe and its data"))
        is_new = not path.exists() or not any(path.iterdir())
        preflight.check(recipe, path, prompts=rows, reward=reward)
        tell(TORCH)
        from burnish import build
        from burnish.loops.recorder import record

        recipe = build.prepare(recipe, tell)
        build.check_room(recipe, path, tell)
        read = build.hashes(recipe, tell, rows=rows, reward=reward)
        kept = None if rows is None else inputs.to_jsonl(rows)
        try:
            with (
                closing(build.build(recipe, prompts=rows, reward=reward, show=tell)) as parts,
                RunDirectory(path, recipe, inputs=read, prompts=kept) as opened,
            ):
                record(opened, parts, show=tell, stop=stop)
        except KeyboardInterrupt:
            learned = any(row["step"] > 0 for row in iterate_rows(path / "metrics.jsonl"))
            if is_new and not learned:
                shutil.rmtree(path, ignore_errors=True)  # it may not be made yet
            raise
    return Run(path)


def sft(
    recipe: AnyRecipe = "sft",
    *,
    data: AnyPath | Iterable[Mapping[str, Any]] | None = None,
    **how: Any,
) -> Run:
    """Learns written answers, prompt by prompt, and returns the run: a warm start for ``train``.

    ``data`` is a JSONL file of rows with "prompt" and "answer", a directory with train.jsonl and
    validation.jsonl, or the rows themselves; ``how`` is as in ``train``.
    """
    how["task"] = {"name": "pairs"} | how.get("task", {})
    if isinstance(data, str | os.PathLike):
        return train(recipe, data=data, **how)
    return train(recipe, prompts=data, **how)


def recipe_of(
    source: AnyRecipe,
    changes: Sequence[str | Table] = (),
    *,
    rows: Prompts = None,
    data: AnyPath | None = None,
    reward: Given = None,
) -> Recipe:
    """The recipe of a run, whose task is replaced by prompts and a reward of one's own.

    Without a reward, a keyword recipe keeps its own.
    """
    if rows is None and data is None and reward is None:
        return config.load(source, changes)
    if rows is not None and data is not None:
        raise ConfigError(f"prompts and data = {os.fspath(data)!r}: give one of the two")
    before = config.load(source).task
    name = config.changed(changes).get("task.name", before.name)
    own: dict[str, Any] = {"name": "pairs" if name == "pairs" else "files"}
    if rows is not None:
        own["train"] = None  # the run reads other rows
    elif data is not None:
        own["train"] = os.fspath(data)
        if Path(data).is_dir():
            own |= {name: str(Path(data) / f"{name}.jsonl") for name in ("train", "validation")}
    if reward is not None:
        own["reward"] = reward if isinstance(reward, str) else None
    elif isinstance(before, KeywordsTask) and name != "pairs":
        own |= {"reward": before.reward, "must_end": before.must_end}
    return config.load(source, [{"task": own}, *changes])


@contextmanager
def shown(show: Shown, name: str) -> Iterator[Show]:
    """The function to call with progress inside the block, which may load torch."""
    share_cores()
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


def resume(
    run_path: AnyPath,
    *,
    overrides: Overrides = (),
    from_checkpoint: str | None = None,
    anyway: bool = False,
    reward: Given = None,
    show: Shown = None,
    stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Run:
    """Continues a run from its last checkpoint, bit for bit as if it had never stopped.

    ``overrides`` and ``settings`` (see ``train``) may ask for more steps or another cadence; they
    must not change the mathematics. ``from_checkpoint`` names another checkpoint of the
    run, such as "step-00000040". A function that was the run's ``reward`` is given again; a run
    keeps its prompts itself. ``anyway`` resumes a run although its machine, packages or
    inputs have changed.
    """
    path = Path(run_path)
    with RunDirectory(path) as opened, shown(show, path.name) as tell:
        recipe = resuming.resumed_recipe(path, [config.changed(overrides), settings])
        chosen = checkpoints.latest(path)
        if from_checkpoint is not None:
            chosen = checkpoints.choose(path, from_checkpoint)
        tell(Progress("check", "checking the recipe and its data"))
        before = directory.read_json(path / directory.ENVIRONMENT)
        resuming.check_reward(path, recipe, before.get("inputs", {}), reward)
        is_given = "prompts" in before.get("inputs", {})
        rows = read_rows(path / PROMPTS, DataRow) if is_given else None
        preflight.check(recipe, prompts=rows, reward=reward)
        tell(TORCH)
        from burnish import build
        from burnish.learner.learner import State
        from burnish.loops.recorder import record

        recipe = build.prepare(recipe, tell, before.get("threads"))
        read = build.hashes(recipe, tell, rows=rows, reward=reward)
        resuming.check_environment(
            before, directory.environment(recipe) | {"inputs": read}, anyway=anyway
        )
        build.check_room(recipe, path, tell)
        with closing(build.build(recipe, prompts=rows, reward=reward, show=tell)) as parts:
            start, positions = 0, {}
            if chosen is not None:
                tell(Progress("load", f"loading the checkpoint {chosen.name}"))
                tensors, state = checkpoints.load(chosen)
                parts.learner.load_state(State(tensors, state["learner"]))
                if parts.prompts is not None:
                    parts.prompts.load_state(state["prompts"])
                start, positions = state["step"], state["positions"]
                opened.check_positions(positions)  # nothing is deleted before all is checked
                checkpoints.return_to(path, chosen, **recipe.checkpoint.model_dump())
            opened.cut_back(positions)
            opened.write("recipe.toml", config.to_toml(config.effective(recipe)))
            parts.learner.incarnation = opened.restart(start)
            record(opened, parts, start=start, show=tell, stop=stop)
    return Run(path)


def evaluate(
    recipe: AnyRecipe,
    *,
    model: Any = None,
    overrides: Overrides = (),
    out: AnyPath | None = None,
    show: Shown = None,
    **settings: Any,
) -> Evaluation:
    """Measures a model on held-out prompts, as training measures it at its start.

    ``recipe`` may also be a run, whose model is meant then; ``settings`` are sections to change, as
    in ``train``. Every response is kept in the directory ``out``, with a report; the responses that
    it holds of this very evaluation are not sampled again. By default it is runs/eval-NAME-HASH,
    one directory for all that the results depend on.
    """
    recipe = evaluation_recipe(recipe, hub.as_setting(model), [config.changed(overrides), settings])
    preflight.check(recipe)
    with shown(show, recipe.name) as tell:
        tell(TORCH)
        from burnish import build
        from burnish.engine.protocol import require
        from burnish.loops.evaluate import Evaluator
        from burnish.runs import results

        recipe = build.prepare(recipe, tell)
        depends = _evaluation_settings(recipe, build.hashes(recipe, tell))
        digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
        path = Path(out or f"runs/eval-{recipe.name}-{digest[:8]}")
        task, engine, decode = build.build_sampler(recipe, show=tell)
        with closing(task):
            require(engine.capabilities, repeats=False)
            if not engine.capabilities.counter_draws:
                depends["draws"] = "the engine's own"
            evaluator = Evaluator(recipe, task, engine, decode)
            evaluator.evaluate_into(path, depends, show=tell)
        tell(Progress("report", "writing the report"))
        results.write_evaluation([path], path / "report.html")
        return results.read(path)


def evaluation_recipe(
    source: AnyRecipe, model: AnyPath | Table | None = None, changes: Sequence[str | Table] = ()
) -> Recipe:
    """The recipe of an evaluation: as given, or the recipe of a run."""
    own: list[Table] = []
    if isinstance(source, str | os.PathLike) and (Path(source) / "recipe.toml").is_file():
        run, source = Path(source), Path(source) / "recipe.toml"
        if isinstance(config.load(source).task, SortTask):
            raise ConfigError(
                f"{run} trained the sorting model, and `burnish eval` measures language models; "
                f"{run}/report.html has the figures of its held-out prompts"
            )
        own.append({"model": run})
        if (run / PROMPTS).is_file():
            own.append({"task": {"train": run / PROMPTS}})
    if model is not None:
        own.append({"model": model})
    recipe = config.load(source, [*own, *changes])
    if recipe.is_supervised:
        raise ConfigError(f"{recipe.name} has answers to learn and none to grade; name another")
    return recipe


def _evaluation_settings(recipe: Recipe, read: Mapping[str, str]) -> dict[str, Any]:
    """All that an evaluation's results depend on, with the hashes of its inputs."""
    table = {section: config.effective(recipe).get(section, {}) for section in MEASURED}
    names = ("max_tokens", "min_tokens", "stop")
    table["rollout"] = recipe.rollout.model_dump(include=set(names))
    del table["validation"]["every"]
    settings: dict[str, Any] = json.loads(json.dumps(config.flat(table)))
    return settings | {"seed": recipe.seed} | {f"hash of {name}": read[name] for name in read}


def generate(
    prompts: str | Sequence[str],
    *,
    model: Any = "smollm2-135m",
    n: int = 1,
    chat: bool = True,
    precision: str = "auto",
    device: str = "auto",
    show: Shown = None,
    **sampling: Any,
) -> list[Answer]:
    """Samples ``n`` answers to each prompt, and returns them in the prompts' order.

    ``model`` is a name, a directory, hf:ORG/NAME, a run or a pair as in ``train``; ``chat`` puts a
    prompt through the model's chat template where it has one. ``sampling`` may set ``temperature``
    (0 is greedy), ``max_tokens`` (128 by default), ``min_tokens``, ``stop`` and ``seed``.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    model = hub.as_setting(model)
    named = {"task": "keywords", "model": model, "engine": {"precision": precision}}
    recipe = config.load(named | {"device": device})
    preflight.check(recipe)
    with shown(show, os.fspath(model)) as tell:
        tell(TORCH)
        from burnish import build
        from burnish.loops.generate import generate as answer
        from burnish.types import SamplingParams

        stop = sampling.pop("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        params = SamplingParams(**{"max_tokens": 128} | sampling, stop=stops)
        engine, tokenizer = build.build_engine(build.prepare(recipe, tell), tell)
        report = begin(tell, "generate", f"sampling {n * len(texts)} responses", unit="responses")
        return answer(engine, tokenizer, texts, n=n, params=params, chat=chat, report=report)


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
        tell(TORCH)
        from burnish import build
        from burnish.model import checkpoint as models

        model, _, source = build.open_model(recipe, show=tell)
        build.take_weights(model, chosen)
        tell(Progress("export", f"writing {target}"))
        models.save(model, target, source=source)
    return chosen
