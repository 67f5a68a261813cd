"""The functions that scripts and the command line call: ``burnish.train`` and its kin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from burnish import config, preflight, torchrun
from burnish.config import Overrides, Table
from burnish.display import Display
from burnish.draws import Stream
from burnish.errors import ConfigError, RunError
from burnish.graders.rewards import Reward
from burnish.model import hub
from burnish.progress import Show, begin, showing, tell
from burnish.runs import checkpoints, directory, resuming
from burnish.runs.directory import PROMPTS, RunDirectory
from burnish.runs.metrics import iterate_rows
from burnish.runs.run import Run
from burnish.schema.models import SorterConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import KeywordsTask, SortTask
from burnish.tasks.rows import DataRow, read_rows
from burnish.threads import share_cores
from burnish.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from burnish.loops.recorder import Parts
    from burnish.runs.results import Evaluation

AnyPath = str | os.PathLike[str]
AnyRecipe = AnyPath | Table | Recipe
"""A name that ``burnish recipes`` lists, a TOML file, a table of settings, or a ``Recipe``."""
Prompts = Iterable[str | Mapping[str, Any]]
Given = Reward | str | None
"""A reward that a script gives; None if the recipe's own reward is meant."""
Shown = Show | Literal[False] | None
"""How progress is shown: by a callable, on stderr if it is None, not at all if it is False."""
MEASURED = (
    *("model", "task", "engine", "validation", "seed", "reward_model"),
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop"),
)
"""Settings and sections of a recipe that an evaluation depends on."""


