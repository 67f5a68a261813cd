"""The command line: options in, words out. ``api`` and ``build`` do the work."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burnish.display import Display
from burnish.errors import BurnishError, ConfigError, RunError
from burnish.interrupt import Interrupts
from burnish.progress import STEP_PHASES, Progress, Show
from burnish.threads import share_cores
from burnish.wording import counted, printable

if TYPE_CHECKING:
    from burnish.config import Recipe
    from burnish.plan import Section

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with reinforcement learning.",
)
out_console = Console(highlight=False)
err_console = Console(highlight=False, stderr=True)

SAID = 200
"""Characters of a response that are shown where a run ends."""

RecipeName = Annotated[str, typer.Argument(help="a name from `burnish recipes`, or a .toml file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="change a setting; may be given again"),
]
Seed = Annotated[int | None, typer.Option(help="the run's seed")]
Out = Annotated[Path | None, typer.Option(help="a new run directory", show_default="runs/RECIPE-N")]
RunPath = Annotated[Path, typer.Argument(help="a run directory")]
Quiet = Annotated[bool, typer.Option("--quiet", help="a line per step instead of a display")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"burnish {version('burnish')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks of errors")] = False,
) -> None:
    """Global options; ``main`` reads --debug itself, wherever it stands."""


@app.command()
def recipes() -> None:
    """List the recipes, a line each."""
    from burnish import config

    table = Table.grid(padding=(0, 2))
    for name in config.list_recipes():
        table.add_row(f"[bold]{name}", escape(config.load(name).description))
    out_console.print(table)


@app.command()
def plan(
    recipe: RecipeName, overrides: Overrides = None, seed: Seed = None, out: Out = None
) -> None:
    """Print what a recipe will compute, about how long it takes here, and what it lacks."""
    from burnish import build, config, machine
    from burnish.plan import plan as make_plan
    from burnish.runs.directory import claimed

    loaded = config.load(recipe, overrides or (), seed=seed)
    rates = None
    with claimed(out, loaded.name) as where, Display(loaded.name, err_console) as display:
        display(Progress("load", "loading torch to measure the model and the machine"))
        loaded, size, lacks = build.look(loaded, where)
        if size is not None:
            device = None if loaded.device == "auto" else loaded.device
            rates = machine.measure(0.3, precision=loaded.train.precision, device=device)
    _print_sections(make_plan(loaded, where, size, rates))
    if lacks:
        _print_sections([("it can't run yet", [("lacks", str(problem)) for problem in lacks])])


@app.command()
def doctor() -> None:
    """Describe this machine, the optional parts, and what each recipe would take here."""
    from burnish import doctor

    with Display("doctor", err_console) as display:
        display(Progress("load", "loading torch and measuring the machine"))
        sections = doctor.examine()
    _print_sections(sections)


def _print_sections(sections: Iterable[Section]) -> None:
    for title, rows in sections:
        out_console.print(f"[bold]{title}")
        table = Table.grid(padding=(0, 2))
        for what, value in rows:
            table.add_row(f"  {escape(what)}", escape(value))
        out_console.print(table)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Annotated[
        Path | None, typer.Option(help="prompts of your own: a JSONL file or a directory")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="a reward of your own, FILE.py:NAME")] = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe: sample, score, learn, and leave a run directory."""
    from burnish import api, config

    own = []
    if data is not None or reward is not None:
        own = api.own_task(recipe, data=data, reward=reward)
    _run(config.load(recipe, [*own, *(overrides or ())], seed=seed), out, quiet=quiet)


