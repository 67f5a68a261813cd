"""What the CLI calls, and what a script calls: ``burnish.train`` and its kin."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import config, inputs, machine, preflight
from burnish.config import (
    FilesTask,
    GymTask,
    KeywordsTask,
    LanguageConfig,
    MixtureTask,
    Overrides,
    PairsTask,
    Recipe,
    Rows,
    ScratchConfig,
    SorterConfig,
    SortTask,
    Table,
)
from burnish.errors import BurnishError, ConfigError, RunError
from burnish.plan import PAGE, Room, Size, check_lengths, room
from burnish.preflight import check_before, check_sources
from burnish.progress import Progress, Show, begin, showing_compiles, silent
from burnish.runs import checkpoint
from burnish.runs.directory import ENVIRONMENT, PROMPTS, RunDirectory, claimed, environment
from burnish.runs.metrics import iterate_rows, read_rows
from burnish.runs.run import Run
from burnish.threads import share_cores

if TYPE_CHECKING:
    from burnish.engine.protocol import Engine
    from burnish.learner.learner import Learner
    from burnish.learner.objective import Program
    from burnish.learner.policy import Policy
    from burnish.loops.generate import Answer
    from burnish.loops.run import Parts
    from burnish.model.sorter import Sorter
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import ModelConfig, Transformer
    from burnish.rollout.rollout import Generator
    from burnish.runs.evaluation import Evaluation
    from burnish.runs.metrics import Row
    from burnish.tasks.pairs import Pairs
    from burnish.tasks.task import Task
    from burnish.types import Group

AnyPath = str | os.PathLike[str]
AnyRecipe = AnyPath | Table | Recipe
"""A name that ``burnish recipes`` lists, a TOML file, a table of settings, or a ``Recipe``."""
Reward = Callable[[str, Mapping[str, Any]], Any]
Prompts = Iterable[str | Mapping[str, Any]] | None
Shown = Show | bool | None
"""What progress is shown to: a callable; None or True for a display on stderr; False for nobody."""
DRIFT = 128
"""Held-out prompts on whose responses the KL to the initial model is measured."""
STEP_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens that the engine runs at once, by device."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PROBED = 1000
"""Training prompts that are looked at for the longest; all rows of a file are looked at before."""


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
    file of rows, or a directory that `burnish data` wrote) and ``reward`` (a function of response
    text and row, or "FILE.py:NAME") replace the recipe's task.

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
    recipe = _loaded(recipe, [*own, *config.tables(overrides), settings], seed=seed)
    rows = None if prompts is None else inputs.as_rows(prompts)
    recipe = _as_given(recipe, rows, reward)
    place = None if out is None else Path(out)
    with claimed(place, recipe.name) as path, shown(show, path.name) as tell:
        tell(Progress("check", "checking the recipe and its data"))
        is_new = not path.exists() or not any(path.iterdir())
        check_before(recipe, path, prompts=rows, reward=reward)
        recipe = _prepare(recipe, tell)
        _check_room(recipe, path, tell)
        from burnish.loops.run import run

        read = _hashes(recipe, rows, reward, tell)
        parts = build(recipe, prompts=rows, reward=reward, show=tell)
        try:
            kept = None if rows is None else inputs.to_jsonl(rows)
            with RunDirectory(path, recipe, inputs=read, prompts=kept) as directory:
                run(directory, parts, show=tell, stop=stop)
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

    ``data`` is a JSONL file of rows with "prompt" and "answer", a directory that `burnish data`
    wrote, or the rows themselves; the rest is as in ``train``.
    """
    file, rows = None, None
    if isinstance(data, str | os.PathLike):
        file = Path(data)
    elif data is not None:
        rows = list(data)
    if not isinstance(recipe, Recipe):
        recipe = config.load(recipe, own_pairs(recipe, data=file, is_given=rows is not None))
    recipe = _loaded(recipe, [*config.tables(overrides), settings], seed=seed)
    return train(recipe, prompts=rows, out=out, show=show, stop=stop)


def _loaded(
    source: AnyRecipe, changes: Sequence[str | Table], *, seed: int | None = None
) -> Recipe:
    """The recipe with changes; one that is loaded already and is not changed stays as it is."""
    if isinstance(source, Recipe):
        if not any(changes) and seed is None:
            return source
        source = config.effective(source)
    return config.load(source, changes, seed=seed)


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
    return read if (model := _digest(recipe, show)) is None else read | {"model": model}


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

    ``data`` is a JSONL file, or a directory with train.jsonl and validation.jsonl such as `burnish
    data` writes. Without a reward, a keyword recipe keeps its own.
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


