"""A recipe becomes the parts of a run: task, engine, model and learner, on a device."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import config, inputs, machine, preflight
from burnish.config import (
    FilesTask,
    LanguageConfig,
    MixtureTask,
    Overrides,
    PairsTask,
    Recipe,
    ScratchConfig,
    SorterConfig,
    SortTask,
    Table,
)
from burnish.errors import BurnishError, ConfigError
from burnish.plan import PAGE, Need, Room, Size, needs, room
from burnish.progress import Progress, Show, begin, silent
from burnish.runs import checkpoints
from burnish.runs.directory import PROMPTS
from burnish.threads import share_cores

if TYPE_CHECKING:
    from burnish.engine.protocol import Engine
    from burnish.learner.learner import Learner
    from burnish.learner.objective import Program
    from burnish.learner.optim import Policy
    from burnish.loops.recorder import Parts
    from burnish.model.sorter import Sorter
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import ModelConfig, Transformer
    from burnish.runs.metrics import Metrics
    from burnish.tasks.pairs import Pairs
    from burnish.tasks.task import Task
    from burnish.types import Group

AnyPath = str | os.PathLike[str]
AnyRecipe = AnyPath | Table | Recipe
"""A name that ``burnish recipes`` lists, a TOML file, a table of settings, or a ``Recipe``."""
Reward = Callable[[str, Mapping[str, Any]], Any]
Prompts = Iterable[str | Mapping[str, Any]] | None
DRIFT = 128
"""Held-out prompts on whose responses the KL to the initial model is measured."""
STEP_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens that the engine runs at once, by device."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PROBED = 1000
"""Training prompts that are looked at for the longest; all rows of a file are looked at before."""


def build(
    recipe: Recipe,
    *,
    prompts: Prompts = None,
    reward: Reward | str | None = None,
    show: Show = silent,
) -> Parts:
    """The parts of a recipe's run."""
    from burnish.engine.protocol import require
    from burnish.learner.objective import compile
    from burnish.loops import sync
    from burnish.loops.evaluate import Evaluator, figures
    from burnish.loops.recorder import Parts
    from burnish.rollout.packing import pack
    from burnish.rollout.rollout import is_aborted
    from burnish.tasks.stream import PromptStream

    if recipe.is_supervised:
        return _build_supervised(recipe, prompts, show)
    task, engine, decode = build_sampler(recipe, prompts=prompts, reward=reward, show=show)
    require(engine.capabilities, repeats=True)  # a resumed run draws the same
    policy: Policy
    if isinstance(recipe.model, SorterConfig):
        policy, stream = _sorter(recipe), PromptStream(task)
    else:
        model = open_model(recipe, dtype="float32", show=show)[0].to(device_of(recipe))
        stream = PromptStream(task, room(recipe, _size(recipe, model, None)))
        policy = model.learn(recipe.train.layers, recompute=recipe.train.recompute)
    show(Progress("load", "preparing the learner"))
    learner = _learner(recipe, policy, compile(recipe.objective))
    evaluator = Evaluator(recipe, task, engine, decode)

    def validate(show: Show, when: str) -> tuple[list[Group], Metrics]:
        groups = [group for part in evaluator.answered(show=show, when=when) for group in part]
        found = figures(evaluator.rows(groups))
        whole = [g for g in groups[:DRIFT] if not any(map(is_aborted, g.completions))]
        if whole and recipe.train.log_kl and recipe.validation.temperature:  # greedy has no KL
            report = begin(show, "evaluate", f"measuring the KL {when}", unit="packs")
            found |= learner.held_out_drift(pack(whole).to(learner.device), report)
        return groups, found

    return Parts(
        recipe=recipe,
        learner=learner,
        prompts=stream,
        train=lambda timers, start, show: sync.train(
            recipe,
            prompts=stream,
            task=task,
            engine=engine,
            learner=learner,
            timers=timers,
            start=start,
            show=show,
        ),
        validate=validate,
        publish=lambda: engine.load(learner.weights()),
        decode=decode,
        close=task.close,
    )


