"""Recipes: pydantic models, TOML files that hold only settings that differ from the defaults, and
overrides.

``load`` is the one way from a recipe's name or file to a checked ``Recipe``. All problems of a
recipe are one ``ConfigError`` that says the rule, the value and the remedy. Between its file and
its model a recipe is a flat table of whole names, such as "train.steps".
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator

from burnish import pieces
from burnish.errors import ConfigError
from burnish.pieces import ObjectiveConfig
from burnish.sections import OWN, Section, as_table, named, nearest

RECIPES = Path(__file__).parent / "recipes"
CHOSEN = ("task", "model", *(f"objective.{kind}" for kind in pieces.KINDS))
"""Sections that a recipe chooses by name, out of several."""
DECAY = ["train.decay_steps", "train.final_rate"]
CUT = ["validation.top_p", "validation.top_k"]
LANGUAGE = [
    *("device", "engine", "train.recompute", "train.layers", "validation.shots"),
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop", "rollout.truncated"),
    *("rollout.top_p", "rollout.top_k", "validation.max_tokens", *CUT),
]
"""Settings that only a language model reads."""
SAMPLED = [
    *("rollout", "engine", "objective", "log.rollouts"),
    *("train.steps", "train.epochs", "train.log_kl"),
    *("validation.samples", "validation.temperature", "validation.max_tokens"),
    *("validation.shots", *CUT),
]
"""Settings that a supervised run does not read, since it samples nothing."""
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


LongPrompts = Literal["skip", "cut"]
"""A prompt that is too long is skipped, and another one asked, or cut to its end."""


class KeywordsTask(Section):
    """Write a sentence that includes the given words."""

    ordered: ClassVar[tuple[str, str] | None] = ("least", "most")
    name: Literal["keywords"] = "keywords"
    least: int = Field(2, ge=1, description="keywords per prompt, at least")
    most: int = Field(4, ge=1, le=20, description="keywords per prompt, at most")
    reward: Literal["inclusion", "use"] = "inclusion"
    """use: a word counts outside lists, and at most twice."""
    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    chat: bool = Field(True, description="the prompt goes in as a user's chat message")
    words: int | None = Field(None, ge=1, description="only so many words; None: all")
    validation_words: float = Field(0.2, ge=0, lt=1, description="share of words that is held out")
    validation_prompts: int = Field(256, ge=1)
    long_prompts: LongPrompts = "skip"


class Graded(Section):
    """Settings of tasks whose responses are graded by worker processes."""

    ordered: ClassVar[tuple[str, str] | None] = ("cpu_seconds", "wall_seconds")
    must_end: bool = Field(False, description="a response that does not end by itself earns 0")
    workers: int = Field(2, ge=1, description="grader processes")
    cpu_seconds: float = Field(2.0, gt=0, description="per grade, in the worker's own CPU time")
    wall_seconds: float = Field(20.0, gt=0, description="per grade")
    memory_mb: int = Field(1024, ge=1, description="per worker, beyond what the reward loads")


class Rows(Section):
    """Rows of a JSONL file, each with a prompt, some of them held out."""

    train: str | None = Field(None, description="a JSONL file; None: prompts come from a script")
    rows: list[dict[str, Any]] | None = Field(None, exclude=True)
    """Rows that a script gives in the place of ``train``; a run keeps them in a file of its own."""
    validation: str | None = Field(None, description="the same; None: rows of train are held out")
    validation_share: float | None = Field(None, ge=0, lt=1, description="of train; None: 0.1")
    chat: bool = Field(True, description="a prompt that is a text goes in as a user's chat message")


class FilesTask(Rows, Graded):
    """Rows with a reward of the user's own."""

    name: Literal["files"] = "files"
    reward: str | None = Field(None, description="FILE.py:NAME or a built-in name")
    function: Callable[..., Any] | None = Field(None, exclude=True)
    """A reward that a script gives in the place of ``reward``; no file keeps it."""


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
    """Settings of tasks that put a question into a prompt and read an answer from the response."""

    prompt: str = Field("r1_zero", description="its name, or one's own text with {question} in it")
    answer: Literal["r1_zero", "boxed", "hash", "last_number"] | None = None
    """How a response says its answer; None if as the named prompt wants it."""
    chat: bool = Field(False, description="the prompt goes in as a user's chat message")

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if "{question}" not in self.template:
            near, names = nearest(self.prompt, PROMPTS), " or ".join(PROMPTS)
            raise ValueError(
                f"needs prompt = {names} or a text with {{question}}, got {self.prompt!r}{near}"
            )
        if self.answer is None and self.prompt not in PROMPTS:
            raise ValueError("has a prompt of its own and needs answer: r1_zero, boxed, …")
        return self

    @property
    def template(self) -> str:
        return PROMPTS.get(self.prompt, self.prompt)

    @property
    def answer_format(self) -> str:
        return self.answer or ANSWERS[self.prompt]