def write_keywords(
    out: str | Path,
    *,
    rows: int,
    recipe: str = "keywords",
    overrides: Sequence[str] = (),
    seed: int | None = None,
    show: Shown = None,
) -> dict[str, float]:
    """Keyword prompts of a recipe with answers of the model that it names."""
    loaded = config.load(recipe, overrides, seed=seed)
    from burnish.loops import data
    from burnish.tasks.keywords import Keywords

    if not isinstance(loaded.task, KeywordsTask):
        raise ConfigError(f"task.name must be 'keywords', recipe {recipe} has '{loaded.task.name}'")
    data.new_files(Path(out))  # what can go wrong goes wrong before the model is loaded
    check_sources(loaded)
    with shown(show, Path(out).name) as tell:
        loaded = _prepare(loaded, tell)
        task, generator, _ = build_sampler(loaded, show=tell)
        assert isinstance(task, Keywords)
        return data.write_keywords(loaded, task, generator, Path(out), rows=rows, show=tell)


def write_sums(
    out: str | Path,
    *,
    rows: int,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    show: Shown = None,
) -> None:
    """Worked answers to questions of the recipe ``arithmetic``, for a supervised warm start."""
    recipe = config.load("arithmetic", overrides, seed=seed)
    check_sources(recipe)
    from burnish.loops import data
    from burnish.model import hub
    from burnish.model.tokenizer import Tokenizer
    from burnish.tasks.gym import Gym

    assert isinstance(recipe.task, GymTask)
    with shown(show, Path(out).name) as tell:
        tokenizer = Tokenizer.load(hub.resolve(LanguageConfig().name, tell))
        tell(Progress("generate", f"writing {rows} sums"))
        task = Gym(recipe.task, tokenizer=tokenizer, seed=recipe.seed)
        data.write_sums(task, Path(out), rows=rows)


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
    with RunDirectory.reopen(path) as directory, shown(show, path.name) as tell:
        recipe = _resumed_recipe(path, [*config.tables(overrides), settings])
        chosen = _choose(path, from_checkpoint)
        tell(Progress("check", "checking the recipe and its data"))
        before = _environment_of(path)
        _check_reward(path, recipe, before.get("inputs", {}), reward)
        rows = read_rows(path / PROMPTS) if "prompts" in before.get("inputs", {}) else None
        check_sources(recipe, prompts=rows, reward=reward)
        recipe = _prepare(recipe, tell, before.get("threads"))
        now = environment(recipe) | {"inputs": _hashes(recipe, rows, reward, tell)}
        _check_environment(before, now, anyway=anyway)
        _check_room(recipe, path, tell)
        from burnish.learner.learner import State
        from burnish.loops.run import run

        parts = build(recipe, prompts=rows, reward=reward, show=tell)
        try:
            start = 0
            positions: dict[str, int] = {}
            if chosen is not None:
                tell(Progress("load", f"loading the checkpoint {chosen.name}"))
                saved = checkpoint.load(chosen)
                parts.learner.load_state(State(saved.tensors, saved.state["learner"]))
                start, positions = saved.step, saved.state["positions"]
                directory.check_positions(positions)  # nothing is deleted before all is checked
                checkpoint.return_to(path, chosen, keep=recipe.checkpoint.keep)
            directory.cut_back(positions)
            directory.write("recipe.toml", config.to_toml(config.effective(recipe)))
            parts.learner.incarnation = directory.restart(start)
            run(directory, parts, start=start, show=tell, stop=stop)
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
    changes = [*config.tables(overrides), settings]
    recipe = evaluated(recipe, model=model, overrides=changes, seed=seed)
    check_sources(recipe)
    with shown(show, recipe.name if out is None else Path(out).name) as tell:
        recipe = _prepare(recipe, tell)
        from burnish.loops import evaluate as loop
        from burnish.runs import evaluation

        task, generator, decode = build_sampler(recipe, show=tell)
        try:
            depends = evaluation_settings(recipe, show=tell)
            if out is None:
                groups, figures = loop.evaluate(recipe, task, generator, decode, show=tell)
                rows: Any = loop.to_rows(task, groups, decode)
                return evaluation.Evaluation(recipe.name, depends, figures, rows, None)
            path = Path(out)
            loop.evaluate_into(path, depends, recipe, task, generator, decode, show=tell)
            tell(Progress("report", "writing the report"))
            evaluation.write_evaluation([path], path / "report.html")
            return evaluation.read(path)
        finally:
            task.close()


