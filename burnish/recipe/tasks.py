"""The sections of a recipe's tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.recipe.base import BY_NAME, Section, named
from burnish.recipe.judge import EvolveConfig, JudgeConfig, Rubric


class SortTask(Section):
    """Sort the numbers of the prompt, with partial credit."""

    name: Literal["sort"] = "sort"
    prompts: int = Field(3, ge=1, description="number of prompts")
    length: int = Field(3, ge=2, description="numbers per prompt")
    numbers: int = Field(5, ge=2, description="the numbers are 0 … numbers − 1")
    reward: Literal["inclusion_ordering", "position_match"] = Field(
        "inclusion_ordering",
        description="points for each number that appears and each ordered pair, or for each "
        "number in its position",
    )


LongPrompts = Annotated[
    Literal["skip", "cut"],
    Field(
        description="skip: a prompt that is too long is replaced by another; cut: its beginning "
        "is cut off"
    ),
]


class KeywordsTask(Section):
    """Write a sentence that includes the given words."""

    ordered: ClassVar[tuple[str, str] | None] = ("least", "most")
    name: Literal["keywords"] = "keywords"
    least: int = Field(2, ge=1, description="keywords per prompt, at least")
    most: int = Field(4, ge=1, le=20, description="keywords per prompt, at most")
    reward: Literal["inclusion", "use"] = Field(
        "inclusion",
        description="inclusion: all words appear; use: a word counts only outside of lists, and "
        "at most twice",
    )
    must_end: bool = Field(False, description="whether a response without an end token gets 0")
    chat: bool = Field(True, description="whether the prompt is formatted as a chat message")
    words: int | None = Field(None, ge=1, description="number of words to use; None: all")
    validation_words: float = Field(0.2, ge=0, lt=1, description="share of held-out words")
    train_prompts: int | None = Field(None, ge=1, description="number of prompts; None: unlimited")
    validation_prompts: int = Field(
        256, ge=1, description="number of held-out prompts, the same for every seed"
    )
    long_prompts: LongPrompts = "skip"


class GradedTask(Section):
    """Base class of tasks whose responses are graded in worker processes."""

    must_end: bool = Field(False, description="whether a response without an end token gets 0")
    workers: int = Field(2, ge=1, description="grader processes")
    cpu_seconds: float = Field(2.0, gt=0, description="CPU time limit per grade")
    wall_seconds: float = Field(20.0, gt=0, description="wall time limit per grade")
    memory_mb: int = Field(
        1024, ge=1, description="memory limit per worker, beyond what its reward loads"
    )


class RowsTask(Section):
    """Base class of tasks with rows of data, of which some are held out."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Fields that task.columns can't set, because the task sets them or prefers another field: for
    each of them, the field to name instead."""
    train: str | None = Field(
        None,
        description="rows: a JSONL, Parquet, Arrow or CSV file, a pattern, a directory, or "
        "hf:ORG/NAME[/CONFIG][:SPLIT]; None: rows come from a script",
    )
    rows: list[dict[str, Any]] | None = Field(
        None,
        exclude=True,
        description="rows that a script passes instead of train; the run stores them in a file",
    )
    validation: str | None = Field(
        None, description="held-out rows, named like train; None: rows of train are held out"
    )
    validation_rows: int | None = Field(
        None,
        ge=0,
        description="number of held-out rows; 0: the run has no validation; None: all rows of "
        "validation, or a tenth of the different prompts of train, at most 1000 if train is not "
        "JSONL",
    )
    columns: dict[Annotated[str, Field(pattern=r"^\w+$")], str] = Field(
        {}, description='names of columns by field, such as { prompt = "question" }'
    )
    system: str | None = Field(
        None, min_length=1, description="system message before each prompt; None: no message"
    )

    @property
    def is_validated(self) -> bool:
        """Whether a run is validated on rows of this task."""
        return self.validation_rows != 0

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for field in self.columns.keys() & self.renamed.keys():
            raise ValueError(
                f"reads another field than {field!r}, so columns.{field} has no effect; use "
                f"columns.{self.renamed[field]} = {self.columns[field]!r}"
            )
        return self


class PromptsTask(RowsTask):
    """Base class of tasks whose rows have prompts, texts or chat messages."""

    chat: bool = Field(True, description="whether a text is formatted as a chat message")
    special_tokens: Literal["text", "control"] = Field(
        "text",
        description="special tokens such as <|im_end|> in the texts of rows: plain text, or, with "
        "chat = false, control tokens; choose control if a chat template has written the texts",
    )

    @model_validator(mode="after")
    def _check_special(self) -> Self:
        if self.special_tokens == "control" and self.chat:
            raise ValueError(
                "special_tokens = 'control' is for texts that are used unchanged; set chat = "
                "false, or leave special_tokens at 'text'"
            )
        return self


class WeightedReward(Section):
    """One of several rewards of a task."""

    reward: str | None = Field(None, description="FILE.py:NAME or a built-in name")
    function: Callable[..., Any] | None = Field(
        None,
        exclude=True,
        description="function that a script passes instead of reward; it is not saved",
    )
    weight: float = Field(
        1.0, allow_inf_nan=False, description="factor in the sum; 0: only a metric"
    )
    name: str = Field("", description="name of its metric; by default that of the function")

    @model_validator(mode="before")
    @classmethod
    def _name(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("name") is not None:
            return given
        own = (given.get("reward") or "").rpartition(":")[2]
        return {**given, "name": own or getattr(given.get("function"), "__name__", "")}

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if not self.name.isidentifier():
            raise ValueError(
                f"needs a name of letters, digits and _, got {self.name!r}; set its name, as in "
                "{reward = …, name = 'short'}"
            )
        if self.name in TAKEN:
            raise ValueError(f"has the name {self.name!r}, which burnish uses; give it another")
        if self.reward == "none":
            raise ValueError("has reward = 'none', which has no effect in a sum; remove it")
        return self


TAKEN = ("ended", "greedy", "learned", "length", "task")
"""Names of parts of grades that burnish adds."""


class FilesTask(PromptsTask, GradedTask):
    """Rows of a file, graded by the user's own reward or a built-in one."""

    name: Literal["files"] = "files"
    reward: str | None = Field(None, description="FILE.py:NAME or a built-in name")
    function: Callable[..., Any] | None = Field(
        None,
        exclude=True,
        description="function that a script passes instead of reward; it is not saved",
    )
    rewards: list[WeightedReward] | None = Field(
        None, min_length=1, description="several rewards, whose weighted sum is the reward"
    )

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.rewards is None:
            return self
        if self.reward is not None or self.function is not None:
            raise ValueError("has both reward and rewards; remove one of them")
        names = [one.name for one in self.rewards]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"has two rewards with the name {min(twice)!r}; give each of them its own name, as "
                "in [[task.rewards]] with reward, weight and name"
            )
        if not any(one.weight for one in self.rewards):
            raise ValueError("needs rewards with a weight other than 0, got only 0; raise one")
        return self


