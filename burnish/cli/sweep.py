"""Sweeps: recipes × overrides × seeds from one TOML file, each a run, and one page for all.

Every run is a process of its own, so that none disturbs the next; its output is in a file beside
its directory. Runs go one after the other, or several at a time as tasks of Ray, which gives each
its cores and its share of a GPU. The directory says what is done: a sweep that is started again
keeps finished runs and resumes the others.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from burnish import api, config, machine, preflight
from burnish.errors import BurnishError, ConfigError, MissingExtra, RunError
from burnish.runs import directory, resuming
from burnish.runs.comparison import write_comparison
from burnish.runs.run import outcome
from burnish.schema.recipe import Recipe
from burnish.sections import Section
from burnish.strategy import Resources, RuntimeConfig
from burnish.wording import duration

CHILD = "from burnish.sweep import child; child()"
PAGE, STOP = "sweep.html", ".stop"
"""Files in a sweep's directory: its page, and a file that asks its runs to stop."""
FINISH_S, CLEAN_S = 3.0, 3.5
"""Seconds that a run has to finish a step once it is asked to stop, and to clean up then."""


class SweepFile(Section):
    """A sweep as its file has it."""

    name: str
    description: str = ""
    recipes: list[str] = Field([], min_length=1, validate_default=True)
    seeds: list[int] = Field([0], min_length=1)
    checkpoints: bool = Field(True, description="whether finished runs keep theirs")
    set: dict[str, Any] = Field({}, description="overrides of every run")
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field({}, description="a product")
    variants: dict[str, dict[str, Any]] = Field({}, description="named overrides")


class Job(NamedTuple):
    """One run of a sweep."""

    label: str
    """The curve that it belongs to: all that it is but its seed."""
    recipe: Recipe
    path: Path

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").is_file()


def read(file: Path) -> SweepFile:
    table = {"name": file.stem} | config.read_toml(file)
    if isinstance(table.get("grid"), Mapping):
        table["grid"] = config.flat(table["grid"])
    try:
        return SweepFile.model_validate(table)
    except ValidationError as error:
        told = config.explain(error, list(SweepFile.model_fields))
        raise ConfigError(f"{file}: {told}") from None


def plan(file: Path, sweep: SweepFile, out: Path) -> list[Job]:
    """The runs of a sweep below ``out``, all of them checked."""
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
                recipe = config.load(source, [{"seed": seed}, sweep.set, point, given])
                if seed == sweep.seeds[0]:
                    preflight.check(recipe)
            except BurnishError as error:
                raise ConfigError(f"{file}: {label}: {error}") from None
            yield label, recipe


def _check_kept(job: Job) -> None:
    """Raises if the run that is there is another one."""
    file = job.path / "recipe.toml"
    if not file.is_file():
        return
    before, now = (config.flat(r.model_dump()) for r in (config.load(file), job.recipe))
    now |= {key: before.get(key) for key in now if now[key] == "auto"}  # the run has settled it
    if changed := resuming.differences(before, now):
        raise RunError(
            f"{job.path} is a run of another recipe ({changed}); choose another --out, or move "
            "that run away"
        )


def run(
    file: Path, out: Path, say: Callable[[str], None], parallel: int | None = None, gpus: float = 0
) -> dict[str, str]:
    """Runs what is not finished of a sweep -> the errors of runs that failed, by their names.

    ``parallel`` is how many run at once as tasks of Ray; None for one after the other, without it.
    Ctrl-C asks the runs to stop; each saves a checkpoint if its step ends within seconds.
    """
    sweep = read(file)
    jobs = plan(file, sweep, out)
    todo = [job for job in jobs if not job.is_finished]
    done, failed = len(jobs) - len(todo), dict[str, str]()
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(directory.lock(out).release)
        (out / STOP).unlink(missing_ok=True)
        start = _starter(stack, (out / STOP).absolute(), parallel, gpus)
        say(f"{len(jobs)} runs, {done} of them finished before; page: {out / PAGE}")
        pool = ThreadPoolExecutor(parallel or 1)
        begun = {pool.submit(start, job): job for job in todo}
        try:
            for number, future in enumerate(as_completed(begun), done + 1):
                job = begun[future]
                if error := str(future.exception() or future.result()):
                    failed[job.path.name] = error
                    say(f"{job.path.name} failed: {error}")
                else:
                    told = outcome(directory.read_json(job.path / "summary.json"))
                    say(f"{job.path.name}: {'; '.join(told)}")
                    if not sweep.checkpoints:
                        shutil.rmtree(job.path / "checkpoints")
                _write_page(jobs, out, sweep)
                left = len(jobs) - number
                pace = (time.monotonic() - began) / (number - done)
                rest = f"; about {duration(pace * left)} left" if left else ""
                say(f"{number} of {len(jobs)} runs are done{rest}")
        finally:
            (out / STOP).touch()
            pool.shutdown(cancel_futures=True)
            (out / STOP).unlink()
    _write_page(jobs, out, sweep)
    return failed


def _write_page(jobs: Sequence[Job], out: Path, sweep: SweepFile) -> None:
    if done := [job for job in jobs if job.is_finished]:
        paths, labels = [job.path for job in done], [job.label for job in done]
        told = {"title": sweep.name, "about": sweep.description}
        write_comparison(paths, out / PAGE, labels=labels, **told)


def _starter(
    stack: ExitStack, stop: Path, parallel: int | None, gpus: float
) -> Callable[[Job], str]:
    """The function that runs a job: ``run_child`` in this process, or as a task of Ray."""
    where = Path.cwd()
    if parallel is None:
        return lambda job: run_child(job, stop, where, machine.cores())
    if not preflight.is_installed("ray"):
        raise MissingExtra("ray", "--parallel")
    import ray

    from burnish.actors import cluster

    nothing = Resources(cpus=0)
    stack.callback(cluster.connect(RuntimeConfig(name="ray", generator=nothing, learner=nothing)))
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if gpus > (found := there.get("GPU", 0.0)):
        raise ConfigError(f"--gpus-per-run {gpus:g} is more than the {found:g} GPUs that Ray has")
    cores = max(1, min(machine.cores(), int(there.get("CPU", 1))) // parallel)
    task: Any = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=0)(run_child)
    return lambda job: str(ray.get(task.remote(job, stop, where, cores)))


def run_child(job: Job, stop: Path, where: Path, cores: int) -> str:
    """Runs a job in a process of its own -> the last line that it said if it failed, else ""."""
    if stop.exists():  # Ray had no room for it until now
        return "the sweep was stopped before it began"
    file = where / job.path.with_name(f"{job.path.name}.log")
    with file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=where,
            env=os.environ | {machine.CORES: str(cores)},
            start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which asks its runs
        )
        process.communicate(pickle.dumps((job, stop, os.getpid())))
    if process.returncode == 0:
        return ""
    said = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{said[-1] if said else 'no word'} (status {process.returncode}); see {file}"


def child() -> None:
    """The process of one run, which ends with its parent, or if the sweep is stopped."""
    job, stop, parent = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    # Ray's processes block them, and a process inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_watch, args=(stop, parent), daemon=True).start()
    if (job.path / "recipe.toml").is_file():
        api.resume(job.path, stop=stop.exists)
    else:
        api.train(job.recipe, out=job.path, stop=stop.exists)


def _watch(stop: Path, parent: int) -> None:
    while os.getppid() == parent and not stop.exists():
        time.sleep(0.2)
    if stop.exists():
        time.sleep(FINISH_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(CLEAN_S)
    os._exit(1)
