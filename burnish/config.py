"""Recipes: pydantic models, TOML files that hold only what differs from the defaults, overrides.

``load`` is the one way from a recipe's name or file to a checked ``Recipe``. Whatever is wrong with
it is one ``ConfigError`` that says the rule, the value and the remedy.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from burnish import pieces
from burnish.errors import ConfigError
from burnish.pieces import ObjectiveConfig
from burnish.sections import OWN, Section, as_table, named, nearest

RECIPES = Path(__file__).parent / "recipes"
CHOSEN = ("task", "model", *(f"objective.{kind}" for kind in pieces.KINDS))
"""Sections that a recipe chooses by name, out of several."""
MOVED = {
    f"objective.{old}": f"objective.{new}"
    for old, new in {
        "advantage_eps": "advantage.eps",
        "centered": "advantage.centered",
        "gamma": "advantage.gamma",
        "clip_low": "loss.low",
        "clip_high": "loss.high",
        "dual_clip": "loss.dual",
        "cispo_cap": "loss.cap",
        "cispo_floor": "loss.floor",
        "constant_length": "reduction.length",
        "kl_coefficient": "kl.coefficient",
        "kl_in": "kl.where",
        "kl_refresh": "kl.refresh",
        "importance_level": "importance.level",
        "importance_low": "importance.low",
        "importance_high": "importance.high",
    }.items()
}
"""Settings that had another name."""
Table = Mapping[str, Any]
"""Settings as nested dicts."""
Overrides = Sequence[str | Table] | Table
"""Changes to a recipe: "section.key=value" texts and tables, or one table."""


Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""auto: bf16 where the processor or GPU multiplies it, else fp32."""


class SortTask(Section):
    """Sort the numbers of the prompt; partial credit."""

    name: Literal["sort"] = "sort"
    prompts: int = Field(3, ge=1, description="how many prompts there are")
    length: int = Field(3, ge=2, description="numbers per prompt")
    numbers: int = Field(5, ge=2, description="the numbers are 0 … numbers − 1")
    reward: Literal["inclusion_ordering", "position_match"] = "inclusion_ordering"


LongPrompts = Annotated[
    Literal["skip", "cut"],
    Field(description="what becomes of a prompt that is too long: another is asked, or its end is"),
]


class KeywordsTask(Section):
    """Write a sentence that includes the given words."""

    name: Literal["keywords"] = "keywords"
    least: int = Field(2, ge=1, description="keywords per prompt, at least")
    most: int = Field(4, ge=1, le=20, description="keywords per prompt, at most")
    match: Literal["word", "substring"] = "word"
    reward: Literal["inclusion", "use"] = Field(
        "inclusion", description="use: a word counts outside lists, and at most twice"
    )
    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    chat: bool = Field(True, description="the prompt goes in as a user's chat message")
    words: int | None = Field(None, ge=1, description="so many words of the list; none: all")
    validation_words: float = Field(
        0.2, ge=0, lt=1, description="share of the words held out; 0: other sets of the same words"
    )
    validation_prompts: int = Field(256, ge=1)
    long_prompts: LongPrompts = "skip"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"needs least at or below most, got {self.least} and {self.most}")
        return self


class Graded(Section):
    """What tasks share whose responses are graded by workers."""

    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    workers: int = Field(2, ge=1, description="grader processes")
    cpu_seconds: float = Field(2.0, gt=0, description="per grade, in the worker's own CPU time")
    wall_seconds: float = Field(20.0, gt=0, description="per grade")
    memory_mb: int = Field(1024, ge=1, description="per worker, beyond what the reward loads")
    characters: int = Field(100_000, ge=1, description="a longer response is unparsed, reward 0")

    @model_validator(mode="after")
    def _check_seconds(self) -> Self:
        if self.wall_seconds < self.cpu_seconds:
            raise ValueError("needs wall_seconds at or above cpu_seconds")
        return self


