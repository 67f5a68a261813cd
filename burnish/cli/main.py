"""The command line: options in, words out. ``api`` and ``build`` do the work."""

from __future__ import annotations

import math
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from burnish import api, config, engine_commands, preflight, printing, serve, torchrun
from burnish.display import Display
from burnish.errors import BurnishError
from burnish.interrupt import Interrupts
from burnish.plan import plan as make_plan
from burnish.printing import print_sections, print_table, say
from burnish.progress import tell
from burnish.runs import directory, resuming
from burnish.runs.run import answers, outcome
from burnish.schema.recipe import Recipe
from burnish.threads import share_cores
from burnish.wording import printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with reinforcement learning.",
)
app.command()(serve.serve)
app.add_typer(engine_commands.app, name="engine")

RecipeName = Annotated[str, Argument(help="a name from `burnish recipes`, or a .toml file")]
Overrides = Annotated[list[str] | None, Option("--set", metavar="A.B=C", help="may be repeated")]
Seed = Annotated[int | None, Option(help="the run's seed")]
Out = Annotated[Path | None, Option(help="a new run directory", show_default="runs/RECIPE-N")]
Data = Annotated[Path | None, Option(help="rows of your own: a JSONL file or a directory")]
RunPath = Annotated[Path, Argument(help="a run directory")]
Runtime = Annotated[str | None, Option(help="local, ray or torchrun")]
Address = Annotated[str | None, Option(help="a Ray cluster to join, such as auto or HOST:PORT")]
Quiet = Annotated[bool, Option("--quiet", help="a line per step instead of a display")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"burnish {version_of('burnish')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options without a command."""


@app.command()
def recipes() -> None:
    """List the recipes and presets, a line each."""
    presets = "\npresets, which go on any recipe by --set preset=NAME"
    for folder, title in {config.RECIPES: "recipes", config.PRESETS: presets}.items():
        say(title)
        found = {name: config.read_recipe(name, folder) for name in config.list_recipes(folder)}
        print_table((f"[bold]{n}", escape(table["description"])) for n, table in found.items())


@app.command()
def plan(
    recipe: RecipeName, overrides: Overrides = None, seed: Seed = None, out: Out = None
) -> None:
    """Print what a recipe will compute, about how long it takes here, and what it lacks."""
    loaded = config.load(recipe, _changes(overrides, seed=seed))
    rates = None
    with directory.claimed(out, loaded.name) as where, api.shown(None, loaded.name):
        tell("load", "loading torch to measure the model and the machine")
        from burnish import build, machine

        loaded, size, lacks = build.look(loaded, where)
        if size is not None:
            device = None if loaded.device == "auto" else loaded.device
            rates = machine.measure(0.3, precision=loaded.train.precision, device=device)
    print_sections(make_plan(loaded, where, size, rates))
    if lacks:
        print_sections([("it can't run yet", [("lacks", str(problem)) for problem in lacks])])


@app.command()
def doctor() -> None:
    """Describe this machine, the optional parts, and what each recipe would take here."""
    with api.shown(None, "doctor"):
        tell("load", "loading torch and measuring the machine")
        from burnish import doctor

        sections = doctor.examine()
    print_sections(sections)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    reward: Annotated[str | None, Option(help="a reward of your own, FILE.py:NAME")] = None,
    runtime: Runtime = None,
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe: sample, score, learn, and leave a run directory."""
    changes = _changes(overrides, seed=seed, runtime=_runtime(runtime, address))
    _run(api.recipe_of(recipe, changes, data=data, reward=reward), out, quiet=quiet)


@app.command()
def sft(
    recipe: RecipeName = "sft",
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    runtime: Runtime = None,
    quiet: Quiet = False,
) -> None:
    """Learn written answers, prompt by prompt: a warm start for `burnish train`."""
    changes = _changes(overrides, task="pairs", seed=seed, runtime=_runtime(runtime))
    _run(api.recipe_of(recipe, changes, data=data), out, quiet=quiet)


@app.command()
def reward(
    recipe: RecipeName = "reward",
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Learn a reward from pairs of responses, a chosen and a rejected one each."""
    changes = _changes(overrides, task="preferences", seed=seed)
    _run(api.recipe_of(recipe, changes, data=data), out, quiet=quiet)


@app.command()
def demo(
    full: Annotated[bool, Option("--full", help="run the full recipe, however long")] = False,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Watch a language model learn, in the form that this machine finishes in minutes."""
    with api.shown(None, "demo"):
        tell("load", "loading torch and measuring this machine")
        from burnish import demo

        recipe, lines = demo.choose(is_full=full, seed=seed)
    print_sections([("demo", lines)])
    _run(recipe, out, quiet=quiet)


def _run(recipe: Recipe, out: Path | None, *, quiet: bool) -> None:
    if torchrun.is_follower(recipe, sys.argv[1:]):
        return torchrun.obey(recipe)
    with directory.claimed(out, recipe.name) as path:
        with _live(path, quiet=quiet) as live:
            api.train(recipe, out=path, show=live.show, stop=live.is_asked)
        return _show_end(path)


@app.command()
def resume(
    run: RunPath,
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, Option("--from", help="a checkpoint's name")] = None,
    anyway: Annotated[bool, Option("--anyway", help="though machine or data changed")] = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint, bit for bit."""
    directory.read_recipe(run)  # it raises if there is no run
    recipe = resuming.resumed_recipe(run, overrides or ())
    if torchrun.is_follower(recipe, sys.argv[1:]):
        return torchrun.obey(recipe)
    with _live(run, quiet=quiet) as live:
        api.resume(
            run,
            overrides=overrides or (),
            from_checkpoint=checkpoint,
            anyway=anyway,
            show=live.show,
            stop=live.is_asked,
        )
    return _show_end(run)


@app.command()
def chaos(
    recipe: RecipeName,
    overrides: Overrides = None,
    kills: Annotated[int, Option(min=1, help="actors to kill")] = 3,
    pause: Annotated[float, Option(min=0.1, help="seconds between two kills at most")] = 10.0,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe on Ray, kill its actors at random moments, and judge what was learned."""
    from burnish.chaos import Killer, verdict

    loaded = api.recipe_of(recipe, _changes(overrides, seed=seed, runtime="ray"))
    with directory.claimed(out, loaded.name) as path:
        with _live(path, quiet=quiet) as live:
            killer = Killer(path, kills, loaded.seed, pause)
            killer.start()
            try:
                api.train(loaded, out=path, show=live.show, stop=live.is_asked)
            finally:
                killer.end()
        found = verdict(path, loaded)
        say(f"killed: {', '.join(killer.killed) or 'nobody, the run was too short'}\n{found}")
    raise typer.Exit(1 if found.problems else 0)


@app.command()
def sweep(
    file: Annotated[Path, Argument(help="a TOML file with recipes, seeds, and a grid or variants")],
    out: Annotated[Path | None, Option(help="for its runs", show_default="runs/NAME")] = None,
    parallel: Annotated[int | None, Option(min=1, help="runs at once, on Ray")] = None,
    gpus: Annotated[float, Option("--gpus-per-run", min=0, help="a run's share of GPUs")] = 0.0,
) -> None:
    """Run recipes × overrides × seeds and draw their curves in one page; repeated, it goes on."""
    from burnish import sweep

    out = out or Path("runs") / sweep.read(file).name
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        failed = sweep.run(file, out, say, parallel, gpus)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    told = [f"failed: {name}: {error}" for name, error in failed.items()]
    say("\n".join([*told, f"report: {out / sweep.PAGE}"]))
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(run: RunPath) -> None:
    """Write a run's report.html, also while it runs."""
    from burnish.runs.report import write_report

    say(f"report: {write_report(run)}")


@app.command()
def watch(
    path: Annotated[Path, Argument(help="a run, or a directory of runs")] = Path("runs"),
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one")] = 8420,
) -> None:
    """Show runs in a browser while they run, until Ctrl-C."""
    from burnish.runs.watch import Server

    with Server(path, port) as server, suppress(KeyboardInterrupt):
        say(f"watching {path} at {server.url}")
        server.serve_forever()


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, Argument(help="a new directory")],
    which: Annotated[str, Option(help="best, last, or a checkpoint's name")] = "best",
    adapter: Annotated[bool, Option("--adapter", help="the adapter alone, as PEFT's")] = False,
) -> None:
    """Write a run's model as a Hugging Face directory."""
    say(f"{api.export(run, out, which=which, adapter=adapter).name} of {run} → {out}")


@app.command(name="eval")
def evaluate(
    recipe: Annotated[str, Argument(help="a recipe, or a run's directory")],
    model: Annotated[list[str] | None, Option(help="may be repeated: side by side")] = None,
    samples: Annotated[int | None, Option("-n", "--samples", help="per prompt")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, Option(help="per response")] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Annotated[Path | None, Option(help="a directory for the responses")] = None,
) -> None:
    """Measure models on held-out prompts; every response is kept, and a report is written."""
    asked = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens}
    named = {f"validation.{key}": value for key, value in asked.items()}
    changes = _changes(overrides, seed=seed, **named)
    chosen = [api.evaluation_recipe(recipe, name, changes) for name in model or (None,)]
    for one in chosen:  # before the first of them takes its time
        preflight.check(one)
    several = len(chosen) > 1
    done = [
        api.evaluate(one, out=out / str(number) if out and several else out)
        for number, one in enumerate(chosen, 1)
    ]
    names = dict.fromkeys(name for measured in done for name in measured.figures)
    print_table(
        [name, *(f"{measured.figures.get(name, math.nan):z.4f}" for measured in done)]
        for name in names
    )
    paths = [measured.path for measured in done]
    page = paths[0] / "report.html"
    if several:
        from burnish.runs.results import write_evaluation

        page = write_evaluation(paths, (out or paths[0]) / "side-by-side.html")
    say(f"report: {page}")


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(help="run directories")],
    out: Annotated[Path, Option(help="the page to write")] = Path("compare.html"),
) -> None:
    """Lay the curves of runs over each other in one page and tabulate their results; evaluations
    stand side by side.

    Runs that differ only in their seed share a line. Reward and KL (nats per token) are means over
    the last 10 steps, or over the last third of a short run; the rest is the last validation.
    """
    from burnish.runs.comparison import tabulate, write_comparison
    from burnish.runs.results import write_evaluation

    if all((run / "results.jsonl").exists() for run in runs):
        return say(f"report: {write_evaluation(runs, out)}")
    print_table(map(escape, row) for row in tabulate(write_comparison(runs, out)))
    return say(f"report: {out}")