R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think> <answer> answer here </answer>.\nUser: {question}\nAssistant: <think>"
)
PROMPTS = {"question_only": "{question}", "r1_zero": R1_ZERO}


class QuestionTask(GradedTask):
    """Base class of tasks that insert a question into a prompt template and extract the answer
    from the response."""

    prompt: str = Field(
        "r1_zero",
        pattern=r"^r1_zero$|^question_only$|\{question\}",
        description="r1_zero, question_only, or a text that contains {question}",
    )
    answer: Literal["r1_zero", "boxed", "hash", "last_number"] | None = Field(
        None,
        description="format of the answer; None: in tags with the prompt r1_zero, else in a box",
    )
    chat: bool = Field(False, description="whether the prompt is formatted as a chat message")

    @property
    def template(self) -> str:
        """The prompt's text, which contains {question}."""
        return PROMPTS.get(self.prompt, self.prompt)

    @property
    def answer_format(self) -> str:
        """The format of answers, resolved if ``answer`` is None: a key of `EXTRACTORS`."""
        return self.answer or ("r1_zero" if self.prompt == "r1_zero" else "boxed")


class MathTask(QuestionTask, RowsTask):
    """Questions with verifiable answers: GSM8K, MATH and data in the same layout."""

    renamed: ClassVar[Mapping[str, str]] = {
        "prompt": "question",
        "problem": "question",
        "expected_answer": "answer",
    }
    name: Literal["math"] = "math"
    hints: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of training prompts extended by the beginning of the worked answer",
    )

    @model_validator(mode="after")
    def _check_system(self) -> Self:
        if self.system is not None and not self.chat:
            raise ValueError(
                "has a system message, but chat = false makes every prompt plain text; set chat = "
                "true, or remove system"
            )
        return self


class GymTask(QuestionTask):
    """A generator of the package reasoning-gym, graded by its scorer."""

    name: Literal["gym"] = "gym"
    generator: str = Field(description="generator of questions, such as chain_sum or gsm_symbolic")
    settings: dict[str, Any] = Field({}, description="settings of the generator")
    train_prompts: int | None = Field(None, ge=1, description="number of prompts; None: unlimited")
    validation_prompts: int = Field(
        256, ge=1, description="number of held-out prompts, the same for every seed"
    )
    long_prompts: LongPrompts = "skip"