def evaluated(
    source: AnyRecipe,
    *,
    model: AnyPath | Table | None = None,
    overrides: Overrides = (),
    seed: int | None = None,
) -> Recipe:
    """The recipe that an evaluation goes by: as given, of a run, or of a task and defaults."""
    own: list[str | Table] = []
    if isinstance(source, str | os.PathLike):
        source = name = os.fspath(source)
        if (Path(name) / "recipe.toml").is_file():
            source, own = f"{name}/recipe.toml", [{"model": name}]
            if isinstance(config.load(source).task, SortTask):
                raise ConfigError(
                    f"{name} trained the sorting model, and `burnish eval` measures language "
                    f"models; {name}/report.html has what the run measured on held-out prompts"
                )
            if (Path(name) / PROMPTS).is_file():
                own.append({"task": {"train": f"{name}/{PROMPTS}"}})
        elif name in config.TASKS and name not in config.list_recipes():
            source, own = "keywords", [f"task.name={name}", f"name={name}"]
    changes: Sequence[str | Table] = config.tables(overrides)
    if isinstance(model, Mapping):
        own.append({"model": model})
    elif model is not None:
        changes = config.together([f"model.name={json.dumps(os.fspath(model))}"], changes)
    recipe = _loaded(source, [*own, *changes], seed=seed)
    if recipe.is_supervised:
        raise ConfigError(
            f"{recipe.name} has answers to learn and none to grade; name another --task"
        )
    return recipe