class MathTask(Asked):
    """Questions with an answer that can be checked: GSM8K, MATH and data laid out like them."""

    name: Literal["math"] = "math"
    train: str = Field(description="a JSONL file, or hf:ORG/NAME/SPLIT, hf:ORG/NAME/CONFIG/SPLIT")
    validation: str | None = Field(None, description="the same; None: rows of train are held out")
    validation_rows: int | None = Field(None, ge=1)
    """How many rows are held out; None if all of validation, or a tenth of train."""
    drop_bad: bool = False
    """Rows without a usable answer, or in train and validation both, are left out."""
    hints: float = Field(0.0, ge=0, le=1)
    """Share of the training prompts that go on with the beginning of the row's worked answer."""


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
    """Several tasks; the task of each group is drawn by weight."""

    name: Literal["mixture"] = "mixture"
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    tasks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], AnyPart] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tasks.keys() != self.weights.keys():
            tasks, weights = ", ".join(self.tasks), ", ".join(self.weights)
            raise ValueError(f"needs a weight for each task, got tasks {tasks}, weights {weights}")
        return self


AnyTask = Annotated[
    SortTask | KeywordsTask | FilesTask | MathTask | GymTask | PairsTask | MixtureTask,
    Field(discriminator="name"),
    named("sort"),
]


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
    ordered: ClassVar[tuple[str, str] | None] = ("min_tokens", "max_tokens")
    batch: int = Field(30, ge=1, description="responses per rollout")
    group_size: int = Field(10, ge=1, description="responses per prompt")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_tokens: int = Field(48, ge=1, description="per response")
    min_tokens: int = Field(0, ge=0, description="no end before this many")
    stop: list[str] = Field([], description="texts that end a response")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    truncated: bool = Field(False, description="top_p or top_k is meant in training, too")
    max_errors: float = Field(0.1, ge=0, le=1, description="share of grades that may be errors")


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


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    steps: int = Field(100, ge=1, description="rollouts, each followed by its gradient steps")
    batch: int = Field(30, ge=1, description="responses per gradient step")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_sequences: int | None = Field(None, ge=1, description="responses per forward pass")
    micro_tokens: int | None = Field(None, ge=1, description="tokens per forward pass")
    precision: Precision = Field("auto", description="of the forward and backward passes")
    recompute: bool = Field(False, description="layers run again backwards, to save memory")
    layers: int | None = Field(None, ge=1, description="only the last so many learn; None: all")
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="gradient steps up to the full rate")
    decay_steps: int | None = Field(None, ge=1, description="gradient steps to the last rate")
    final_rate: float | None = Field(None, ge=0, le=1, description="last / full rate; None: 0")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="of matrices alone")
    clip_norm: float = Field(1.0, gt=0, description="of the gradient; inf: none")
    max_skipped: int = Field(3, ge=1, description="steps in a row that may fail: not finite")
    log_kl: bool = Field(False, description="KL to the initial model and the step before")
    log_kl_responses: int | None = Field(None, ge=1, description="on how many; None: all")


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

    @model_validator(mode="after")
    def _check(self) -> Self:
        task, model, rollout, train = self.task, self.model, self.rollout, self.train
        if isinstance(task, SortTask) != isinstance(model, SorterConfig):
            raise ValueError(
                f"task.name = '{task.name}' does not go with model.name = '{model.name}': the "
                "sorting task needs 'sorter', the others a language model such as 'smollm2-135m'"
            )
        if (rollout.top_p < 1 or rollout.top_k is not None) and not rollout.truncated:
            raise ValueError(
                "rollout.top_p and top_k cut off what the learner believes was possible; sample "
                "without them, or set rollout.truncated = true if it is meant"
            )
        if self.validation.shots and getattr(task, "chat", False):
            raise ValueError(
                f"validation.shots = {self.validation.shots} puts rows before a plain text, and "
                "task.chat = true makes it a chat; set task.chat = false"
            )
        if None not in (train.micro_sequences, train.micro_tokens):
            raise ValueError(
                "micro-batches are given in sequences or in tokens, got train.micro_sequences = "
                f"{train.micro_sequences} and train.micro_tokens = {train.micro_tokens}; remove one"
            )
        if not self.is_supervised:  # its steps are known with its rows, see with_steps
            self._check_batches()
            _check_decay(self)
        return self

    def _check_batches(self) -> None:
        group, advantage = self.rollout.group_size, self.objective.advantage
        for name, batch in (("rollout", self.rollout.batch), ("train", self.train.batch)):
            if batch % group:
                raise ValueError(
                    f"{name}.batch = {batch} is not a multiple of rollout.group_size = {group}: a "
                    f"batch holds whole groups; use {name}.batch = {batch // group * group + group}"
                )
        if self.rollout.batch % self.train.batch:
            prompts = self.prompts_per_rollout
            fits = [str(n * group) for n in range(1, prompts + 1) if prompts % n == 0]
            raise ValueError(
                f"train.batch = {self.train.batch} does not divide rollout.batch = "
                f"{self.rollout.batch}; use one of {', '.join(fits)}"
            )
        if group < advantage.group:
            raise ValueError(
                f"rollout.group_size must be at least 2 for objective.advantage = "
                f"'{advantage.name}', got {group}; use objective.advantage = 'raw'"
            )

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response: the recipe's, and the one that answer tags call for."""
        tagged = any(isinstance(t, Asked) and t.answer_format == "r1_zero" for t in self.tasks)
        return tuple(dict.fromkeys([*self.rollout.stop, *["</answer>"] * tagged]))

    @property
    def validation_stop(self) -> tuple[str, ...]:
        """Texts that end a response to a held-out prompt. After solved rows, a model would go on
        with another row, so the beginning of a row ends the response."""
        if not self.validation.shots:
            return self.stop
        begins = [getattr(t, "template", "").partition("{question}")[0] for t in self.tasks]
        return (*self.stop, *dict.fromkeys(f"\n\n{text.strip()}" for text in begins))

    @property
    def tasks(self) -> list[Any]:
        """The task, or the tasks of a mixture."""
        return list(self.task.tasks.values()) if isinstance(self.task, MixtureTask) else [self.task]

    @property
    def source(self) -> str:
        """The name of the model whose files are read: of a model from scratch its tokenizer's;
        empty for the sorting model."""
        if isinstance(self.model, ScratchConfig):
            return self.model.tokenizer
        return self.model.name if isinstance(self.model, LanguageConfig) else ""

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
        """None if the learning rate does not decay."""
        if self.train.schedule == "constant":
            return None
        return self.train.decay_steps or self.gradient_steps


