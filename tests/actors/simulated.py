"""Ray on a simulated clock: the supervisor, the rollouts and the loops are the real ones.

Actors are processes that are only counted: each makes its calls one after the other, a call takes
simulated seconds, and a process dies or freezes at a simulated moment. A schedule is a function of
its seed, so a failure repeats. `Run` drives a loop as the recorder does: it saves every few steps,
and goes back to the last save when the learner dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError

from burnish.actors import supervisor, workers
from burnish.actors.actor import ActorStatus
from burnish.actors.remote_learner import RemoteLearner
from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.supervisor import Supervisor
from burnish.actors.transport import WeightsHandle
from burnish.actors.workers import GeneratorWorker, ScorerWorker
from burnish.cli.chaos import bounds_of
from burnish.engine.protocol import Request, completed
from burnish.errors import ActorDied, EngineError
from burnish.launch.local import build_buffer
from burnish.launch.settings import rollout_settings
from burnish.learner.protocol import LearnerState, Step
from burnish.loops import free, lagged
from burnish.randomness import Stream
from burnish.recipe.load import load_recipe
from burnish.recipe.recipe import Recipe
from burnish.recipe.runtime import FreeLoop
from burnish.rollout.dead_groups import make_replacer
from burnish.rollout.rollout import sample
from burnish.runs.ledger import LedgerVerdict, judge_rows
from burnish.runs.metrics import Timers
from burnish.tasks.solve_rates import History
from burnish.tasks.stream import PromptStream
from burnish.types import Completion, Finish, Grade, Prompt, Weights

TOKEN = 0.1
"""Seconds of an engine's step."""
DETECTED = 0.3
"""Seconds after which Ray reports a death."""
NEVER = float("inf")
DEADLINE = 120.0


@dataclass(eq=False)
class Ref:
    """An answer that comes at a simulated moment."""

    ready: float
    value: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class Process:
    name: str
    part: Any
    free: float
    """When it has made all calls that it was given."""
    refs: list[Ref] = field(default_factory=list)
    frozen: bool = False
    died: float | None = None