def generate(
    prompts: str | Sequence[str],
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
) -> list[Answer]:
    """Samples ``n`` answers to each prompt, and returns them in the prompts' order.

    ``model`` is a name, a directory, hf:ORG/NAME or a run; temperature 0 is greedy; ``chat`` puts
    a prompt through the model's chat template where it has one.
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
        engine, tokenizer = open_engine(model, dtype=dtype, device=device, show=tell)
        report = begin(tell, "generate", f"sampling {n * len(texts)} responses", unit="responses")
        done = loop.sample(engine, tokenizer, texts, n=n, params=params, chat=chat, report=report)
    return [loop.answer(texts, completion) for completion in done]


def open_engine(
    model: AnyPath, *, dtype: str = "auto", device: str = "auto", show: Show = silent
) -> tuple[Engine, Tokenizer]:
    """The native engine on a model by name, path or run."""
    precisions = {"auto": "auto"} | {name: short for short, name in DTYPES.items()}
    if dtype not in precisions:
        raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    engine, named = {"precision": precisions[dtype]}, {"name": os.fspath(model)}
    recipe = config.load({"task": "keywords", "model": named, "engine": engine, "device": device})
    check_sources(recipe)
    return _engine(_prepare(recipe, show), show)


def evaluation_settings(recipe: Recipe, show: Show = silent) -> dict[str, Any]:
    """All that an evaluation's results depend on, with hashes of the weights, the rows, the reward
    and the code that grades."""
    table: dict[str, Any] = json.loads(json.dumps(config.effective(recipe)))
    sections = ("model", "task", "engine", "validation", "rollout")
    kept = {f"{s}.{k}": v for s in sections for k, v in table.get(s, {}).items()}
    own = ("temperature", "top_p", "top_k", "truncated", "batch", "group_size", "max_errors")
    learning = {"validation.every", *(f"rollout.{name}" for name in own)}
    settings = {key: value for key, value in kept.items() if key not in learning}
    read = {f"hash of {name}": value for name, value in inputs.hashes(recipe).items()}
    return settings | {"seed": recipe.seed, "weights": _digest(recipe, show)} | read


def evaluation_path(recipe: Recipe, show: Show = silent) -> Path:
    """Where an evaluation goes by default: one place for the same settings, where it goes on."""
    settings = json.dumps(evaluation_settings(recipe, show))
    return Path("runs") / f"eval-{recipe.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def _digest(recipe: Recipe, show: Show) -> str | None:
    """A hash of the model that a recipe begins with; None for the sorting model, which its seed
    makes. Of a model from scratch the tokenizer is read, of a run its checkpoint as well."""
    if isinstance(recipe.model, SorterConfig):
        return None
    from burnish.model import hub

    origin = _origin(recipe)
    path = hub.resolve(_source(origin), show)
    show(Progress("load", f"hashing the files of {recipe.model.name}"))
    is_whole = origin is recipe and isinstance(origin.model, LanguageConfig)
    kinds = (".json", ".jinja", *[".safetensors"] * is_whole)
    files = sorted(file for file in path.glob("*") if file.suffix in kinds)
    if path.is_file():  # a GGUF
        files = [path]
    if origin is not recipe:  # its manifest holds the tensors' hash
        files.append(_chosen(Path(recipe.model.name), "best") / checkpoint.MANIFEST)
    return inputs.of_files(files)


def export(run_path: AnyPath, out: AnyPath, *, which: str = "best", show: Shown = None) -> Path:
    """Writes a run's model as a Hugging Face directory; returns the checkpoint it came from.

    ``which`` is "best" (by validation; the last where there was none), "last" or a checkpoint's
    name.
    """
    path, target = Path(run_path), Path(out)
    recipe = _resumed_recipe(path, ())
    if isinstance(recipe.model, SorterConfig):
        raise ConfigError("the sorting model is not a language model and can't be exported")
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{target} is not empty; choose another directory")
    chosen = _chosen(path, which)
    with shown(show, path.name) as tell:
        tell(Progress("load", "loading torch"))
        from burnish.model import checkpoint as models

        model, _, source = open_model(recipe, dtype="float32", show=tell)
        _take_weights(model, chosen)
        tell(Progress("export", f"writing {target}"))
        models.save(model, target, source=source)
    return chosen


def build(
    recipe: Recipe,
    *,
    prompts: Prompts = None,
    reward: Reward | str | None = None,
    show: Show = silent,
) -> Parts:
    """What a recipe's run is made of."""
    from burnish.learner.objective import compile
    from burnish.learner.policy import LanguagePolicy
    from burnish.loops import evaluate, sync
    from burnish.loops.run import Parts
    from burnish.rollout.packing import pack
    from burnish.rollout.rollout import is_aborted

    if recipe.is_supervised:
        return _build_supervised(recipe, prompts, show)
    task, generator, decode = build_sampler(recipe, prompts=prompts, reward=reward, show=show)
    policy: Policy
    if isinstance(recipe.model, SorterConfig):
        policy = _sorter(recipe)
    else:
        model = open_model(recipe, dtype="float32", show=show)[0].to(_device(recipe))
        check_lengths(recipe, _size(recipe, model, task))
        policy = LanguagePolicy(model, recompute=recipe.train.recompute, layers=recipe.train.layers)
    show(Progress("load", "preparing the learner"))
    learner = _learner(recipe, policy, compile(recipe.objective))

    def validate(show: Show, when: str) -> tuple[list[Group], Row]:
        groups, figures = evaluate.evaluate(recipe, task, generator, decode, show=show, when=when)
        whole = [g for g in groups[:DRIFT] if not any(map(is_aborted, g.completions))]
        if whole and recipe.train.log_kl and recipe.validation.temperature:  # greedy has no KL
            report = begin(show, "evaluate", f"measuring the KL {when}", unit="packs")
            figures |= learner.held_out_drift(pack(whole).to(learner.device), report)
        return groups, figures

    return Parts(
        recipe=recipe,
        learner=learner,
        train=lambda timers, start, show: sync.train(
            recipe,
            task=task,
            generator=generator,
            learner=learner,
            timers=timers,
            start=start,
            show=show,
        ),
        validate=validate,
        publish=lambda: generator.load(learner.weights()),
        decode=decode,
        close=task.close,
    )


def _build_supervised(recipe: Recipe, rows: Prompts, show: Show) -> Parts:
    from burnish.learner.policy import LanguagePolicy
    from burnish.loops import supervised
    from burnish.loops.run import Parts

    model, tokenizer, _ = open_model(recipe, dtype="float32", show=show)
    show(Progress("load", "reading the rows"))
    pairs = _pairs(recipe, tokenizer, model.config.context, rows)
    counted = config.with_steps(recipe, pairs.steps(recipe.train.batch))
    policy = LanguagePolicy(
        model.to(_device(recipe)), recompute=recipe.train.recompute, layers=recipe.train.layers
    )
    learner = _learner(counted, policy, supervised.PROGRAM)
    return Parts(
        recipe=counted,
        learner=learner,
        train=lambda timers, start, show: supervised.train(
            counted, pairs=pairs, learner=learner, timers=timers, start=start, show=show
        ),
        validate=lambda show, when: supervised.validate(pairs, learner, show=show, when=when),
        publish=lambda: None,  # nothing samples
        decode=lambda ids: [],
        close=lambda: None,
    )


