"""Sweeps: recipes × overrides × seeds from one TOML file; each combination is a run.

Every run is a separate process, so that runs do not affect each other; its output goes to a file
beside its directory. Runs execute one after the other, or several at a time as Ray tasks, which
assign cores and a share of a GPU to each. A restarted sweep keeps the finished runs in its
directory and resumes the others. One page compares all runs.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from burnish import api
from burnish.console.text import duration
from burnish.errors import BurnishError, ConfigError, MissingExtra, RunError
from burnish.launch.preflight import find_problems, is_installed, raise_problems
from burnish.machine import hardware
from burnish.machine.process import ChildProcess, exit_status
from burnish.recipe.base import Section
from burnish.recipe.load import explain_errors, flatten, load_recipe, read_toml
from burnish.recipe.recipe import Recipe
from burnish.recipe.runtime import RayRuntime, Resources
from burnish.runs import directory, resuming
from burnish.runs.comparison import write_comparison
from burnish.runs.report import read_failure
from burnish.runs.run import outcome

CHILD = f"from {__name__} import run_job; run_job()"
PAGE, STOP = "sweep.html", ".stop"
"""Files in a sweep's directory: its page, and a file whose existence makes its runs stop."""
FINISH_S, CLEAN_S = 3.0, 3.5
"""Seconds that a stopped run has to finish its step, and then to clean up."""


class SweepFile(Section):
    """Content of a sweep's file."""

    name: str
    description: str = ""
    recipes: list[str] = Field([], min_length=1, validate_default=True)
    seeds: list[int] = Field([0], min_length=1)
    checkpoints: bool = Field(True, description="whether finished runs keep their checkpoints")
    set: dict[str, Any] = Field({}, description="overrides of every run")
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {}, description="values per setting; all combinations are run"
    )
    variants: dict[str, dict[str, Any]] = Field({}, description="named overrides")


class Job(NamedTuple):
    """One run of a sweep."""

    label: str
    """Name of its curve: everything that identifies the run except its seed."""
    recipe: Recipe
    path: Path

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").is_file()


def read_sweep(file: Path) -> SweepFile:
    """Read a sweep's TOML file; its name is the sweep's name unless the file gives another. Raise a
    ConfigError if the content is not valid."""
    table = {"name": file.stem} | read_toml(file)
    if isinstance(table.get("grid"), Mapping):
        table["grid"] = flatten(table["grid"])
    try:
        return SweepFile.model_validate(table)
    except ValidationError as error:
        problems = explain_errors(error, list(SweepFile.model_fields))
        raise ConfigError(f"{file}: {problems}") from None


def plan_jobs(file: Path, sweep: SweepFile, out: Path) -> list[Job]:
    """Return all runs of a sweep, finished ones included, whose directories are below ``out``.
    ``file`` is the sweep's file; recipes that it names are searched beside it first.

    Raises a ConfigError if a recipe can't run or if two runs are the same, and a RunError if a
    directory already holds a run of another recipe.
    """
    jobs, seen = list[Job](), dict[str, str]()
    for label, recipe in _combinations(file, sweep):
        slug = re.sub(r"[^\w.=+-]+", "-", label.replace(" = ", "=")).strip("-.")
        job = Job(label, recipe, out / f"{slug}-s{recipe.seed}")
        for same in (job.path.name, recipe.model_dump_json()):
            if same in seen:
                names = f"{seen[same]} and {job.path.name}"
                raise ConfigError(f"{file}: {names} are the same run; change or remove one of them")
            seen[same] = job.path.name
        _check_kept(job)
        jobs.append(job)
    return jobs


def _combinations(file: Path, sweep: SweepFile) -> Iterator[tuple[str, Recipe]]:
    variants, grid = sweep.variants or {"": {}}, sweep.grid
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for name, (variant, given), point in product(sweep.recipes, variants.items(), points):
        source = file.parent / name if (file.parent / name).is_file() else name
        words = [variant, *(f"{key} = {value}" for key, value in point.items())]
        words += [Path(name).stem] if sweep.recipes[1:] or not any(words) else []
        label = ", ".join(filter(None, words))
        for seed in sweep.seeds:
            try:
                own = {"seed"} & (sweep.set | point | given).keys()
                if twice := own | (point.keys() & given.keys()):
                    raise ConfigError(f"{min(twice)} is given twice; remove one of the two")
                recipe = load_recipe(source, [{"seed": seed}, sweep.set, point, given])
                if seed == sweep.seeds[0]:
                    raise_problems(find_problems(recipe))
            except BurnishError as error:
                raise ConfigError(f"{file}: {label}: {error}") from None
            yield label, recipe


def _check_kept(job: Job) -> None:
    """Raise a RunError if the job's directory already holds a run of another recipe."""
    file = job.path / "recipe.toml"
    if not file.is_file():
        return
    before, now = (flatten(r.model_dump()) for r in (load_recipe(file), job.recipe))
    now |= {key: before.get(key) for key in now if now[key] == "auto"}  # the run has resolved it
    if changed := resuming.differences(before, now):
        raise RunError(
            f"{job.path} is a run of another recipe ({changed}); choose another --out, or move "
            "that run"
        )