def train(
    recipe: AnyRecipe,
    *,
    prompts: Prompts | None = None,
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
    if "model" in settings:
        settings["model"] = hub.as_setting(settings["model"])
    changes = [config.changed(overrides), settings]
    recipe = recipe_of(recipe, changes, prompts=prompts, data=data, reward=reward)
    claimed = directory.claimed(None if out is None else Path(out), recipe.name)
    with claimed as path, shown(show, path.name):
        tell("check", "checking the recipe and its data")
        is_new = not path.exists() or not any(path.iterdir())
        preflight.check(recipe, path)
        tell("load", "loading torch")
        from burnish import build, sizes
        from burnish.loops.recorder import record

        recipe = build.prepare(recipe, torchrun.threads(recipe))
        sizes.check_room(recipe, path)
        read = preflight.hashes(recipe)
        try:
            with closing(_parts(recipe)) as parts, RunDirectory(path, recipe, inputs=read) as run:
                record(run, parts, stop=stop)
        except KeyboardInterrupt:
            learned = any(row["step"] > 0 for row in iterate_rows(path / "metrics.jsonl"))
            if is_new and not learned:
                shutil.rmtree(path, ignore_errors=True)  # it may not be made yet
            raise
    return Run(path)


def _parts(recipe: Recipe) -> Parts:
    """The parts of a run, in this process or in Ray's actors."""
    if recipe.runtime.name == "ray":
        from burnish import distribute

        return distribute.build(recipe)
    if recipe.runtime.name == "torchrun":
        return torchrun.build(recipe)
    from burnish import build

    return build.build(recipe)


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
    how["data" if isinstance(data, str | os.PathLike) else "prompts"] = data
    return train(recipe, **how)


def recipe_of(
    source: AnyRecipe,
    changes: Sequence[str | Table] = (),
    *,
    prompts: Prompts | None = None,
    data: AnyPath | None = None,
    reward: Given = None,
) -> Recipe:
    """The recipe of a run, whose task is replaced by prompts and a reward of one's own.

    Without a reward, a keyword recipe keeps its own.
    """
    if prompts is None and data is None and reward is None:
        return config.load(source, changes)
    if prompts is not None and data is not None:
        raise ConfigError(f"prompts and data = {os.fspath(data)!r}: give one of the two")
    before = config.load(source).task
    name = config.changed(changes).get("task.name", before.name)
    is_written = name in ("pairs", "preferences")
    keeps = is_written or (name == "judged" and reward is None)
    own: dict[str, Any] = {"name": name if keeps else "files"}
    if prompts is not None:
        own |= {"train": None, "rows": preflight.as_rows(prompts)}
    elif data is not None:
        own["train"] = os.fspath(data)
        if Path(data).is_dir():
            own |= {name: str(Path(data) / f"{name}.jsonl") for name in ("train", "validation")}
    if reward is not None:
        own |= {"reward": None, "function" if callable(reward) else "reward": reward}
    elif isinstance(before, KeywordsTask) and not is_written:
        own |= {"reward": before.reward, "must_end": before.must_end}
    return config.load(source, [{"task": own}, *changes])


@contextmanager
def shown(show: Shown, name: str) -> Iterator[None]:
    """Shows the progress of the block, which may load torch."""
    share_cores()
    display: AbstractContextManager[Show] = nullcontext(show or (lambda progress: None))
    if show is None:
        display = Display(name, Console(stderr=True, highlight=False))
    with display as told, showing(told):
        yield


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
    with RunDirectory(path) as opened, shown(show, path.name):
        tell("check", "checking the recipe and its data")
        recipe = resuming.resumed_recipe(path, [config.changed(overrides), settings])
        chosen = checkpoints.latest(path)
        if from_checkpoint is not None:
            chosen = checkpoints.choose(path, from_checkpoint)
        before = directory.read_json(path / directory.ENVIRONMENT)
        read_before = before.get("inputs", {})
        resuming.check_reward(path, recipe, read_before, reward)
        if "prompts" in read_before:
            recipe = config.load(recipe, {"task": {"rows": read_rows(path / PROMPTS, DataRow)}})
        if "reward" in read_before:
            recipe = config.load(recipe, {"task": {"function": reward}})
        preflight.check(recipe)
        tell("load", "loading torch")
        from burnish import build, sizes
        from burnish.loops.recorder import go_back, record

        recipe = build.prepare(recipe, before.get("threads"))
        now = directory.environment(recipe) | {"inputs": preflight.hashes(recipe)}
        resuming.check_environment(before, now, anyway=anyway)
        sizes.check_room(recipe, path)
        with closing(_parts(recipe)) as parts:
            start = go_back(opened, parts, chosen)
            opened.write("recipe.toml", config.to_toml(config.effective(recipe)))
            record(opened, parts, start=start, stop=stop)
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
    in ``train``. Every response is kept in the directory ``out``, with a report; an evaluation that
    it holds already is not repeated. By default it is runs/eval-NAME-HASH, one directory for all
    that the results depend on.
    """
    recipe = evaluation_recipe(recipe, hub.as_setting(model), [config.changed(overrides), settings])
    preflight.check(recipe)
    with shown(show, recipe.name):
        tell("load", "loading torch")
        from burnish import build
        from burnish.engine.protocol import require
        from burnish.loops.evaluate import Evaluator
        from burnish.runs import results

        recipe = build.prepare(recipe)
        settings = config.flat(config.effective(recipe))
        depends = {key: value for key, value in settings.items() if key.startswith(MEASURED)}
        depends |= {f"hash of {name}": value for name, value in preflight.hashes(recipe).items()}
        digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
        path = Path(out or f"runs/eval-{recipe.name}-{digest[:8]}")
        task, engine, decode = build.build_sampler(recipe)
        with closing(task):
            require(engine.capabilities, repeats=False)
            if not engine.capabilities.counter_draws:
                depends["draws"] = "the engine's own"
            Evaluator(recipe, task, engine, decode).evaluate_into(path, depends)
        tell("report", "writing the report")
        results.write_evaluation([path], path / "report.html")
        return results.read(path)


def evaluation_recipe(
    source: AnyRecipe, model: AnyPath | Table | None = None, changes: Sequence[str | Table] = ()
) -> Recipe:
    """The recipe of an evaluation: as given, or the recipe of a run."""
    own: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike) and (Path(source) / "recipe.toml").is_file():
        run, source = Path(source), Path(source) / "recipe.toml"
        if isinstance(config.load(source).task, SortTask):
            raise ConfigError(
                f"{run} trained the sorting model, and `burnish eval` measures language models; "
                f"{run}/report.html has the figures of its held-out prompts"
            )
        own["model"] = run
        if (run / PROMPTS).is_file():
            own["task"] = {"train": run / PROMPTS}
    if model is not None:
        own["model"] = model
    recipe = config.load(source, [own, *changes])
    if recipe.is_supervised:
        raise ConfigError(f"{recipe.name} has answers to learn and none to grade; name another")
    return recipe.model_copy(update={"teacher": None})  # a student is measured by itself


@dataclass(frozen=True)
class Answer:
    """A text that a model wrote."""

    prompt: str
    sample: int
    """Its number among the answers to the prompt."""
    text: str
    finish: str
    """stop (the model ended it, or a stop text did), length, or abort (the model overflowed)."""
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    """Of each token, by the model at the sampling temperature."""


def generate(
    prompts: str | Sequence[str],
    *,
    model: Any = "smollm2-135m",
    n: int = 1,
    chat: bool = True,
    precision: str = "auto",
    device: str = "auto",
    stop: str | Sequence[str] = (),
    show: Shown = None,
    **sampling: Any,
) -> list[Answer]:
    """Samples ``n`` answers to each prompt, and returns them in the prompts' order.

    ``model`` is a name, a directory, hf:ORG/NAME, a run or a pair as in ``train``; ``chat`` puts a
    prompt through the model's chat template where it has one. ``stop`` texts end an answer.
    ``sampling`` may set ``temperature`` (0 is greedy), ``max_tokens`` (128 by default),
    ``min_tokens`` and ``seed``.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    named = {"task": "keywords", "model": hub.as_setting(model), "device": device}
    recipe = config.load(named | {"engine": {"precision": precision}})
    with shown(show, recipe.model.name):
        engine, tokenizer = open_engine(recipe)
        from burnish.rollout.rollout import sample
        from burnish.tasks.text import encode

        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        params = SamplingParams(**sampling, stop=stops)
        chat = chat and tokenizer.chat_template is not None
        inputs = [encode(tokenizer, text, chat=chat) for text in texts]
        asked = [(i, Prompt(str(i), text, ids, "generate")) for i, (text, ids) in enumerate(inputs)]
        report = begin("generate", f"sampling {n * len(texts)} responses", unit="responses")
        done = sample(engine, asked, n, params, Stream.GENERATE, report)
    return [
        Answer(
            text, c.sample_index, c.text, str(c.finish), c.token_ids.tolist(), c.logprobs.tolist()
        )
        for text, completions in zip(texts, done, strict=True)
        for c in completions
    ]


def open_engine(recipe: Recipe) -> tuple[Any, Any]:
    """The engine of a recipe's language model, and the model's tokenizer."""
    preflight.check(recipe)
    tell("load", "loading torch")
    from burnish import build, models

    recipe = build.prepare(recipe)
    return build.build_engine(recipe), models.open_tokenizer(recipe)


def export(
    run_path: AnyPath,
    out: AnyPath,
    *,
    which: str = "best",
    adapter: bool = False,
    show: Shown = None,
) -> Path:
    """Writes a run's model as a Hugging Face directory; returns the checkpoint it came from.

    ``which`` is "best" (by validation; the last where there was none), "last" or a checkpoint's
    name. ``adapter`` writes the run's adapter alone, in PEFT's layout; otherwise it is merged. If
    the run's model is itself a run, or began with random weights, the model that the adapter was
    made for is written to the folder ``base`` beside it, because PEFT can't open a run.
    """
    path, target = Path(run_path), Path(out).resolve()
    recipe = resuming.resumed_recipe(path, ())
    if isinstance(recipe.model, SorterConfig):
        raise ConfigError("the sorting model is not a language model and can't be exported")
    if adapter and (recipe.train.learn.name != "lora" or recipe.task.name == "preferences"):
        raise ConfigError(
            f"{path} has no adapter: train.learn is '{recipe.train.learn.name}', not 'lora', or it "
            "learned a reward, whose head is in no adapter; export the model without --adapter"
        )
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{out} is not empty; choose another directory")
    chosen = checkpoints.choose(path, which)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A directory beside it gets its name once it is whole.
    scratch = tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-")
    with shown(show, path.name), scratch as made:
        tell("load", "loading torch")
        from burnish import models

        tell("export", f"writing {out}")
        models.write_run(recipe, chosen, Path(made, "model"), adapter=adapter, final=target)
        Path(made, "model").rename(target)
    return chosen