def _pairs(recipe: Recipe, tokenizer: Tokenizer, context: int, rows: Prompts) -> Pairs:
    from burnish.tasks.pairs import make_pairs

    assert isinstance(recipe.task, PairsTask)
    longest = min(context, recipe.train.micro_tokens or context)
    return make_pairs(
        recipe.task, tokenizer=tokenizer, seed=recipe.seed, longest=longest, rows=rows
    )


def _learner(recipe: Recipe, policy: Policy, program: Program) -> Learner:
    from burnish.learner.learner import Learner

    train = recipe.train.model_copy(update={"decay_steps": recipe.decay_steps})
    return Learner(policy, program, train)


def build_sampler(
    recipe: Recipe,
    *,
    prompts: Prompts = None,
    reward: Reward | str | None = None,
    show: Show = silent,
) -> tuple[Task, Generator, Callable[[Any], list[str]]]:
    """A recipe's task and generator, and what turns token ids into a text each."""
    recipe = settled(recipe)
    if isinstance(recipe.task, SortTask):
        from burnish.engine.sorter import SorterEngine, spell
        from burnish.tasks.sorting import Sorting

        return Sorting(recipe.task, seed=recipe.seed), SorterEngine(_sorter(recipe)), spell
    from burnish.engine.generator import EngineGenerator
    from burnish.tasks.shots import FewShot

    engine, tokenizer = _engine(recipe, show)

    def decode(ids: Any) -> list[str]:
        return [tokenizer.token_bytes(int(i)).decode("utf-8", "replace") for i in ids]

    show(Progress("load", "reading the prompts"))
    size = measure(recipe, has_prompts=False)
    assert size is not None, "the model was loaded just now"
    bound = room(recipe, size)
    language = _language_task(recipe, tokenizer, prompts, reward, bound)
    if recipe.validation.shots:
        language = FewShot(language, recipe.validation.shots, tokenizer)
        longest = max((len(prompt.token_ids) for prompt in language.validation), default=0)
        if longest > bound.tokens:
            raise ConfigError(
                f"validation.shots = {recipe.validation.shots} makes a prompt of {longest} tokens, "
                f"and {bound.why} leaves {bound.tokens}; use fewer shots"
            )
    return language, EngineGenerator(engine), decode


def _engine(recipe: Recipe, show: Show) -> tuple[Engine, Tokenizer]:
    import torch

    dtype = DTYPES[recipe.engine.precision]
    if recipe.engine.name == "hf":
        from burnish.engine.hf import HFEngine
        from burnish.model import hub
        from burnish.model.tokenizer import Tokenizer

        path = hub.resolve(recipe.model.name, show)
        show(Progress("load", f"loading {recipe.model.name} with transformers"))
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"engine.name = 'hf' reads Hugging Face directories, {path} is none; "
                "`burnish export` makes one of a run"
            )
        return HFEngine.open(path, getattr(torch, dtype)), Tokenizer.load(path)
    from burnish.engine.engine import EngineConfig, NativeEngine

    device = _device(recipe)
    total, free = _memory(device)
    preflight.raise_all(preflight.lacking_cache(recipe, total if device == "cpu" else free))
    model, tokenizer, _ = open_model(recipe, dtype=dtype, show=show)
    settings = EngineConfig(
        kv_bytes=recipe.engine.kv_mb * 2**20,
        page_size=PAGE,
        max_running=recipe.engine.max_running,
        step_tokens=STEP_TOKENS[device.partition(":")[0]],
    )
    return NativeEngine(model.to(device), tokenizer, settings), tokenizer