class Rows(Section):
    """Rows of a JSONL file, each with a prompt, some of them held out."""

    train: str | None = Field(None, description="a JSONL file; None: prompts come from a script")
    validation: str | None = Field(
        None, description="a JSONL file; None: rows of train are held out"
    )
    validation_share: float | None = Field(
        None, ge=0, lt=1, description="of train's rows, chosen by the seed; None: 0.1"
    )
    chat: bool = Field(True, description="a prompt that is a text goes in as a user's chat message")

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.validation is not None and self.validation_share is not None:
            raise ValueError(
                "has validation, so validation_share has no effect; remove one of them"
            )
        return self


class FilesTask(Rows, Graded):
    """Rows with a reward of the user's own."""

    name: Literal["files"] = "files"
    reward: str | None = Field(None, description="FILE.py:NAME or a built-in name")


R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\nUser: {question}\nAssistant: <think>"
)
PROMPTS = {"question_only": "{question}", "r1_zero": R1_ZERO}
ANSWERS = {"question_only": "boxed", "r1_zero": "r1_zero"}
"""How a response to each of the prompts says its answer."""


class Asked(Graded):
    """What tasks share that put a question into a prompt and take an answer from the response."""

    prompt: str = Field("r1_zero", description="its name, or one's own text with {question} in it")
    answer: Literal["r1_zero", "boxed", "hash", "last_number"] | None = Field(
        None, description="how a response says its answer; None: as the named prompt wants it"
    )
    chat: bool = Field(False, description="the prompt goes in as a user's chat message")

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        own = "{question}" in self.prompt
        if not own and self.prompt not in PROMPTS:
            names, near = " or ".join(PROMPTS), nearest(self.prompt, PROMPTS)
            raise ValueError(
                f"needs prompt = {names} or a text with {{question}}, got {self.prompt!r}{near}"
            )
        if own and self.answer is None:
            raise ValueError("has a prompt of its own and needs answer: r1_zero, boxed, …")
        return self

    @property
    def template(self) -> str:
        return PROMPTS.get(self.prompt, self.prompt)

    @property
    def answer_format(self) -> str:
        return self.answer or ANSWERS[self.prompt]


class MathTask(Asked):
    """Questions with an answer that can be checked: GSM8K, MATH and what is laid out like them."""

    name: Literal["math"] = "math"
    train: str = Field(description="a JSONL file, or hf:ORG/NAME/SPLIT, hf:ORG/NAME/CONFIG/SPLIT")
    validation: str | None = Field(None, description="the same; None: rows of train are held out")
    validation_rows: int | None = Field(
        None, ge=1, description="how many; None: all of validation, or a tenth of train"
    )
    drop_bad: bool = Field(
        False,
        description="leave out rows without a usable answer, or in train and validation both",
    )
    hints: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the training prompts that go on with the beginning of the row's "
        "worked answer",
    )


class GymTask(Asked):
    """A generator of the package reasoning-gym, with its own scorer."""

    name: Literal["gym"] = "gym"
    generator: str = Field(description="its name there: chain_sum, countdown, gsm_symbolic, …")
    settings: dict[str, Any] = Field({}, description="what its own configuration takes")
    validation_prompts: int = Field(256, ge=1, description="held out, the same for every seed")
    long_prompts: LongPrompts = "skip"


class PairsTask(Rows):
    """Rows with a prompt (or GSM8K's question) and an answer to learn: a supervised run."""

    name: Literal["pairs"] = "pairs"
    epochs: float = Field(1.0, gt=0, allow_inf_nan=False, description="passes over the rows")
    prompt: str = Field("{prompt}", pattern=r"\{prompt\}", description="how a row's text is asked")
    answer: str = Field("{answer}", pattern=r"\{answer\}", description="what is learned of it")


AnyPart = Annotated[
    KeywordsTask | FilesTask | MathTask | GymTask, Field(discriminator="name"), named("keywords")
]


class MixtureTask(Section):
    """Several tasks; each group's is drawn by weight."""

    name: Literal["mixture"] = "mixture"
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    tasks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], AnyPart]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.tasks) < 2 or self.tasks.keys() != self.weights.keys():
            names = [", ".join(part) or "none" for part in (self.tasks, self.weights)]
            raise ValueError(
                "needs two tasks or more and a weight for each, got tasks "
                f"{names[0]} and weights {names[1]}"
            )
        return self