@app.command()
def demo(
    full: Annotated[bool, typer.Option("--full", help="run the full recipe, however long")] = False,
    form: Annotated[
        str | None, typer.Option(help="small, medium or full; default: by speed")
    ] = None,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Watch a language model learn, in the form that this machine finishes in minutes."""
    from burnish import demo

    with Display("demo", err_console) as display:
        display(Progress("load", "loading torch and measuring this machine"))
        choice = demo.choose("full" if full else form, seed=seed)
    _print_sections([("demo", demo.describe(choice))])
    _run(choice.recipe, out, quiet=quiet)


@app.command()
def sft(
    recipe: Annotated[str, typer.Argument(help="a name from `burnish recipes`, or a file")] = "sft",
    data: Annotated[
        Path | None, typer.Option(help="rows with prompt and answer: a JSONL file, or a directory")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a name, a directory or hf:ORG/NAME")] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Learn written answers, prompt by prompt: a warm start for `burnish train`."""
    from burnish import api, config

    own = api.own_pairs(recipe, data=data, model=model)
    _run(config.load(recipe, [*own, *(overrides or ())], seed=seed), out, quiet=quiet)


def _run(recipe: Recipe, out: Path | None, *, quiet: bool) -> None:
    from burnish import api
    from burnish.runs.directory import claimed

    with claimed(out, recipe.name) as path:
        with _live(path, quiet=quiet, is_claimed=out is None) as (show, stop):
            api.train(recipe, out=path, show=show, stop=stop)
        _show_end(path)


@app.command()
def resume(
    run: RunPath,
    overrides: Overrides = None,
    from_checkpoint: Annotated[
        str | None, typer.Option("--from", help="a checkpoint's name, instead of the last")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="resume although the machine, packages or data changed")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint, bit for bit."""
    from burnish import api

    with _live(run, quiet=quiet) as (show, stop):
        api.resume(
            run,
            overrides=overrides or (),
            from_checkpoint=from_checkpoint,
            anyway=anyway,
            show=show,
            stop=stop,
        )
    _show_end(run)


@app.command()
def report(run: RunPath) -> None:
    """Write a run's report.html, also while it runs."""
    from burnish.runs.report import write_report

    out_console.print(f"report: {escape(str(write_report(run)))}")


@app.command()
def watch(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_DIR", help="a run directory, or a directory of runs")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="a port of 127.0.0.1; 0 takes a free one")
    ] = 8420,
) -> None:
    """Show runs in a browser while they run, until Ctrl-C."""
    from burnish.runs.watch import Server

    with Server(path, port) as server, suppress(KeyboardInterrupt):
        out_console.print(f"watching {escape(str(path))} at {server.url}", soft_wrap=True)
        server.serve_forever()


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="a new directory")],
    which: Annotated[str, typer.Option(help="best, last, or a checkpoint's name")] = "best",
) -> None:
    """Write a run's model as a Hugging Face directory."""
    from burnish import api

    with Display(run.name, err_console) as display:
        chosen = api.export(run, out, which=which, show=display)
    out_console.print(f"{escape(chosen.name)} of {escape(str(run))} → {escape(str(out))}")