def open_model(
    recipe: Recipe, *, dtype: str, show: Show = silent
) -> tuple[Transformer, Tokenizer, Path]:
    """The recipe's language model, its tokenizer, and where the tokenizer came from.

    A model's name may be a run's directory: then it is the run's best checkpoint.
    """
    import torch

    from burnish.model import checkpoint as models
    from burnish.model import hub
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import Transformer

    origin, precision = _origin(recipe), getattr(torch, dtype)
    path = hub.resolve(_source(origin), show)
    show(Progress("load", f"loading {recipe.model.name} in {dtype}"))
    tokenizer = Tokenizer.load(path)
    if isinstance(origin.model, LanguageConfig):
        model = models.load(path, dtype=precision, fp32_head=origin.model.fp32_head)
    else:
        model = Transformer(_scratch(origin, tokenizer)).init_weights(origin.seed).to(precision)
    if origin is not recipe:
        _take_weights(model, _chosen(Path(recipe.model.name), "best"))
    return model, tokenizer, path


def _origin(recipe: Recipe) -> Recipe:
    """The recipe that says what its model is: of the run, where the model is what a run learned."""
    origin = preflight.origin(recipe)
    if origin is recipe:
        return recipe
    if isinstance(origin.model, SorterConfig):
        raise ConfigError(
            f"{recipe.model.name} trained the sorting model, which is not a language model"
        )
    assert isinstance(recipe.model, LanguageConfig), "it names a run"
    head = {"fp32_head": recipe.model.fp32_head}
    return origin.model_copy(update={"model": origin.model.model_copy(update=head)})


def _take_weights(model: Transformer, chosen: Path) -> None:
    saved = checkpoint.load(chosen)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(saved.tensors[f"master.model.{name}"])


def measure(recipe: Recipe, *, has_prompts: bool = True) -> Size | None:
    """What a plan of a language model needs to know of it; None where it is not here yet.

    ``has_prompts`` is false if no prompts shall be looked at: rows may be missing then.
    """
    if isinstance(recipe.model, SorterConfig):
        return None
    recipe = settled(recipe)
    import torch

    from burnish.model.checkpoint import read_config
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import Transformer

    origin = _origin(recipe)
    path = _local(_source(origin))
    if path is None:
        return None
    if isinstance(origin.model, ScratchConfig):
        config = _scratch(origin, Tokenizer.load(path))
    elif path.suffix == ".gguf":
        from burnish.model.gguf import Gguf

        config = Gguf(path).config()
    else:
        config = read_config(path)
    with torch.device("meta"):
        model = Transformer(config)
    size = _size(recipe, model, None)
    if not has_prompts:
        return size
    tokenizer = Tokenizer.load(path)
    if isinstance(recipe.task, PairsTask):
        _pairs(recipe, tokenizer, size.context, None)  # which checks every row
        return size
    bound = room(recipe, size)
    task = _language_task(recipe, tokenizer, None, lambda response, row: 0.0, bound)  # none graded
    return _size(recipe, model, task)


def _size(recipe: Recipe, model: Transformer, task: Task | None) -> Size:
    """No task: the prompts are not known, or do not matter."""
    count, config = recipe.prompts_per_rollout * recipe.train.steps, model.config
    packed = recipe.engine.precision != "fp16" and _device(recipe) == "cpu"
    narrow = recipe.engine.precision == "bf16" and machine.multiplies("bf16", "cpu")
    prompts = []
    if task is not None:
        prompts = [*map(task.prompt, range(min(count, PROBED))), *task.validation]
    skipped = sum(prompt.meta.get("skipped", 0) for prompt in prompts)
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        cached=2 * config.n_layers * config.kv_heads * config.head_width,
        context=config.context,
        layers=config.n_layers,
        layer=sum(p.numel() for p in model.layers[0].parameters()),
        longest_prompt=max((len(prompt.token_ids) for prompt in prompts), default=0),
        copied=packed * (2 if narrow else 4),
        looked_at=len(prompts) + skipped,
        too_long=skipped + sum("cut" in prompt.meta for prompt in prompts),
    )


def _source(recipe: Recipe) -> str:
    """Whose files are read: the model's, or for one from scratch its tokenizer's."""
    kind = recipe.model
    return kind.tokenizer if isinstance(kind, ScratchConfig) else kind.name


def _scratch(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    from burnish.model.transformer import ModelConfig

    kind = recipe.model
    assert isinstance(kind, ScratchConfig)
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        n_layers=kind.layers,
        d_model=kind.width,
        n_heads=kind.heads,
        n_kv_heads=kind.kv_heads,
        d_ff=kind.d_ff,
        context=kind.context,
        fp32_head=kind.fp32_head,
    )