AnyTask = Annotated[
    SortTask | KeywordsTask | FilesTask | MathTask | GymTask | PairsTask | MixtureTask,
    Field(discriminator="name"),
    named("sort"),
]
TASKS = ("sort", "keywords", "files", "math", "gym", "pairs", "mixture")


class SorterConfig(Section):
    """The non-autoregressive sorting model."""

    name: Literal["sorter"] = "sorter"
    width: int = Field(10, ge=1, description="embedding dimension")


class ScratchConfig(Section):
    """A transformer of one's own, with random weights from the seed."""

    name: Literal["scratch"] = "scratch"
    tokenizer: str = Field("smollm2-135m", description="a model whose tokenizer it takes")
    layers: int = Field(4, ge=1)
    width: int = Field(512, ge=1, description="d_model")
    heads: int = Field(16, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="none: as many as heads")
    d_ff: int = Field(1344, ge=1)
    context: int = Field(256, ge=2)
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")


class LanguageConfig(Section):
    """A pretrained language model."""

    name: str = Field("smollm2-135m", description="a name, a directory, or hf:ORG/NAME")
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")


def _model_kind(model: Any) -> str:
    name = model.get("name", "sorter") if isinstance(model, Mapping) else getattr(model, "name", "")
    return name if name in ("sorter", "scratch") else "language"


AnyModel = Annotated[
    Annotated[SorterConfig, Tag("sorter")]
    | Annotated[ScratchConfig, Tag("scratch")]
    | Annotated[LanguageConfig, Tag("language")],
    Discriminator(_model_kind),
]


class RolloutConfig(Section):
    batch: int = Field(30, ge=1, description="responses per rollout")
    group_size: int = Field(10, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(48, ge=1, description="per response")
    min_tokens: int = Field(0, ge=0, description="no end before this many")
    stop: list[str] = Field([], description="texts that end a response")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    truncated: bool = Field(False, description="train on samples cut by top_p or top_k: meant")
    max_errors: float = Field(
        0.1, ge=0, le=1, description="share of grades that may be errors before the run halts"
    )


class EngineConfig(Section):
    """The sampler; the learner's precision is ``train.precision``."""

    precision: Precision = Field("auto", description="auto: as train.precision")
    kv_mb: int = Field(1024, ge=1, description="memory for keys and values")
    max_running: int = Field(128, ge=1, description="samples that decode at once")


class ValidationConfig(Section):
    """Held-out prompts, always with the same draws."""

    every: int = Field(10, ge=1, description="steps; also before the first and after the last")
    samples: int = Field(1, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1, description="none: as in training")
    shots: int = Field(0, ge=0, description="solved training rows put before each prompt")


class CheckpointConfig(Section):
    every: int = Field(10, ge=1, description="steps; also after the last")
    keep: int = Field(2, ge=1, description="the last so many are kept, and the best")


class LogConfig(Section):
    rollouts: int = Field(16, ge=0, description="responses per step that are kept whole")
    tensorboard: bool | None = Field(None, description="events; none: if TensorBoard is installed")


class TrainConfig(Section):
    steps: int = Field(100, ge=1, description="rollouts, each followed by its gradient steps")
    batch: int = Field(30, ge=1, description="responses per gradient step")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_sequences: int | None = Field(None, ge=1, description="responses per forward pass")
    micro_tokens: int | None = Field(None, ge=1, description="tokens per forward pass")
    precision: Precision = Field("auto", description="of the forward and backward passes")
    recompute: bool = Field(False, description="layers run again in the backward pass: memory")
    layers: int | None = Field(
        None, ge=1, description="only the last so many layers and the final norm learn; None: all"
    )
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="gradient steps up to the full rate")
    decay_steps: int | None = Field(
        None, ge=1, description="gradient steps down to the last rate; none: all of the run's"
    )
    final_rate: float | None = Field(None, ge=0, le=1, description="last / full rate; none: 0")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="of matrices alone")
    clip_norm: float = Field(1.0, gt=0, description="of the gradient; inf: none")
    max_skipped: int = Field(3, ge=1, description="steps in a row that may be not finite")
    log_kl: bool = Field(False, description="KL to the initial model and the step before")
    log_kl_responses: int | None = Field(
        None, ge=1, description="on how many, where it takes a pass of its own; none: all"
    )

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"must be two numbers of at least 0 and below 1, got {list(betas)}")
        return betas