def _build_supervised(recipe: Recipe, rows: Prompts, show: Show) -> Parts:
    from burnish.loops import supervised
    from burnish.loops.recorder import Parts

    model, tokenizer, _ = open_model(recipe, dtype="float32", show=show)
    show(Progress("load", "reading the rows"))
    pairs = _pairs(recipe, tokenizer, model.config.context, rows)
    counted = config.with_steps(recipe, pairs.steps(recipe.train.batch))
    model.to(device_of(recipe)).learn(recipe.train.layers, recompute=recipe.train.recompute)
    learner = _learner(counted, model, supervised.PROGRAM)
    return Parts(
        recipe=counted,
        learner=learner,
        prompts=None,
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
) -> tuple[Task, Engine, Callable[[Any], list[str]]]:
    """A recipe's task and engine, and a function that turns token ids into a text each."""
    recipe = settled(recipe)
    if isinstance(recipe.task, SortTask):
        from burnish.engine.sorter import SorterEngine, spell
        from burnish.tasks.sorting import Sorting

        return Sorting(recipe.task, seed=recipe.seed), SorterEngine(_sorter(recipe)), spell
    from burnish.tasks.text import few_shot

    engine, tokenizer = _engine(recipe, show)

    def decode(ids: Any) -> list[str]:
        return [tokenizer.decode([i]) for i in ids]

    show(Progress("load", "reading the prompts"))
    size = measure(recipe, has_prompts=False)
    assert size is not None, "the model was loaded just now"
    bound = room(recipe, size)
    language = _language_task(recipe, tokenizer, prompts, reward, bound)
    if recipe.validation.shots:
        language.validation = few_shot(language, recipe.validation.shots, tokenizer)
        longest = max((len(prompt.token_ids) for prompt in language.validation), default=0)
        if longest > bound.tokens:
            raise ConfigError(
                f"validation.shots = {recipe.validation.shots} makes a prompt of {longest} tokens, "
                f"and {bound.why} leaves {bound.tokens}; use fewer shots"
            )
    return language, engine, decode