def _local(name: str) -> Path | None:
    """Where a model lies if it is here: a plan downloads nothing."""
    from burnish.model import hub

    if name in hub.PACKAGED:
        return next((hub.cache_directory() / "models").glob(f"{name}-*"), None)
    if not name.startswith("hf:"):
        return hub.resolve(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name.removeprefix("hf:"), local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _sorter(recipe: Recipe) -> Sorter:
    from burnish.model.sorter import Sorter

    size, model = recipe.task, recipe.model
    assert isinstance(size, SortTask)
    assert isinstance(model, SorterConfig)
    return Sorter(size.numbers, size.length, model.width, seed=recipe.seed)


def _language_task(
    recipe: Recipe,
    tokenizer: Tokenizer,
    prompts: Prompts,
    reward: Reward | str | None,
    room: Room,
) -> Any:
    """A recipe's task; ``room`` is for the longest prompt."""
    from burnish.tasks.files import make_files
    from burnish.tasks.gym import Gym
    from burnish.tasks.keywords import Keywords
    from burnish.tasks.math import make_math
    from burnish.tasks.mixture import Mixture

    def make(task: Any) -> Any:
        made: dict[str, Any] = {"tokenizer": tokenizer, "seed": recipe.seed, "room": room}
        if isinstance(task, FilesTask):
            return make_files(task, **made, prompts=prompts, reward=reward)
        kinds: dict[str, Any] = {"keywords": Keywords, "math": make_math, "gym": Gym}
        return kinds[task.name](task, **made)

    task = recipe.task
    if not isinstance(task, MixtureTask):
        return make(task)
    parts = {name: make(part) for name, part in task.tasks.items()}
    return Mixture(parts, task.weights, seed=recipe.seed)


def _prepare(recipe: Recipe, show: Show, threads: int | None = None) -> Recipe:
    """Sets torch up as bit-exactness needs it, before it touches a device; torch loads here.

    ``threads`` is None for one per core that this process may use. Returns the recipe as it will
    run here, with no precision left open.
    """
    show(Progress("load", "loading torch"))
    share_cores()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(threads or machine.cores())
    torch.use_deterministic_algorithms(True)
    # That also fills all fresh memory with NaN, to show who reads what was never written. Nobody
    # does (a test compares), and it is 5% or more of a gradient step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    preflight.raise_all(missing_device(recipe))
    chosen = settled(recipe)
    for precision in {chosen.engine.precision, chosen.train.precision} - {"fp32"}:
        if not machine.multiplies(precision, _device(chosen)):
            from burnish.model.products import cost

            factor = cost(getattr(torch, DTYPES[precision]))
            show(
                Progress(
                    "note",
                    f"note: this processor has no {precision} products, so one takes {factor:.1f} "
                    f"times as long as in fp32; precision = 'auto' takes fp32 here",
                )
            )
    return chosen


def settled(recipe: Recipe) -> Recipe:
    """The recipe as it would run on this machine: no precision is left open."""
    if isinstance(recipe.model, SorterConfig):
        return config.with_precision(recipe, "fp32")
    native = machine.multiplies("bf16", _device(recipe))
    return config.with_precision(recipe, "bf16" if native else "fp32")


def _check_room(recipe: Recipe, path: Path, show: Show) -> None:
    """Refuses a run whose model does not fit, once its files are here."""
    if isinstance(recipe.model, SorterConfig):
        return
    from burnish.model import hub

    hub.resolve(_source(_origin(recipe)), show)
    preflight.raise_all(lacking_room(recipe, path, measure(recipe, has_prompts=False)))


def lacking_room(recipe: Recipe, path: Path, size: Size | None) -> list[BurnishError]:
    """Too little disk or memory; ``size`` is None if the model is not here."""
    device = _device(recipe)
    total, free = _memory(device)
    kind = device.partition(":")[0]
    return [
        *preflight.lacking_disk(recipe, path, size),
        *preflight.lacking_memory(recipe, size, free, kind, total=total),
    ]


def _memory(device: str) -> tuple[int, int]:
    """Bytes of a device, in all and free."""
    if device == "cpu":
        return machine.memory()
    found = machine.describe(device)
    return found.gpu_memory, found.gpu_available


def look(recipe: Recipe, path: Path) -> tuple[Recipe, Size | None, list[BurnishError]]:
    """For a plan: the recipe as it would run here, its size, and what it lacks."""
    unknown = missing_device(recipe)
    lacks = [*preflight.before(recipe, path), *unknown]
    recipe = settled(recipe.model_copy(update={"device": "auto"}) if unknown else recipe)
    size = None
    if not preflight.missing_model(recipe):
        try:
            size = measure(recipe, has_prompts=not lacks)
        except BurnishError as error:
            lacks.append(error)
            size = measure(recipe, has_prompts=False)
    return recipe, size, [*lacks, *lacking_room(recipe, path, size)]


def missing_device(recipe: Recipe) -> list[BurnishError]:
    """A GPU that the recipe names and torch does not find."""
    import torch

    name, _, number = recipe.device.partition(":")
    known = torch.cuda.device_count()
    if name != "cuda" or int(number or 0) < known:
        return []
    found = f"finds cuda:0 to cuda:{known - 1} alone" if known else "finds no CUDA device"
    return [ConfigError(f"device = '{recipe.device}' but torch {found}; use 'auto'")]


def _device(recipe: Recipe) -> str:
    import torch

    if recipe.device != "auto":
        return recipe.device
    return "cuda" if torch.cuda.is_available() else "cpu"


FREE = ("train.steps", "validation.every", "checkpoint", "log", "name", "description")
"""What a resumed run may change: how long and how often, not what is computed."""


def _resumed_recipe(path: Path, overrides: Overrides) -> Recipe:
    file, changes = str(path / "recipe.toml"), config.tables(overrides)
    for key in config.flat(config.merge(*changes)):
        if not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise ConfigError(
                f"{key} can't change when a run is resumed: it alters what is computed; "
                f"{', '.join(FREE[:4])} can. Start a new run with `burnish train`"
            )
    before, after = config.load(file), config.load(file, changes)
    if after.train.steps < before.train.steps:
        raise ConfigError(
            f"train.steps can only grow when a run is resumed, from {before.train.steps}, "
            f"got {after.train.steps}"
        )
    if after.decay_steps == before.decay_steps or before.is_supervised:
        return after
    return config.load(file, [*changes, f"train.decay_steps={before.decay_steps}"])


def _environment_of(path: Path) -> dict[str, Any]:
    """What a run recorded of where it began."""
    try:
        found: dict[str, Any] = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path / ENVIRONMENT} can't be read: {error}") from error
    return found