def load(
    source: str | os.PathLike[str] | Table | Recipe,
    overrides: Overrides = (),
    *,
    seed: int | None = None,
) -> Recipe:
    """The recipe of a name, of a TOML file, of a table or as it is, with the overrides applied."""
    if isinstance(source, Recipe):
        objects = {key: getattr(source.task, key, None) for key in ("rows", "function")}
        given = flat(effective(source)) | {
            f"task.{key}": value for key, value in objects.items() if value is not None
        }
    elif isinstance(source, Mapping):
        given = flat(source)
    else:
        name = os.fspath(source)
        given = {"name": Path(name).stem} | flat(read_recipe(name))
    changes = changed(overrides)
    merged = _without_replaced(given, changes) | changes
    if seed is not None:
        merged["seed"] = seed
    before = _useless_alone(given)
    for key, reason in _useless(merged, _validate(merged)).items():
        if key in changes or key in before:
            raise ConfigError(f"{key} has no effect with {reason}; remove it")
        del merged[key]  # a setting of the recipe that an override deprived of its effect
    return _validate(merged)


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """The recipe with ``precision`` in the place of 'auto', as it is run and recorded.

    A sampler whose precision is open takes the learner's: a policy that samples in another one
    learns less. The sorting model has a few hundred weights and always learns in fp32.
    """
    if isinstance(recipe.model, SorterConfig):
        precision = "fp32"
    changes = {}
    for name in ("train", "engine"):
        section = getattr(recipe, name)
        precision = precision if section.precision == "auto" else section.precision
        changes[name] = section.model_copy(update={"precision": precision})
    return recipe.model_copy(update=changes)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """A supervised recipe, once the number of its rows says how many steps its epochs are."""
    train = recipe.train.model_copy(update={"steps": steps})
    counted = recipe.model_copy(update={"train": train})
    _check_decay(counted)
    return counted