def run_sweep(
    file: Path, out: Path, log: Callable[[str], None], parallel: int | None = None, gpus: float = 0
) -> dict[str, str]:
    """Execute the unfinished runs of a sweep (runs that have begun are resumed), and update the
    page that compares all finished runs. Return the errors of failed runs by run name; a failed run
    does not stop the others.

    ``log`` is called with each line of output. ``parallel`` is the number of runs that execute at
    the same time as Ray tasks, each with ``gpus`` GPUs; None to execute them one after the other
    without Ray. Ctrl-C stops the runs; each saves a checkpoint if its step ends within seconds.
    """
    sweep = read_sweep(file)
    jobs = plan_jobs(file, sweep, out)
    todo = [job for job in jobs if not job.is_finished]
    done, failed = len(jobs) - len(todo), dict[str, str]()
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(directory.lock(out).release)
        (out / STOP).unlink(missing_ok=True)
        start = _starter(stack, (out / STOP).absolute(), parallel, gpus)
        log(f"{len(jobs)} runs, {done} of them finished before; page: {out / PAGE}")
        pool = ThreadPoolExecutor(parallel or 1)
        begun = {pool.submit(start, job): job for job in todo}
        try:
            for number, future in enumerate(as_completed(begun), done + 1):
                job = begun[future]
                raised = future.exception()
                if error := future.result() if raised is None else str(raised) or repr(raised):
                    failed[job.path.name] = error
                    log(f"{job.path.name} failed: {error}")
                else:
                    lines = outcome(directory.load_json(job.path / "summary.json"))
                    log(f"{job.path.name}: {'; '.join(lines)}")
                    if not sweep.checkpoints:
                        shutil.rmtree(job.path / "checkpoints")
                _write_page(jobs, out, sweep)
                left = len(jobs) - number
                pace = (time.monotonic() - began) / (number - done)
                rest = f"; about {duration(pace * left)} left" if left else ""
                log(f"{number} of {len(jobs)} runs are done{rest}")
        finally:
            (out / STOP).touch()
            pool.shutdown(cancel_futures=True)
            (out / STOP).unlink()
    _write_page(jobs, out, sweep)
    return failed


def _write_page(jobs: Sequence[Job], out: Path, sweep: SweepFile) -> None:
    if done := [job for job in jobs if job.is_finished]:
        paths, labels = [job.path for job in done], [job.label for job in done]
        about = {"title": sweep.name, "about": sweep.description}
        write_comparison(paths, out / PAGE, labels=labels, **about)


def _starter(
    stack: ExitStack, stop: Path, parallel: int | None, gpus: float
) -> Callable[[Job], str]:
    """Return a function that executes a job and returns its error, or "" if the job succeeded. It
    calls `run_child` in this process or, if ``parallel`` is set, as a Ray task with ``gpus`` GPUs
    and its share of the cores. The existence of the file ``stop`` stops the jobs.

    With ``parallel``, Ray is started here, and stopped when ``stack`` is closed.
    """
    where = Path.cwd()
    if parallel is None:
        return lambda job: run_child(job, stop, where, hardware.cores())
    if not is_installed("ray"):
        raise MissingExtra("ray", "--parallel")
    import ray

    from burnish.actors import cluster

    nothing = Resources(cpus=0)
    stack.callback(cluster.start_or_join(RayRuntime(generator=nothing, learner=nothing)))
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if gpus > (found := there.get("GPU", 0.0)):
        raise ConfigError(f"--gpus-per-run {gpus:g} is more than the {found:g} GPUs that Ray has")
    cores = max(1, min(hardware.cores(), int(there.get("CPU", 1))) // parallel)
    task: Any = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=0)(run_child)
    return lambda job: str(ray.get(task.remote(job, stop, where, cores)))


def run_child(job: Job, stop: Path, where: Path, cores: int) -> str:
    """Execute a job in a child process and wait for it. Return a message with the last line of the
    job's output if it failed, or "" if it succeeded.

    ``stop`` is the file whose existence stops the job; ``where`` is its working directory, and
    ``cores`` the number of cores that it may use.
    """
    if stop.exists():  # Ray had no resources for it before the sweep was stopped
        return "the sweep was stopped before it began"
    file = where / job.path.with_name(f"{job.path.name}.log")
    child = ChildProcess(
        [sys.executable, "-c", CHILD],
        name=f"the run {job.path.name}",
        stdin=pickle.dumps((job, stop, os.getpid())),
        log=file,
        cwd=where,
        env={hardware.CORES: str(cores)},
    )
    with closing(child):
        code = child.wait(timeout=None)  # a training run; it watches this process and ``stop``
        last = child.tail(1) or ["no output"]
        failure = read_failure(where / job.path)
        if failure is not None and last[0] == failure.advice:
            last = [failure.message.splitlines()[0]]
    return f"{last[0]} (it {exit_status(code)}); see {file}" if code else ""


def run_job() -> None:
    """Main function of a child process: start or resume the run that is pickled on stdin.

    The run ends early if its parent dies or the sweep is stopped.
    """
    job, stop, parent = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    # Ray's processes block these signals, and a child process inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_watch_parent, args=(stop, parent), daemon=True).start()
    if (job.path / "recipe.toml").is_file():
        api.resume(job.path, stop=stop.exists)
    else:
        api.train(job.recipe, out=job.path, stop=stop.exists)


def _watch_parent(stop: Path, parent: int) -> None:
    """Wait until the parent has died or the sweep is stopped; then interrupt this process, and kill
    it if it does not end in time. A stopped run first has ``FINISH_S`` to finish its step."""
    while os.getppid() == parent and not stop.exists():
        time.sleep(0.2)
    if stop.exists():
        time.sleep(FINISH_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(CLEAN_S)
    os._exit(1)