class Handle:
    """An actor's handle: each method is called by ``.remote``."""

    def __init__(self, ray: SimulatedRay, process: Process) -> None:
        self.process = process
        for name in ("build", "call", "read_buffer", "heartbeat"):
            method = getattr(ray, f"_{name}")
            setattr(self, name, SimpleNamespace(remote=self._bound(method)))

    def _bound(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: method(self.process, *args)


class SimulatedRay:
    """The functions of Ray that a supervisor calls."""

    def __init__(self, seed: int, faults: Sequence[tuple[float, str, str]] = ()) -> None:
        """``faults``: the second, the kind and the actor of each. A "kill" ends the process that
        the actor has then; a "rekill" ends it, and soon afterwards the process that follows it; a
        "freeze" leaves a process that answers nothing; an "evaluation" ends the process so many
        seconds after the run's next evaluation has begun."""
        self.now = 0.0
        self.local = 0.0
        """The clock of the process whose method runs."""
        self.chance = random.Random(seed)
        self._faults = sorted(one for one in faults if one[1] != "evaluation")
        self._at_evaluation = [one for one in faults if one[1] == "evaluation"]
        self._processes: dict[str, Process] = {}
        self._doomed: set[str] = set()
        self._looks = 0
        self.killed: list[str] = []
        self.deaths: Callable[[str], int] = lambda name: 0
        """Deaths of an actor without an answer between them, as the supervisor counts them."""

    def clock(self) -> float:
        """The supervisor looks at it with every poll, also of a loop that waits for nothing."""
        self._looks += 1
        assert self._looks < 200_000, f"the run does not end: {self.now:.0f} simulated seconds"
        return self.now

    # What the supervisor calls.

    def actor_class(self, kind: str, is_direct: bool) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._start))

    def wait(self, refs: Sequence[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert refs, "Ray refuses to wait for nothing"
        end = self.now + timeout
        while True:
            first = min(ref.ready for ref in refs)
            if self._faults and self._faults[0][0] <= min(max(first, self.now), end):
                at, kind, name = self._faults.pop(0)
                self.now = max(self.now, at)
                self._fail(kind, name)
                continue
            self.now = max(self.now, min(first, end))
            ready = [ref for ref in refs if ref.ready <= self.now][:1]
            return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any, timeout: float = 0.0) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        assert refs.ready <= self.now, "the run would wait without a deadline"
        if refs.error is not None:
            raise refs.error
        return refs.value

    def kill(self, handle: Handle) -> None:
        self._die(handle.process)

    # What happens in actors.

    def _start(self, part: Callable[[], Any], is_direct: bool) -> Handle:
        name, make = part.args[0], part.func  # type: ignore[attr-defined]
        process = Process(name, make(name), self.now + self.chance.uniform(0.1, 2.0))
        self._processes[name] = process
        if name in self._doomed:
            self._doomed.remove(name)
            self._plan(self.chance.choice([0.1, 1.0, 3.0]), "kill", name)
        return Handle(self, process)

    def evaluate(self) -> None:
        """The run begins an evaluation."""
        if self._at_evaluation:
            seconds, _, name = self._at_evaluation.pop(0)
            self._plan(seconds, "kill", name)

    def _plan(self, seconds: float, kind: str, name: str) -> None:
        self._faults = sorted([*self._faults, (self.now + seconds, kind, name)])

    def _fail(self, kind: str, name: str) -> None:
        process = self._processes[name]
        if kind == "freeze":
            process.frozen = True
            for ref in process.refs:
                ref.ready = NEVER if ref.ready > self.now else ref.ready
            return
        if process.died is not None or self.deaths(name) >= supervisor.MAX_DEATHS - 1:
            return  # one more in a row, and the run would rightly give up
        self.killed.append(name)
        self._die(process)
        if kind == "rekill":
            self._doomed.add(name)

    def _die(self, process: Process) -> None:
        process.died = self.now
        for ref in process.refs:
            if ref.ready > self.now:
                ref.ready, ref.error = self.now + DETECTED, died(process.name)

    def _answer(self, process: Process, ready: float, value: Any) -> Ref:
        ref = Ref(ready, value)
        if process.died is not None:
            ref = Ref(self.now + DETECTED, error=died(process.name))
        elif process.frozen:
            ref.ready = NEVER
        else:
            process.refs = [one for one in process.refs if one.ready > self.now] + [ref]
        return ref

    def _build(self, process: Process) -> None:
        """It was built when it started."""

    def _heartbeat(self, process: Process) -> Ref:
        status = ActorStatus(1, "here", "node", "", 0, "")
        return self._answer(process, self.now, status)

    def _read_buffer(self, process: Process, buffer: str) -> Ref:
        return self._answer(process, max(self.now, process.free), np.zeros(0, dtype=np.uint8))

    def _call(self, process: Process, method: str, *args: Any) -> tuple[Ref, Ref]:
        """Makes the call at once: what it does is seen by nobody before it is answered."""
        if process.died is not None or process.frozen:
            both = self._answer(process, NEVER, None)
            return both, both
        given = [arg for arg in args if isinstance(arg, Ref)]
        self.local = max([self.now, process.free, *(ref.ready for ref in given)])
        error, answer = next((ref.error for ref in given if ref.error is not None), None), None
        if error is None:
            try:
                values = [arg.value if isinstance(arg, Ref) else arg for arg in args]
                answer = getattr(process.part, method)(*values)
            except Exception as raised:
                error = raised
        process.free = self.local
        ref = self._answer(process, self.local, answer)
        if error is not None and ref.error is None:
            ref.error = RayTaskError(method, str(error), error)
        span = self._answer(process, ref.ready, {"begin": 0.0, "end": 0.0, "version": None})
        return ref, span


def died(name: str) -> RayActorError:
    return RayActorError(error_msg=f"{name}: exit type: SIMULATED")


class SlowEngine:
    """Samples a token of each sample in a step; a sample has from 1 to 31 tokens."""

    def __init__(self, ray: SimulatedRay, seed: int) -> None:
        self._ray, self._seed = ray, seed
        self.version = self.sampled = self._incarnation = 0
        self._left: dict[tuple[str, int], int] = {}
        self._versions: dict[tuple[str, int], list[int]] = {}
        self._requests: dict[str, Request] = {}

    def probe(self) -> tuple[float, ...]:
        return ()

    @property
    def unfinished(self) -> int:
        return len(self._left)

    def submit(self, request: Request) -> None:
        name = request.request_id
        assert name not in self._requests, f"{name} is in flight"
        self._requests[name] = request
        for number in range(request.n):
            draw = random.Random(f"{self._seed} {name} {number}")
            self._left[name, number] = 1 + min(30, int(draw.lognormvariate(1.5, 1.0)))
            self._versions[name, number] = []

    def load(self, weights: Weights) -> None:
        if weights.incarnation < self._incarnation:
            raise EngineError(f"incarnation {weights.incarnation} after {self._incarnation}")
        self.version, self._incarnation = weights.version, weights.incarnation

    def abort(self, request_id: str) -> None:
        for name, number in self._left:
            if name == request_id:
                self._left[name, number] = 0

    def step(self) -> list[Completion]:
        self._ray.local += TOKEN
        for one, left in self._left.items():
            if left:
                self._versions[one].append(self.version)
                self._left[one] = left - 1
        done = [one for one, left in self._left.items() if not left]
        return [self._completion(*one) for one in done]

    def _completion(self, name: str, sample: int) -> Completion:
        del self._left[name, sample]
        versions = self._versions.pop((name, sample)) or [self.version]
        request = self._requests[name]
        if not any(other == name for other, _ in self._left):
            del self._requests[name]
        tokens = [sample] * len(versions)
        recorded = tokens, [0.0] * len(versions), versions
        return completed(request, sample, recorded, (Finish.STOP, None, str(sample)))


class Task:
    """Rewards are drawn from the group's number: about a share of ``dead`` have equal rewards."""

    def __init__(self, ray: SimulatedRay, seed: int, dead: float) -> None:
        self._ray, self._seed, self._dead = ray, seed, dead

    def prompt(self, number: int) -> Prompt:
        return Prompt(f"p{number % 40}", "", np.ones(1, dtype=np.int32), "sort", number)

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        self._ray.local += 0.01 * len(pairs)
        return [self._grade(prompt, completion) for prompt, completion in pairs]

    def _grade(self, prompt: Prompt, completion: Completion) -> Grade:
        draw = random.Random(f"{self._seed} {prompt.reference}").random()
        right = draw >= self._dead and completion.sample_index % 2 == 1
        return Grade(float(right), correct=right)


class SlowLearner:
    """Counts versions. A step adds some of its gradient steps: others are not finite."""

    def __init__(self, ray: SimulatedRay, seed: int, recipe: Recipe) -> None:
        self._ray, self._seed, self._recipe = ray, seed, recipe
        self.version = 0

    def learn(self, number: int, groups: Sequence[Any]) -> Step:
        draw = random.Random(self._seed * 1000 + number)
        self._ray.local += draw.uniform(0.2, 3.0)
        before, most = self.version, self._recipe.gradient_steps_per_rollout
        self.version += draw.choice([most, most, most, draw.randint(0, most)]) if groups else 0
        oldest = min((group.oldest_version for group in groups), default=before)
        metrics = {"train/version": float(self.version), "train/lag": float(before - oldest)}
        return Step(number, metrics, groups)

    def weights(self, incarnation: int, in_use: Sequence[str]) -> WeightsHandle:
        self._ray.local += 0.1
        return WeightsHandle(self.version, incarnation, (), f"space-{self.version}")

    def load_state(self, handle: WeightsHandle, data: Any, numbers: dict[str, Any]) -> int:
        self._ray.local += 0.5
        self.version = numbers["version"]
        return self.version


@dataclass
class Result:
    verdict: LedgerVerdict
    rows: list[dict[str, Any]]
    steps: list[tuple[int, list[int]]]
    """The number of each step that stands, and the groups that it learned from."""
    ray: SimulatedRay
    deaths: int
    """Deaths of the learner that the run survived."""
    metrics: list[dict[str, float]]


def simulate(
    settings: dict[str, Any],
    seed: int,
    faults: Sequence[tuple[float, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    every: int = 2,
    dead: float = 0.0,
    validate: int = 3,
) -> Result:
    """Runs a recipe to its end on simulated actors that fail as ``faults`` say. It saves every
    ``every`` steps, and evaluates every ``validate`` steps."""
    recipe = load_recipe("sort", [{"runtime": "ray", **settings}])
    ray = SimulatedRay(seed, faults)
    monkeypatch.setattr(supervisor, "ray", ray)
    monkeypatch.setattr(supervisor, "actor_class", ray.actor_class)
    monkeypatch.setattr(supervisor, "head_node_problem", lambda: None)
    monkeypatch.setattr(supervisor, "cloudpickle", SimpleNamespace(dumps=lambda make: make))
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: ray.local))
    names = [f"generator-{number}" for number in range(recipe.runtime.generators)]
    drains = isinstance(recipe.loop, FreeLoop) and recipe.loop.on_update == "wait"
    task = Task(ray, seed, dead)
    parts: dict[str, Callable[[], Any]] = {
        name: lambda: GeneratorWorker(SlowEngine(ray, seed), drains=drains)  # type: ignore[arg-type]
        for name in names
    }
    parts["scorer"] = lambda: ScorerWorker(task)
    parts["learner"] = lambda: SlowLearner(ray, seed, recipe)

    def make(name: str) -> Any:
        return parts[name]()

    watcher = Supervisor(DEADLINE, clock=ray.clock)
    ray.deaths = lambda name: watcher._actors[name].deaths
    for name in parts:
        watcher.start(name, _Part(make, name), restarts=name != "learner")
    size = recipe.rollout.group_size
    is_free = isinstance(recipe.loop, FreeLoop)
    replace = None if is_free else make_replacer(rollout_settings(recipe))
    rollouts = RemoteRollouts(
        watcher, names, size=size, params=rollout_settings(recipe).params, replace=replace
    )
    learner = RemoteLearner(rollouts, "", "store")
    prompts, buffer = stream(recipe, task), build_buffer(recipe.buffer, recipe.seed)
    run = Run(recipe, rollouts, learner, prompts, buffer, every, validate)
    run.evaluating = ray.evaluate
    run.drive()
    batch, versions = recipe.prompts_per_rollout, recipe.gradient_steps_per_rollout
    window, max_lag = bounds_of(recipe.loop, recipe.selection, recipe.buffer, batch, versions)
    uses = 1 if recipe.buffer is None else recipe.buffer.max_uses
    verdict = judge_rows(run.rows, batch=batch, window=window, max_uses=uses, max_lag=max_lag)
    return Result(verdict, run.rows, run.steps, ray, run.deaths, run.metrics)


def stream(recipe: Recipe, task: Task) -> PromptStream:
    history = History(recipe.selection, recipe.seed) if recipe.selection.remembers else None
    return PromptStream(task, history=history)  # type: ignore[arg-type]


@dataclass
class _Part:
    func: Callable[[str], Any]
    name: str

    @property
    def args(self) -> tuple[str]:
        return (self.name,)

    def __call__(self) -> Any:
        return self.func(self.name)


class Run:
    """Drives a loop as `burnish.loops.recorder` does."""

    def __init__(
        self,
        recipe: Recipe,
        rollouts: RemoteRollouts,
        learner: RemoteLearner,
        prompts: PromptStream,
        buffer: Any,
        every: int,
        validate: int,
    ) -> None:
        self.recipe, self.rollouts, self.learner, self.prompts = recipe, rollouts, learner, prompts
        self.buffer, self.every, self.validate = buffer, every, validate
        self.rows: list[dict[str, Any]] = []
        self.steps: list[tuple[int, list[int]]] = []
        self.metrics: list[dict[str, float]] = []
        self.deaths = 0
        self.evaluating: Callable[[], None] = lambda: None
        rollouts.listen(self._note)
        parts: dict[str, Any] = {"prompts": prompts, "learner": learner, "timers": Timers()}
        if isinstance(recipe.loop, FreeLoop):
            self._train: Any = lambda start: free.train_free(
                rollout_settings(recipe),
                recipe.train.steps,
                loop=recipe.loop,
                gradient_steps=recipe.gradient_steps_per_rollout,
                rollouts=rollouts,
                start=start,
                **parts,
            )
        else:
            self._train = lambda start: lagged.train_lagged(
                rollout_settings(recipe),
                recipe.train.steps,
                lag=recipe.loop.lag,
                rollouts=rollouts,
                buffer=buffer,
                start=start,
                **parts,
            )
        self._saved: dict[str, Any] = {"step": 0, "prompts": PromptStream.BEGINNING, "version": 0}
        self._saved |= {"held": [], "kept": []}

    def drive(self) -> None:
        died = False
        while True:
            try:
                if died:
                    self._go_back()
                self._run()
                return
            except ActorDied:
                self.deaths += 1
                died = True

    def _run(self) -> None:
        start = self._saved["step"]
        self._note("start", step=start)
        for step in self._train(start):
            state, held = self.prompts.state(), self.rollouts.in_flight()
            kept = [] if self.buffer is None else [(k.group, k.uses) for k in self.buffer.kept]
            if step.number % self.validate == 0:
                self._validate()
            numbers = [group.index for group in step.groups]
            oldest = min((group.oldest_version for group in step.groups), default=0)
            version = oldest + int(step.metrics["train/lag"])
            self._note("learned", step=step.number, groups=numbers, oldest=oldest, version=version)
            self.steps.append((step.number, numbers))
            self.metrics.append({"step": step.number} | step.metrics)
            if step.number % self.every == 0:
                waited = [waiting() for waiting in held]
                self._saved = {"step": step.number, "prompts": state, "held": waited, "kept": kept}
                self._saved["version"] = self.learner.version

    def _go_back(self) -> None:
        saved = self._saved
        self.learner.revive()
        self.learner.load_state(LearnerState({"w": torch.zeros(1)}, {"version": saved["version"]}))
        self.prompts.load_state(saved["prompts"])
        self.rollouts.restore(saved["held"])
        if self.buffer is not None:
            kept = saved["kept"]
            self.buffer.restore([group for group, _ in kept], [uses for _, uses in kept])
        self.learner.incarnation += 1
        self.steps = [one for one in self.steps if one[0] <= saved["step"]]
        self.metrics = [one for one in self.metrics if one["step"] <= saved["step"]]

    def _validate(self) -> None:
        self.evaluating()
        asked = [(index, self.prompts._task.prompt(index)) for index in range(3)]
        sample(self.rollouts, asked, 1, rollout_settings(self.recipe).params, Stream.EVALUATION)

    def _note(self, event: str, **told: Any) -> None:
        if event != "worked":
            self.rows.append({"event": event, **told})