def read_recipe(name: str) -> dict[str, Any]:
    """The TOML table of a recipe in the package, or of a file."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = list_recipes()
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name, known)}; `burnish recipes` lists "
            f"{', '.join(known)}, and a path that ends in .toml is read as a file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def list_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def changed(overrides: Overrides) -> dict[str, Any]:
    """The settings that overrides change, by their whole names."""
    if isinstance(overrides, str):
        raise ConfigError(
            "overrides must be a list of 'section.key=value' or a dict of settings, got the text "
            f"{overrides!r}; write overrides=[{overrides!r}]"
        )
    result: dict[str, Any] = {}
    for given in [overrides] if isinstance(overrides, Mapping) else overrides:
        result |= flat(parse_override(given) if isinstance(given, str) else given)
    return result


def parse_override(text: str) -> dict[str, Any]:
    """The setting of ``a.b=c``; its value is read as TOML, or else taken as a string."""
    key, separator, value = text.partition("=")
    if not separator or not all(key.strip().split(".")):
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        return {key.strip(): tomllib.loads(f"value = {value}")["value"]}
    except tomllib.TOMLDecodeError:
        return {key.strip(): value.strip()}


def flat(table: Table, prefix: str = "") -> dict[str, Any]:
    """The settings of nested tables by their whole names, "section.key".

    A path becomes its text, and a bare name that chooses a section becomes the section's name.
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        value = as_table(value) if path in CHOSEN else value
        result |= flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return result


def nested(settings: Table) -> dict[str, Any]:
    """The tables of settings with whole names; the inverse of ``flat``."""
    result: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")
        table = result
        for section in sections:
            if not isinstance(table.get(section), dict):
                table[section] = {}
            table = table[section]
        table[key] = value
    return result


def unused(recipe: Recipe) -> dict[str, str]:
    """Settings and sections that have no effect in this recipe, each with the reason."""
    train, objective = recipe.train, recipe.objective
    no_ratio = "ratio" not in objective.loss.reads
    loss = f"objective.loss = '{objective.loss.name}'"
    rules = [
        (train.schedule == "constant", "train.schedule = 'constant'", DECAY),
        (not train.log_kl, "train.log_kl = false", ["train.log_kl_responses"]),
        (recipe.is_supervised, "task.name = 'pairs'", SAMPLED),
        (recipe.validation.temperature == 0, "validation.temperature = 0", CUT),
        (getattr(recipe.task, "validation", None), "task.validation", ["task.validation_share"]),
        (isinstance(recipe.model, SorterConfig), "model.name = 'sorter'", LANGUAGE),
        (no_ratio, loss, ["objective.ratio"]),
        (no_ratio and not objective.reads_proximal_first, loss, ["objective.proximal"]),
    ]
    return {key: reason for holds, reason, keys in rules if holds for key in keys}