class Recipe(Section):
    name: str = Field("run", pattern=r"^[\w.-]+$", description="what its runs are called")
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    task: AnyTask = SortTask()
    model: AnyModel = SorterConfig()
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response: the recipe's, and the one that answer tags call for."""
        tagged = any(isinstance(t, Asked) and t.answer_format == "r1_zero" for t in self.tasks)
        return tuple(dict.fromkeys([*self.rollout.stop, *["</answer>"] * tagged]))

    @property
    def validation_stop(self) -> tuple[str, ...]:
        """The same of held-out prompts; after solved rows, a model would go on with another one."""
        if not self.validation.shots:
            return self.stop
        begins = [getattr(t, "template", "").partition("{question}")[0] for t in self.tasks]
        return (*self.stop, *dict.fromkeys(f"\n\n{text.strip()}" for text in begins))

    @property
    def tasks(self) -> list[Any]:
        """The task, or the tasks of a mixture."""
        return list(self.task.tasks.values()) if isinstance(self.task, MixtureTask) else [self.task]

    @property
    def prompts_per_rollout(self) -> int:
        return self.rollout.batch // self.rollout.group_size

    @property
    def train_batches(self) -> int:
        """How many train batches a rollout makes."""
        return self.rollout.batch // self.train.batch

    @property
    def gradient_steps_per_rollout(self) -> int:
        return self.train_batches * self.train.epochs

    @property
    def gradient_steps(self) -> int:
        if self.is_supervised:
            return self.train.steps
        return self.train.steps * self.gradient_steps_per_rollout

    @property
    def is_supervised(self) -> bool:
        """Whether a run learns from written answers, so that nothing is sampled or graded."""
        return isinstance(self.task, PairsTask)

    @property
    def decay_steps(self) -> int | None:
        """None: the learning rate does not decay."""
        if self.train.schedule == "constant":
            return None
        return self.train.decay_steps or self.gradient_steps


def load(
    source: str | os.PathLike[str] | Table, overrides: Overrides = (), *, seed: int | None = None
) -> Recipe:
    """The recipe of a name, of a TOML file or of a table, with the overrides applied."""
    if isinstance(source, Mapping):
        name, given = "from a table", nested(source)
    else:
        name = os.fspath(source)
        given = merge({"name": Path(name).stem}, nested(read_recipe(name)))
    recipe = _validate(given)
    _refuse_without_effect(recipe, given, f"recipe {name}")
    changes = merge({}, *tables(overrides))
    if seed is not None:
        changes = merge(changes, {"seed": seed})
    merged = merge(_without_replaced(given, recipe, changes), changes)
    recipe = _validate(merged)
    _refuse_without_effect(recipe, changes, "--set")
    # A setting of the recipe that an override deprived of its effect goes.
    recipe = _validate(effective(recipe, merged))
    _check_kinds(recipe)
    if not recipe.is_supervised:  # its steps are known with its rows, see with_steps
        _check_batches(recipe)
        _check_train(recipe)
    _check_group(recipe)
    return recipe


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with ``precision`` in the place of 'auto', as it is run and recorded.

    A sampler whose precision is open takes the learner's: a policy that samples in another one
    learns less. The sorting model has a few hundred weights and always learns in fp32.
    """
    if isinstance(recipe.model, SorterConfig):
        precision = "fp32"
    changed = {}
    for name in ("train", "engine"):
        section = getattr(recipe, name)
        if section.precision == "auto":
            changed[name] = section.model_copy(update={"precision": precision})
        else:
            precision = section.precision
    return recipe.model_copy(update=changed)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """A supervised recipe, once the number of its rows says how many steps its epochs are."""
    train = recipe.train.model_copy(update={"steps": steps})
    counted = recipe.model_copy(update={"train": train})
    _check_train(counted)
    return counted


def read_recipe(name: str) -> dict[str, Any]:
    """The TOML table of a recipe in the package, or of a file."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if name.endswith(".toml") and not path.is_file():
        raise ConfigError(f"there is no file {name}; `burnish recipes` lists recipes by name")
    if not path.is_file():
        known = list_recipes()
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, known)}; `burnish recipes` lists "
            f"{', '.join(known)}, and a path that ends in .toml is read as a file"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def list_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def parse_override(text: str) -> dict[str, Any]:
    """``a.b=c`` as a nested table; the value is read as TOML, or else taken as a string."""
    key, separator, value = text.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(parts):
        parsed = {part: parsed}
    table: dict[str, Any] = parsed
    return table