@app.command(name="eval")
def evaluate(
    recipe: Annotated[str | None, typer.Argument(help="a recipe, or a run's directory")] = None,
    task: Annotated[
        str | None, typer.Option(help="a recipe's or a task's name, instead of RECIPE")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="a name, a directory, a run; several: side by side")
    ] = None,
    samples: Annotated[int | None, typer.Option("-n", "--samples", help="per prompt")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="per response")] = None,
    shots: Annotated[int | None, typer.Option(help="solved rows before each prompt")] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="a directory; an evaluation that was begun there goes on")
    ] = None,
) -> None:
    """Measure models on held-out prompts; every response is kept, and a report is written."""
    from burnish import api, build, preflight

    named = recipe or task
    if named is None or (recipe and task):
        raise ConfigError("give a RECIPE or --task NAME, one of the two")
    asked = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens}
    own = [f"validation.{k}={v}" for k, v in (asked | {"shots": shots}).items() if v is not None]
    models: list[str | None] = [*model] if model else [None]
    settings = [*own, *(overrides or ())]
    chosen = [
        build.evaluation_recipe(named, model=m, overrides=settings, seed=seed) for m in models
    ]
    for one in chosen:
        preflight.check(one)
    results = []
    with _shown(named, "stopped; the same command goes on where it was") as show:
        if out is None:
            paths = [build.evaluation_path(one, show) for one in chosen]
        elif len(chosen) == 1:
            paths = [out]
        else:
            paths = [out / str(i) for i in range(1, len(chosen) + 1)]
        for one, path in zip(chosen, paths, strict=True):
            results.append(api.evaluate(one, out=path, show=show).figures)
    table = Table.grid(padding=(0, 2))
    for name in dict.fromkeys(name for figures in results for name in figures):
        table.add_row(name, *(f"{figures.get(name, math.nan):z.4f}" for figures in results))
    out_console.print(table)
    page = paths[0] / "report.html"
    if len(paths) > 1:
        from burnish.runs.results import write_evaluation

        page = write_evaluation(paths, (out or paths[0]) / "side-by-side.html")
    out_console.print(f"report: {escape(str(page))}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run directories")],
    out: Annotated[Path, typer.Option(help="the picture to write")] = Path("compare.png"),
    metric: Annotated[
        list[str] | None, typer.Option(help="a metric of metrics.jsonl to draw; may be given again")
    ] = None,
) -> None:
    """Overlay runs in one picture and tabulate what they came to; evaluations become one page.

    Runs that differ only in their seed share a line. Reward and KL (nats per token) are means over
    the last 10 steps, or over the last third of a short run; the rest is the last validation. The
    picture has the reward and the KL, or the loss where not all runs measured a KL, or the metrics
    that are named.
    """
    import numpy as np

    from burnish.runs.plots import draw_comparison, ends
    from burnish.runs.results import write_evaluation

    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is not a directory; choose another --out")
    if all((run / "results.jsonl").exists() for run in runs):
        if metric:
            raise RunError("--metric draws what training runs measured; these are evaluations")
        page = write_evaluation(runs, out.with_suffix(".html"))
        return out_console.print(f"report: {escape(str(page))}")
    curves = [(curve, ends(curve)) for curve in draw_comparison(runs, out, metric or ())]
    shown = [name for name in curves[0][1] if any(np.isfinite(e[name]).any() for _, e in curves)]

    def line(what: object, values: Iterable[object]) -> None:
        out_console.print(f"  {what!s:8}" + "".join(f"{value!s:>10}" for value in values))

    line("", shown)
    for curve, end in curves:
        out_console.print(escape(curve.label), soft_wrap=True)
        columns = [end[name] for name in shown]
        for seed, *values in sorted(zip(curve.seeds, *columns, strict=True)):
            line(f"seed {seed}", ("–" if np.isnan(value) else f"{value:z.3f}" for value in values))
        if len(curve.seeds) > 1:
            for name, over in (("mean", np.mean), ("std", np.std)):
                line(name, (f"{over(values):z.3f}" for values in columns))
    return out_console.print(f"picture: {escape(str(out))}")


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="what to answer")] = None,
    model: Annotated[str, typer.Option(help="a name, a directory or hf:ORG/NAME")] = "smollm2-135m",
    samples: Annotated[int, typer.Option("-n", "--samples", help="responses per prompt")] = 1,
    prompts: Annotated[
        Path | None, typer.Option(help='a file: a prompt a line, or .jsonl with "prompt"')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write what was sampled as JSONL")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    max_tokens: Annotated[int, typer.Option()] = 128,
    min_tokens: Annotated[int, typer.Option()] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="a text to stop at; repeatable")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="do not use the chat template")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="only the speed, no text")] = False,
) -> None:
    """Sample responses from a model; the first one is shown as it is made."""
    from burnish import api
    from burnish.loops.generate import read_prompts
    from burnish.runs.directory import replace_file

    if (prompt is None) == (prompts is None):
        raise ConfigError("give a PROMPT or --prompts FILE, one of the two")
    given = [prompt] if prompt is not None else read_prompts(prompts or Path())
    begun: list[bool] = []
    speeds = [0.0]

    def write(text: str) -> None:
        if not begun:
            display.close()  # from now on the text itself moves
            _write_heading(0, samples, len(given))
            begun.append(True)
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def show(progress: Progress) -> None:
        speeds.append(progress.tokens_per_second or speeds[-1])
        display(progress)

    with Display(model, err_console) as display:
        answers = api.generate(
            given,
            model=model,
            n=samples,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop or (),
            seed=seed,
            chat=not raw,
            dtype=dtype,
            device=device,
            show=show,
            write=(lambda text: None) if quiet else write,
        )
    if not quiet:
        write("\n")
        for number, answer in enumerate(answers[1:], 1):
            _write_heading(number, samples, len(given))
            sys.stdout.write(printable(answer.text) + "\n")
    if out is not None:
        replace_file(out, "".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    tokens = sum(len(answer.token_ids) for answer in answers)
    err_console.print(
        f"{len(answers)} samples, {tokens} tokens: {speeds[-1]:.0f} tokens per second"
    )


def _write_heading(number: int, samples: int, prompts: int) -> None:
    if samples * prompts > 1:
        sys.stdout.write(f"── prompt {number // samples + 1}, sample {number % samples + 1} ──\n")


@contextmanager
def _shown(name: str, stopped: str) -> Iterator[Show]:
    """A display; Ctrl-C ends the command with the given words."""
    try:
        with Display(name, out_console) as display:
            yield display
    except KeyboardInterrupt:
        out_console.print(stopped, soft_wrap=True)
        _leave(128 + signal.SIGINT)


@contextmanager
def _live(
    path: Path, *, quiet: bool, is_claimed: bool = False
) -> Iterator[tuple[Show, Callable[[], bool]]]:
    """A display of a run, and whether a signal asks it to stop (see ``interrupt``).

    is_claimed: this process made the directory, so that it goes again if nothing is in it.
    """
    from burnish.runs import directory, status

    with Display(path.name, out_console, quiet=quiet) as display:

        def stop_at_once(code: int) -> NoReturn:
            display.close()
            out_console.print(escape(_what_is_left(path)), soft_wrap=True)
            status.mark_stopped(path)
            if is_claimed:
                directory.unclaim(path)
            _leave(code)

        with Interrupts(display.say, stop_at_once) as interrupts:

            def show(progress: Progress) -> None:
                interrupts.begun |= progress.phase in STEP_PHASES
                display(progress)

            try:
                yield show, lambda: interrupts.number is not None
            except KeyboardInterrupt:
                stop_at_once(128 + (interrupts.number or signal.SIGINT))
    if interrupts.number is not None and not (path / "summary.json").exists():
        again = f"burnish resume {path}"
        out_console.print(f"stopped and saved; continue with: {escape(again)}", soft_wrap=True)
        _leave(128 + interrupts.number)


def _leave(code: int) -> NoReturn:
    """Ends the process now: the usual way out waits for a download's threads and takes torch apart,
    which can take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _what_is_left(path: Path) -> str:
    """Words for what a run that was stopped at once leaves on the disk."""
    from burnish.runs import checkpoints

    if not (path / "recipe.toml").is_file():
        return "stopped before the first step was done: nothing was learned, and nothing is kept"
    saved, again = checkpoints.latest(path), f"burnish resume {path}"
    if saved is None:
        return f"stopped at once; no checkpoint was saved yet; begin again with: {again}"
    return f"stopped at once; the last checkpoint is {saved.name}; continue from it with: {again}"


def _show_end(path: Path) -> None:
    from burnish.runs.directory import read_json

    end = read_json(path / "summary.json")
    seconds: dict[str, float] = end["seconds"]
    measure = "reward" if "responses" in end else "loss"
    sampled = f"{counted(end['responses'], 'response')}, " if "responses" in end else ""
    first, last = (end.get(f"{measure}_{which}") for which in ("first", "last"))
    moved = "no response was graded" if first is None else f"{measure} {first:z.2f} → {last:z.2f}"
    out_console.print(
        f"{moved}, {sampled}"
        f"{counted(end['gradient_steps'], 'gradient step')}, {seconds['step']:.1f} s"
    )
    if "validation" in end:
        held = end["validation"]
        kl = end.get("kl_held_out_k1")
        drift = "" if kl is None else f" at {kl:z.2f} nats per token"
        out_console.print(
            f"held out {held['first']:z.3f} → {held['last']:z.3f}{drift} "
            f"(best {held['best']:z.3f} at step {held['best_step']})"
        )
    split = sorted(((s, name) for name, s in seconds.items() if name != "step"), reverse=True)
    shares = ", ".join(f"{name} {s / seconds['step']:.0%}" for s, name in split if s > 0)
    out_console.print(f"time: {shares}")
    for pair in end["before_and_after"]:
        prompt = fill(
            _line(pair["prompt"]),
            out_console.width,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        out_console.print(escape(prompt), soft_wrap=True)
        for side in ("before", "after"):
            reward = pair[f"reward_{side}"]
            mark = "[no grade]" if reward is None else f"[{reward:zg}]"
            said = _line(pair[side])
            said = f"{said[:SAID]} …" if len(said) > SAID else said
            out_console.print(escape(f"    {side:6} {mark} {said}"), soft_wrap=True)
    out_console.print(f"report: {escape(str(path / 'report.html'))}")


def _line(text: str) -> str:
    """What a model wrote, on one line and without control characters."""
    return printable(text).replace("\n", "⏎")


def main() -> None:
    """Runs the command line; an error the user can act on is one message, not a traceback."""
    share_cores()
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=arguments, prog_name="burnish")
    except BurnishError as error:
        if "--debug" in sys.argv:
            raise
        err_console.print(f"[red]error:[/] {escape(printable(str(error)))}", soft_wrap=True)
        sys.exit(1)