def effective(recipe: Recipe) -> dict[str, Any]:
    """The tables of a recipe, without settings that have no effect."""
    settings = flat(recipe.model_dump())
    useless = _useless(settings, recipe)
    return nested({key: value for key, value in settings.items() if key not in useless})


def to_toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of scalars, lists of scalars and sub-tables as TOML; None is left out."""
    lines = [f"{k} = {_toml(v)}" for k, v in table.items() if not isinstance(v, dict | None)]
    for name, section in table.items():
        if isinstance(section, dict):
            path = f"{prefix}{name}"
            lines += ["", f"[{path}]", to_toml(section, f"{path}.").rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False, default=pieces.name_of)
    return text.replace("\x7f", "\\u007f")


def _validate(settings: Table) -> Recipe:
    try:
        return Recipe.model_validate(nested(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(map(_explain, error.errors()))) from None


def _explain(problem: Any) -> str:
    """A problem that pydantic found, with the setting's whole name."""
    where, chosen = _place(problem["loc"])
    kind, told = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        known = [name for name in problem["ctx"]["expected_tags"].split("'")[1::2] if name != OWN]
        name = problem["ctx"]["tag"]
        return f"{where}.name must be {' or '.join(known)}, got {name!r}{nearest(name, known)}"
    if kind == "missing":
        return f"{where} is missing: {chosen!r} needs it; set it, as --set {where}=VALUE does"
    if kind == "value_error":  # a check in this package, which says the value itself
        return f"{where} {told}".strip()
    if kind != "extra_forbidden":
        return f"{where} {told.replace('Input should be', 'must be')}, got {problem['input']!r}"
    keys = list(_keys(Recipe))
    if where in keys:
        section = where.rpartition(".")[0]
        return f"{where} has no effect with {section} = {chosen!r}; remove it"
    sections = ", ".join(key for key in keys if "." not in key)
    return f"unknown setting {where!r}{nearest(where, keys) or f'; a recipe has {sections}'}"


def _place(loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """The setting that a problem is in, and the name of the section that was chosen there."""
    path, chosen, is_name = "", None, False
    for part in map(str, loc):
        if is_name:
            chosen, is_name = part, False
            continue
        path = f"{path}.{part}" if path else part
        is_name = path in CHOSEN or (path.startswith("task.tasks.") and path.count(".") == 2)
    return path, chosen


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


def _without_replaced(given: Table, changes: Table) -> dict[str, Any]:
    """A recipe's settings without those of each task, model or piece that changes replace."""
    kept = dict(given)
    for path in CHOSEN:
        before, now = given.get(f"{path}.name"), changes.get(f"{path}.name")
        is_language = path == "model" and not {before, now} & {None, "sorter", "scratch"}
        if now not in (None, before) and not is_language:
            kept = {key: kept[key] for key in kept if not key.startswith(f"{path}.")}
    return kept


def _useless(settings: Table, recipe: Recipe) -> dict[str, str]:
    """Those of the settings that have no effect in the recipe, and the reason."""
    return {
        key: reason
        for key in settings
        for part, reason in unused(recipe).items()
        if key == part or key.startswith(f"{part}.")
    }


def _useless_alone(given: Table) -> dict[str, str]:
    """The useless settings of a recipe before any change; none if it needs changes to be valid."""
    try:
        return _useless(given, _validate(given))
    except ConfigError:
        return {}


def _check_decay(recipe: Recipe) -> None:
    train = recipe.train
    if recipe.decay_steps is not None and recipe.decay_steps <= train.warmup_steps:
        raise ConfigError(
            f"train.schedule = '{train.schedule}' needs train.decay_steps (by default all gradient "
            f"steps) above warmup_steps = {train.warmup_steps}, got {recipe.decay_steps}"
        )