def tables(overrides: Overrides) -> list[dict[str, Any]]:
    """Every override as a nested table."""
    if isinstance(overrides, str):
        raise ConfigError(
            "overrides must be a list of 'section.key=value' or a dict of settings, got the text "
            f"{overrides!r}; write overrides=[{overrides!r}]"
        )
    given = [overrides] if isinstance(overrides, Mapping) else overrides
    return [nested(parse_override(o) if isinstance(o, str) else o) for o in given]


def nested(table: Table) -> dict[str, Any]:
    """A table as plain dicts: "a.b" as a key is b in a, a path is its text, and a bare name is the
    table that it is short for."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        below: Any = _plain(value)
        for part in reversed(str(key).split(".")):
            below = {part: below}
        result = merge(result, below)
    for section, name in (path.rpartition(".")[::2] for path in CHOSEN):
        holder = result.get(section) if section else result
        if isinstance(holder, dict) and name in holder:
            holder[name] = as_table(holder[name])
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def flat(table: Table, prefix: str = "") -> dict[str, Any]:
    """The settings of a nested table by their whole names, "section.key"."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def merge(*layers: Table) -> dict[str, Any]:
    """Nested tables laid over each other, the last on top."""
    result: dict[str, Any] = {}
    for table in layers:
        for key, value in table.items():
            below = result.get(key)
            if isinstance(below, dict) and isinstance(value, dict):
                value = merge(below, value)
            result[key] = value
    return result


def together(options: Sequence[str], overrides: Overrides) -> list[str | Table]:
    """What options of a command set and what --set does; an error where both set the same."""
    given = {option.partition("=")[0]: option for option in options}
    changes = tables(overrides)
    for key, value in flat(merge(*changes)).items():
        if option := given.get(key):
            raise ConfigError(
                f"{option} (by an option) and --set {key}={value}: give one of the two"
            )
    return [*options, *changes]


def unused(recipe: Recipe) -> dict[str, str]:
    """Settings, or whole sections, that have no effect in this recipe, and the words for why."""
    reasons = {f"objective.{key}": why for key, why in recipe.objective.unused.items()}
    if recipe.train.schedule == "constant":
        for key in ("train.decay_steps", "train.final_rate"):
            reasons[key] = "train.schedule = 'constant'; remove it, or use 'linear' or 'cosine'"
    if not recipe.train.log_kl:
        reasons["train.log_kl_responses"] = "train.log_kl = false; remove it"
    if recipe.is_supervised:
        keys = ["rollout", "engine", "objective", "log.rollouts"]
        keys += [f"train.{name}" for name in ("steps", "epochs", "log_kl")]
        names = ("samples", "temperature", "top_p", "top_k", "max_tokens", "shots")
        keys += [f"validation.{name}" for name in names]
        for key in keys:
            reasons[key] = "task.name = 'pairs'; remove it (task.epochs is how long it learns)"
    elif recipe.validation.temperature == 0:
        for key in ("validation.top_p", "validation.top_k"):
            reasons[key] = "validation.temperature = 0 is greedy; remove it"
    if isinstance(recipe.model, SorterConfig):
        language = ("max_tokens", "min_tokens", "stop", "top_p", "top_k", "truncated")
        keys = [
            "device",
            "engine",
            "train.recompute",
            "train.layers",
            *(f"rollout.{name}" for name in language),
        ]
        keys += [f"validation.{name}" for name in ("top_p", "top_k", "max_tokens", "shots")]
        for key in keys:
            reasons[key] = "model.name = 'sorter'; remove it, or use a language model"
    return reasons