class JudgedTask(PromptsTask):
    """Rows whose responses are scored by a judge, criterion by criterion."""

    name: Literal["judged"] = "judged"
    rubric: Rubric | None = Field(None, description="rubric of rows without a rubric")
    judge: JudgeConfig = Field(description="the language model that scores responses")
    evolve: EvolveConfig | None = Field(
        None, description="proposals of criteria; None: the rubric is fixed"
    )
    must_end: bool = Field(
        False, description="whether a response without an end token gets at most 0"
    )


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ToolName = Annotated[str, Field(pattern=r"^(calculator|python|search:.+|.+\.py:\w+)$")]


class EnvironmentTask(RowsTask):
    """Multi-turn episodes with an environment, tools or both."""

    name: Literal["environment"] = "environment"
    environment: str | None = Field(
        None,
        pattern=r"^guess$|^.+\.py:\w+$",
        description="FILE.py:NAME of a class with reset and step, or guess; None: rows have "
        "prompts, and an episode ends with the first message that calls no tool",
    )
    tools: list[ToolName] = Field(
        [],
        description="tools that the model may call: FILE.py:NAME of a function, calculator, python "
        "or search:FOLDER",
    )
    tool_format: Literal["hermes", "llama", "plain"] | None = Field(
        None, description="how the model writes calls; None: as its chat template does"
    )
    tool_seconds: float = Field(5.0, gt=0, description="wall time limit per call of a tool")
    sandbox: Literal["on", "off"] = Field(
        "on",
        description="whether programs of the tool python are isolated; off: they have the network "
        "and your files",
    )
    reward: str | None = Field(
        None,
        description="FILE.py:NAME or a built-in name of a reward for the last message, for "
        "environments that give no reward ('none' if only a reward model grades); None: they give "
        "rewards",
    )
    judge: JudgeConfig | None = Field(
        None,
        description="language model that grades the last message by a rubric, for environments "
        "that give no reward; None: no judge",
    )
    rubric: Rubric | None = Field(None, description="rubric of rows without a rubric")
    evolve: EvolveConfig | None = Field(
        None, description="proposals of criteria by the judge; None: the rubric is fixed"
    )
    turns: int = Field(16, ge=1, description="turns after which an episode is truncated")
    turn_tokens: int | None = Field(
        None, ge=1, description="maximum length of a turn; None: only that of the response"
    )
    turn_temperatures: list[Positive] | None = Field(
        None,
        min_length=1,
        description="temperatures of the first, second, … turn in training, of which the last one "
        "holds for all further turns; None: rollout.temperature",
    )
    observation_tokens: int | None = Field(
        1024, ge=1, description="length at which a message of the environment is cut; None: never"
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="wall time of all calls of an episode after which it is truncated; None: only "
        "that of each call",
    )
    pace: Literal["lockstep", "free"] = Field(
        "lockstep",
        description="episodes wait for each other after each turn, so that runs repeat bit for bit "
        "(lockstep), or environments step while other episodes' turns are sampled (free)",
    )
    live: int = Field(
        256, ge=1, description="episodes that an engine runs at once, each in a process of its own"
    )
    cpu_seconds: float = Field(2.0, gt=0, description="CPU time limit per call")
    wall_seconds: float = Field(20.0, gt=0, description="wall time limit per call")
    memory_mb: int = Field(
        1024, ge=1, description="memory limit per environment, beyond what its file loads"
    )

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        if self.environment is None and not self.tools:
            raise ValueError(
                "needs an environment or tools; set task.environment = 'FILE.py:NAME', or "
                "task.tools = ['calculator']"
            )
        if self.environment is None and self.reward is None and self.judge is None:
            raise ValueError(
                "needs a reward for the last message, because no environment gives one; set "
                "task.reward = 'FILE.py:NAME' or, with a reward model, task.reward = 'none'"
            )
        given = self.turn_temperatures or []
        if len(given) > self.turns:
            raise ValueError(
                f"has {len(given)} turn_temperatures, and an episode has at most turns = "
                f"{self.turns}; remove the last {len(given) - self.turns}, or set task.turns = "
                f"{len(given)}"
            )
        if self.reward is not None and self.judge is not None:
            raise ValueError(
                "has a reward and a judge, and both grade the last message; leave task.reward or "
                "task.judge out"
            )
        if self.judge is None and (self.rubric or self.evolve):
            raise ValueError("has a rubric and no judge; set task.judge, or leave the rubric out")
        return self