def _engine(recipe: Recipe, show: Show) -> tuple[Engine, Tokenizer]:
    from burnish.engine.engine import EngineSettings, NativeEngine

    device = device_of(recipe)
    total, free = machine.memory(device)
    cache = Need("cache", f"engine.kv_mb = {recipe.engine.kv_mb}", recipe.engine.kv_mb * 2**20)
    room = {"cache": total if device == "cpu" else free}
    preflight.raise_all(preflight.lacking([cache], room))
    dtype = DTYPES[recipe.engine.precision]
    model, tokenizer, _ = open_model(recipe, dtype=dtype, show=show)
    settings = EngineSettings(
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

    origin, precision = preflight.origin(recipe), getattr(torch, dtype)
    path = hub.resolve(origin.source, show)
    show(Progress("load", f"loading {recipe.model.name} in {dtype}"))
    tokenizer = Tokenizer.load(path)
    if isinstance(origin.model, LanguageConfig):
        model = models.load(path, dtype=precision, fp32_head=origin.model.fp32_head)
    else:
        model = Transformer(_scratch(origin, tokenizer)).init_weights(origin.seed).to(precision)
    if origin is not recipe:
        take_weights(model, checkpoints.choose(Path(recipe.model.name), "best"))
    return model, tokenizer, path


def take_weights(model: Transformer, chosen: Path) -> None:
    saved = checkpoints.load(chosen)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(saved.tensors[f"policy.master.{name}"])


def measure(recipe: Recipe, *, has_prompts: bool = True) -> Size | None:
    """The size of a recipe's language model; None if its files are not here yet.

    ``has_prompts`` is false if no prompts shall be looked at: rows may be missing then.
    """
    if isinstance(recipe.model, SorterConfig):
        return None
    recipe = settled(recipe)
    import torch

    from burnish.model.checkpoint import read_config
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import Transformer

    origin = preflight.origin(recipe)
    path = _local(origin.source)
    if path is None:
        return None
    if isinstance(origin.model, ScratchConfig):
        config = _scratch(origin, Tokenizer.load(path))
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
    """``task`` is None if no prompts are looked at."""
    count, config = recipe.prompts_per_rollout * recipe.train.steps, model.config
    packed = recipe.engine.precision != "fp16" and device_of(recipe) == "cpu"
    narrow = recipe.engine.precision == "bf16" and machine.multiplies("bf16", "cpu")
    size = Size(
        parameters=sum(p.numel() for p in model.parameters()),
        cached=2 * config.n_layers * config.kv_heads * config.head_width,
        context=config.context,
        layers=config.n_layers,
        layer=sum(p.numel() for p in model.layers[0].parameters()),
        longest_prompt=0,
        copied=packed * (2 if narrow else 4),
    )
    if task is None:
        return size
    from burnish.tasks.stream import PromptStream

    stream = PromptStream(task, room(recipe, size))
    asked = [prompt for _, prompt in stream.take(min(count, PROBED))]
    return size._replace(
        longest_prompt=max(len(prompt.token_ids) for prompt in (*asked, *task.validation)),
        looked_at=len(asked) + stream.skipped,
        too_long=stream.skipped,
    )


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
    """The path of a model's files; None if they are not here, since a plan downloads nothing."""
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
    from burnish.tasks.gym import make_gym
    from burnish.tasks.keywords import make_keywords
    from burnish.tasks.math import make_math
    from burnish.tasks.mixture import Mixture
    from burnish.tasks.stream import fits

    def make(task: Any) -> Any:
        made: dict[str, Any] = {"tokenizer": tokenizer, "seed": recipe.seed, "room": room}
        if isinstance(task, FilesTask):
            return make_files(task, **made, prompts=prompts, reward=reward)
        kinds: dict[str, Any] = {"keywords": make_keywords, "math": make_math, "gym": make_gym}
        return kinds[task.name](task, **made)

    if isinstance(recipe.task, MixtureTask):
        parts = {name: make(part) for name, part in recipe.task.tasks.items()}
        made = Mixture(parts, recipe.task.weights, seed=recipe.seed)
    else:
        made = make(recipe.task)
    made.validation = [prompt for prompt in made.validation if fits(prompt, room)]
    return made


def prepare(recipe: Recipe, show: Show, threads: int | None = None) -> Recipe:
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
        if not machine.multiplies(precision, device_of(chosen)):
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
    native = machine.multiplies("bf16", device_of(recipe))
    return config.with_precision(recipe, "bf16" if native else "fp32")


def check_room(recipe: Recipe, path: Path, show: Show) -> None:
    """Refuses a run whose model does not fit, once its files are here."""
    if isinstance(recipe.model, SorterConfig):
        return
    from burnish.model import hub

    hub.resolve(preflight.origin(recipe).source, show)
    size = measure(recipe, has_prompts=False)
    preflight.raise_all(lacking_room(recipe, path, size))
    if size is not None and not recipe.is_supervised:
        room(recipe, size)  # it raises if there is none


def lacking_room(recipe: Recipe, path: Path, size: Size | None) -> list[BurnishError]:
    """Too little disk or memory; ``size`` is None if the model is not here."""
    if size is None:
        return []
    device, found = device_of(recipe), needs(recipe, size)
    total, free = machine.memory(device)
    if device != "cpu":  # all of the cache is taken at once
        found = [n._replace(resource="memory") if n.resource == "cache" else n for n in found]
    saved = sum(file.stat().st_size for file in (path / "checkpoints").rglob("*"))
    room = {"memory": free, "cache": total, "disk": machine.disk(path) + saved}
    return preflight.lacking(found, room)


def look(
    recipe: Recipe, path: Path, *, has_prompts: bool = True
) -> tuple[Recipe, Size | None, list[BurnishError]]:
    """The recipe as it would run here, its size, and its problems: for a plan."""
    unknown = missing_device(recipe)
    lacks = [*preflight.problems(recipe, path), *unknown]
    recipe = settled(recipe.model_copy(update={"device": "auto"}) if unknown else recipe)
    size = None
    if not preflight.missing_model(recipe):
        try:
            size = measure(recipe, has_prompts=has_prompts and not lacks)
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


def device_of(recipe: Recipe) -> str:
    import torch

    if recipe.device != "auto":
        return recipe.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def digest(recipe: Recipe, show: Show) -> str | None:
    """A hash of the model that a recipe begins with; None for the sorting model, which its seed
    makes. Of a model from scratch the tokenizer is read, of a run its checkpoint as well."""
    if isinstance(recipe.model, SorterConfig):
        return None
    from burnish.model import hub

    origin = preflight.origin(recipe)
    path = hub.resolve(origin.source, show)
    show(Progress("load", f"hashing the files of {recipe.model.name}"))
    is_whole = origin is recipe and isinstance(origin.model, LanguageConfig)
    kinds = (".json", ".jinja", *[".safetensors"] * is_whole)
    files = sorted(file for file in path.glob("*") if file.suffix in kinds)
    if origin is not recipe:
        files.append(checkpoints.choose(Path(recipe.model.name), "best"))
    return inputs.of_files(files)


def open_engine(
    model: AnyPath, *, dtype: str = "auto", device: str = "auto", show: Show = silent
) -> tuple[Engine, Tokenizer]:
    """The native engine on a model by name, path or run."""
    precisions = {"auto": "auto"} | {name: short for short, name in DTYPES.items()}
    if dtype not in precisions:
        raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    engine, named = {"precision": precisions[dtype]}, {"name": os.fspath(model)}
    recipe = config.load({"task": "keywords", "model": named, "engine": engine, "device": device})
    preflight.check(recipe)
    return _engine(prepare(recipe, show), show)


def load_recipe(
    source: AnyRecipe, changes: Sequence[str | Table], *, seed: int | None = None
) -> Recipe:
    """The recipe with changes; one that is loaded already and is not changed stays as it is."""
    if isinstance(source, Recipe):
        if not any(changes) and seed is None:
            return source
        source = config.effective(source)
    return config.load(source, changes, seed=seed)


def evaluation_recipe(
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
    if model is not None:
        own.append({"model": model})
    recipe = load_recipe(source, [*own, config.changed(overrides)], seed=seed)
    if recipe.is_supervised:
        raise ConfigError(
            f"{recipe.name} has answers to learn and none to grade; name another --task"
        )
    return recipe


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
    return settings | {"seed": recipe.seed, "weights": digest(recipe, show)} | read


def evaluation_path(recipe: Recipe, show: Show = silent) -> Path:
    """Where an evaluation goes by default: one place for the same settings, where it goes on."""
    settings = json.dumps(evaluation_settings(recipe, show))
    return Path("runs") / f"eval-{recipe.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