def effective(recipe: Recipe, table: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The recipe (or the part of ``table``) without settings that have no effect."""
    full: Mapping[str, Any] = recipe.model_dump() if table is None else table
    without = unused(recipe)

    def kept(prefix: str, part: Mapping[str, Any]) -> dict[str, Any]:
        left = {key: value for key, value in part.items() if f"{prefix}{key}" not in without}
        return {
            key: kept(f"{prefix}{key}.", value) if isinstance(value, Mapping) else value
            for key, value in left.items()
        }

    return kept("", full)


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of scalars, lists of scalars and sub-tables as TOML; None is left out."""
    lines = [f"{k} = {_toml(v)}" for k, v in table.items() if not isinstance(v, dict | None)]
    for name, section in table.items():
        if isinstance(section, dict):
            path = f"{prefix}{name}"
            lines += ["", f"[{path}]", to_toml(section, f"{path}.").rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if callable(value):  # a script's own piece
        return json.dumps(getattr(value, "__name__", type(value).__name__))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def _validate(table: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _explain(problem: Any) -> str:
    where, tag = _place(problem["loc"])
    kind, given = problem["type"], problem["input"]
    if kind == "union_tag_invalid":
        known = [name for name in problem["ctx"]["expected_tags"].split("'")[1::2] if name != OWN]
        name = problem["ctx"]["tag"]
        setting = where if where.startswith("objective.") else f"{where}.name"
        return f"{setting} must be {' or '.join(known)}, got {name!r}{nearest(name, known)}"
    if kind == "extra_forbidden":
        return _explain_unknown(where, tag)
    if kind == "missing":
        return f"{where} is missing: {tag!r} needs it; set it, as --set {where}=VALUE does"
    if kind == "value_error":  # a check in this package, which says the value itself
        return f"{where} {problem['msg'].removeprefix('Value error, ')}"
    return f"{where} {problem['msg'].replace('Input should be', 'must be')}, got {given!r}"


def _place(loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """The setting that a problem is in, and the name of the section that was chosen there."""
    path, tag, is_tag = "", None, False
    for part in map(str, loc):
        if is_tag:
            tag, is_tag = part, False
            continue
        path = f"{path}.{part}" if path else part
        is_tag = path in CHOSEN or (path.startswith("task.tasks.") and path.count(".") == 2)
    return path, tag


def _explain_unknown(where: str, tag: str | None) -> str:
    section, _, setting = where.rpartition(".")
    if where in MOVED:
        return f"{where} is called {MOVED[where]} now; write that"
    kind = section.removeprefix("objective.")
    if kind in pieces.KINDS and (users := pieces.names(kind, setting)):
        return (
            f"{where} has no effect with {section} = {tag!r}; remove it, or use {section} = "
            f"{' or '.join(map(repr, users))}"
        )
    keys = [key for key in _keys(Recipe) if key != where]  # which another task may have
    by_name = [key for key in keys if key.rpartition(".")[2] == setting and key.count(".") < 2]
    hint = f"; did you mean {by_name[0]!r}?" if by_name else nearest(where, keys)
    sections = ", ".join(key for key in keys if "." not in key)
    return f"unknown setting {where!r}{hint or f'; a recipe has {sections}'}"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in _sections(field.annotation):
            yield from _keys(kind, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that an annotation names, one or those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _sections(part)


def _without_replaced(given: Table, recipe: Recipe, changes: Table) -> dict[str, Any]:
    """A recipe's table without the settings of each task, model or piece that changes replace."""
    result = merge(given)
    for path in CHOSEN:
        section, _, name = path.rpartition(".")
        asked = _lookup(changes, path)
        if not isinstance(asked, Mapping) or "name" not in asked:
            continue
        holder = result.get(section, {}) if section else result
        current = getattr(recipe.objective if section else recipe, name)
        known = get_args(type(current).model_fields["name"].annotation)
        is_same = asked["name"] in known if known else _model_kind(asked) == "language"
        if not is_same:
            holder.pop(name, None)
    return result


def _lookup(table: Any, path: str) -> Any:
    """The value of the setting "section.key"; None if there is none."""
    for name in path.split("."):
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _refuse_without_effect(recipe: Recipe, table: Mapping[str, Any], where: str) -> None:
    for key, reason in unused(recipe).items():
        if _lookup(table, key) is not None:
            raise ConfigError(f"{key} ({where}) has no effect with {reason}")


def _check_batches(recipe: Recipe) -> None:
    group = recipe.rollout.group_size
    _check_divides("rollout.batch", recipe.rollout.batch, "rollout.group_size", group)
    _check_divides("train.batch", recipe.train.batch, "rollout.group_size", group)
    if recipe.rollout.batch % recipe.train.batch:
        prompts = recipe.prompts_per_rollout
        fits = [n * group for n in range(1, prompts + 1) if prompts % n == 0]
        raise ConfigError(
            f"train.batch = {recipe.train.batch} does not divide rollout.batch = "
            f"{recipe.rollout.batch}; use one of {', '.join(map(str, fits))}"
        )


def _check_divides(name: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        below = value // divisor * divisor
        choices = [str(n) for n in (below, below + divisor) if n]
        raise ConfigError(
            f"{name} = {value} is not a multiple of {by} = {divisor}: a batch holds whole groups; "
            f"use {name} = {' or '.join(choices)}"
        )


def _check_kinds(recipe: Recipe) -> None:
    task, model, rollout = recipe.task, recipe.model, recipe.rollout
    if isinstance(task, SortTask) != isinstance(model, SorterConfig):
        raise ConfigError(
            f"task.name = '{task.name}' does not go with model.name = '{model.name}': the sorting "
            "task needs 'sorter', the others a language model such as 'smollm2-135m'"
        )
    if (rollout.top_p < 1 or rollout.top_k is not None) and not rollout.truncated:
        raise ConfigError(
            "rollout.top_p and top_k cut off what the learner believes was possible; sample "
            "without them, or set rollout.truncated = true if it is meant"
        )
    if recipe.validation.shots and getattr(task, "chat", False):
        raise ConfigError(
            f"validation.shots = {recipe.validation.shots} puts rows before a plain text, and "
            "task.chat = true makes it a chat; set task.chat = false"
        )
    if rollout.min_tokens > rollout.max_tokens:
        raise ConfigError(
            f"rollout.min_tokens = {rollout.min_tokens} is above max_tokens = {rollout.max_tokens}"
        )


def _check_train(recipe: Recipe) -> None:
    train = recipe.train
    if train.micro_sequences is not None and train.micro_tokens is not None:
        raise ConfigError(
            "micro-batches are given in sequences or in tokens, got train.micro_sequences = "
            f"{train.micro_sequences} and train.micro_tokens = {train.micro_tokens}; remove one"
        )
    if recipe.decay_steps is not None and recipe.decay_steps <= train.warmup_steps:
        raise ConfigError(
            f"train.schedule = '{train.schedule}' needs train.decay_steps (by default all gradient "
            f"steps) above warmup_steps = {train.warmup_steps}, got {recipe.decay_steps}"
        )


def _check_group(recipe: Recipe) -> None:
    advantage, group = recipe.objective.advantage, recipe.rollout.group_size
    if group < advantage.group:
        raise ConfigError(
            f"rollout.group_size must be at least 2 for objective.advantage = '{advantage.name}', "
            f"got {group}; use objective.advantage = 'raw'"
        )