@app.command()
def generate(
    prompt: Annotated[list[str], Argument(help="texts to answer")],
    model: Annotated[str, Option(help="a name, directory or run")] = "smollm2-135m",
    adapter: Annotated[str | None, Option(help="a directory in PEFT's layout")] = None,
    samples: Annotated[int, Option("-n", "--samples", help="responses per prompt")] = 1,
    temperature: Annotated[float, Option(help="0 is greedy")] = 1.0,
    max_tokens: Annotated[int, Option(help="per response")] = 128,
    seed: Annotated[int, Option(help="of the draws")] = 0,
    raw: Annotated[bool, Option("--raw", help="do not use the chat template")] = False,
) -> None:
    """Sample responses from a model and print them."""
    how: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    how |= {"model": {"name": model, "adapter": adapter}, "n": samples, "chat": not raw}
    said = api.generate(prompt, **how)
    for number, answer in enumerate(said):
        if len(said) > 1:
            say(f"── prompt {number // samples + 1}, sample {answer.sample + 1} ──")
        say(printable(answer.text))


def _changes(overrides: list[str] | None, **options: Any) -> list[str | config.Table]:
    """Options of a command and --set as changes to a recipe; options that are None are left out."""
    given = {key: value for key, value in options.items() if value is not None}
    return [given, *(overrides or ())]


def _runtime(name: str | None, address: str | None = None) -> config.Table | None:
    """The section of a recipe that --runtime and --address stand for; an address means Ray, and a
    process that torchrun started learns with the others."""
    name = name or ("torchrun" if torchrun.is_started() else address and "ray")
    found = {"name": name, "address": address}
    return {key: value for key, value in found.items() if value is not None} or None


def _live(path: Path, *, quiet: bool) -> Interrupts:
    return Interrupts(path, Display(path.name, printing.out_console, quiet=quiet))


def _show_end(path: Path) -> None:
    """Prints how a run went, some answers before and after, and where its report is."""
    end = directory.read_json(path / "summary.json")
    say("\n".join([*outcome(end), *answers(end), f"report: {path / 'report.html'}"]))


def main() -> None:
    """Runs the command line; an error the user can act on is one message, not a traceback."""
    share_cores()
    try:
        app(prog_name="burnish")
    except (BurnishError, OSError) as error:
        told = escape(printable(str(error)))
        printing.err_console.print(f"[red]error:[/] {told}", soft_wrap=True)
        if torchrun.is_started():
            os._exit(1)  # the usual way out takes apart groups that may wait for a dead rank
        sys.exit(1)