class AgentsTask(RowsTask):
    """Base class of tasks whose episodes are runs of an agent, which calls the policy through an
    OpenAI-compatible server."""

    name: str
    tool_format: Literal["hermes", "llama", "plain"] | None = Field(
        None, description="how the model writes calls; None: as its chat template does"
    )
    turns: int = Field(
        64, ge=1, description="requests after which an episode is truncated; each has an answer"
    )
    turn_tokens: int | None = Field(
        None, ge=1, description="maximum length of an answer; None: only that of the responses"
    )
    pace: Literal["lockstep", "free"] = Field(
        "lockstep",
        description="requests wait until every episode has one, so that runs repeat bit for bit "
        "(lockstep), or are answered as they arrive (free)",
    )
    live: int = Field(
        64, ge=1, description="episodes that an engine runs at once, each in a process of its own"
    )
    cpu_seconds: float = Field(60.0, gt=0, description="CPU time limit per episode")
    wall_seconds: float = Field(
        300.0, gt=0, description="wall time limit per episode, without the time of the policy"
    )
    memory_mb: int = Field(
        1024, ge=1, description="memory limit per episode, beyond what the agent's file loads"
    )


class AgentTask(AgentsTask):
    """Runs of your own agent, a function that calls the policy through an OpenAI client."""

    name: Literal["agent"] = "agent"
    agent: str = Field(
        pattern=r"^.+\.py:\w+$",
        description="FILE.py:NAME of a function: async def run(client, row) -> reward",
    )


class VerifiersTask(AgentsTask):
    """Tasks of a taskset of the package verifiers, played by the taskset's harness."""

    name: Literal["verifiers"] = "verifiers"
    taskset: str = Field(
        min_length=1, description="the taskset: its installed module, such as gsm8k-v1, or FILE.py"
    )
    env: dict[str, Any] = Field(
        {},
        description="verifiers' own section env: settings of the taskset (env.taskset), of each "
        "role (env.agent), and the environment (env.id)",
    )
    tasks: int | None = Field(
        None, ge=1, description="number of tasks to use, the first ones; None: all"
    )
    role: str | None = Field(
        None, description="role that learns, if several are trainable; None: the one that is"
    )
    commands: Literal["refuse", "allow"] = Field(
        "refuse",
        description="whether a harness may run commands that the model writes, on this machine and "
        "with all rights of your user",
    )

    @property
    def taskset_file(self) -> str | None:
        """The file of the taskset; None if an installed module is named."""
        return self.taskset if self.taskset.endswith(".py") else None


class SupervisedTask(PromptsTask):
    """Base class of the tasks of supervised runs: rows with given responses."""

    epochs: float = Field(1.0, gt=0, allow_inf_nan=False, description="passes over the rows")


class PreferencesTask(SupervisedTask):
    """Rows with a prompt, a chosen and a rejected response, which train a reward model."""

    name: Literal["preferences"] = "preferences"


class PairsTask(SupervisedTask):
    """Rows with a prompt (or GSM8K's question) and an answer to learn."""

    renamed: ClassVar[Mapping[str, str]] = {"question": "prompt"}
    name: Literal["pairs"] = "pairs"
    prompt: str = Field("{prompt}", pattern=r"\{prompt\}", description="template of the prompt")
    answer: str = Field("{answer}", pattern=r"\{answer\}", description="template of the answer")


Part = KeywordsTask | FilesTask | MathTask | GymTask | JudgedTask
AnyPart = Annotated[Part, BY_NAME]


class MixtureTask(Section):
    """Several tasks; the task of each group is drawn by weight."""

    name: Literal["mixture"] = "mixture"
    weights: dict[str, Positive] = Field(description="relative frequency of each task, by its name")
    scales: dict[str, Positive] = Field(
        {}, description="factors that multiply the rewards of a task"
    )
    tasks: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], AnyPart] = Field(
        min_length=2, description="the tasks by their names; each is a section like task"
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.tasks.keys() != self.weights.keys():
            tasks, weights = ", ".join(self.tasks), ", ".join(self.weights)
            raise ValueError(f"needs a weight for each task, got tasks {tasks}, weights {weights}")
        if unknown := self.scales.keys() - self.tasks.keys():
            raise ValueError(
                f"has scales for {', '.join(unknown)}, which are no tasks; remove them"
            )
        return self


AnyTask = Annotated[
    SortTask
    | Part
    | EnvironmentTask
    | AgentTask
    | VerifiersTask
    | PairsTask
    | PreferencesTask
    | MixtureTask,
    BY_NAME,
    named("sort"),
]