def _check_reward(
    path: Path, recipe: Recipe, read: Mapping[str, str], reward: Reward | str | None
) -> None:
    """A run whose reward a script gave is given it again, and no other run is given one."""
    if "reward" in read and not callable(reward):
        name = read["reward"].partition(" ")[0]
        raise RunError(
            f"{path} got its reward from a script, as the function {name}; continue it from Python "
            f"with burnish.resume({str(path)!r}, reward={name})"
        )
    own = getattr(recipe.task, "reward", None)
    if "reward" not in read and reward not in (None, own):
        raise ConfigError(
            f"reward can't change when a run is resumed, and {path} has task.reward = {own!r}; "
            "leave it out, or start a new run with `burnish train`"
        )


def _check_environment(before: Table, now: Table, *, anyway: bool) -> None:
    """What bit-exactness depends on must be as it was; torch is loaded by now."""
    was, found = config.flat(before), config.flat(now)
    changed = [
        f"{key}: {was.get(key)} → {found.get(key)}"
        for key in {**was, **found}
        if was.get(key) != found.get(key)
    ]
    if changed and not anyway:
        raise RunError(
            f"the run began with something else ({'; '.join(changed)}), so it would not continue "
            "bit for bit; go back to that, or resume with --anyway"
        )


def _chosen(path: Path, which: str) -> Path:
    """A run's checkpoint: "best" (the last where none was validated), "last" or one by its name."""
    named = {
        "best": checkpoint.best(path) or checkpoint.latest(path),
        "last": checkpoint.latest(path),
    }
    chosen = named[which] if which in named else _choose(path, which)
    if chosen is None:
        raise RunError(f"{path} has no checkpoint yet; train on, or resume it")
    return chosen


def _choose(path: Path, name: str | None) -> Path | None:
    if name is None:
        return checkpoint.latest(path)
    found = {saved.name: saved for saved in checkpoint.all_of(path)}
    if name not in found:
        raise RunError(f"{path} has no checkpoint {name!r}; it has {', '.join(found) or 'none'}")
    return found[name]
