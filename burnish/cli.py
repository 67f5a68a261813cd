"""The command line: what is typed and what is shown. The work is done elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burnish.errors import BurnishError, RunError

if TYPE_CHECKING:
    from burnish.loops.sync import Step

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with reinforcement learning.",
)
out_console = Console(highlight=False)

RecipeName = Annotated[str, typer.Argument(help="a name from `burnish recipes`, or a .toml file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="change a setting; may be given again"),
]
Seed = Annotated[int | None, typer.Option(help="the run's seed")]
Out = Annotated[Path | None, typer.Option(help="a new run directory", show_default="runs/RECIPE-N")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress bar")]


@app.callback()
def options(
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
    """Print what a recipe will compute, without running it."""
    from burnish import config
    from burnish.plan import plan as make_plan
    from burnish.runs.directory import next_directory

    loaded = config.load(recipe, overrides or (), seed=seed)
    where = out or next_directory(Path("runs"), loaded.name)
    for title, rows in make_plan(loaded, where):
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
    quiet: Quiet = False,
) -> None:
    """Run a recipe: sample, score, learn, and leave a run directory."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from burnish import api, config
    from burnish.runs.directory import next_directory

    loaded = config.load(recipe, overrides or (), seed=seed)
    path = out or next_directory(Path("runs"), loaded.name)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("reward {task.fields[reward]}"),
    )
    with Progress(*columns, console=out_console, disable=quiet) as progress:
        bar = progress.add_task(f"train {loaded.name}", total=loaded.train.steps, reward="–")

        def show(step: Step) -> None:
            progress.update(bar, advance=1, reward=f"{step.metrics['rollout/reward']:.3f}")

        try:
            api.train(loaded, out=path, on_step=show)
        except KeyboardInterrupt:
            progress.stop()
            out_console.print(f"interrupted; the finished steps are in {escape(str(path))}")
            raise typer.Exit(130) from None
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    _show_summary(path, summary)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run directories")],
    out: Annotated[Path, typer.Option(help="the picture to write")] = Path("compare.png"),
) -> None:
    """Overlay runs in one picture; runs that differ only in their seed share a line."""
    from burnish.runs.plots import draw_comparison, final_reward

    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is not a directory; choose another --out")
    table = Table.grid(padding=(0, 2))
    for curve in draw_comparison(runs, out):
        mean, spread = final_reward(curve)
        seeds = ", ".join(map(str, sorted(curve.seeds)))
        table.add_row(escape(curve.label), f"reward {mean:.2f} ± {spread:.2f}", f"seeds {seeds}")
    out_console.print(table)
    out_console.print(f"picture: {escape(str(out))}")


def _show_summary(path: Path, summary: dict[str, object]) -> None:
    seconds = summary["seconds"]
    assert isinstance(seconds, dict)
    out_console.print(
        f"reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f} "
        f"(best possible {summary['best_possible_reward']:.2f}), "
        f"{summary['responses']:,} responses, {summary['gradient_steps']:,} gradient steps, "
        f"{seconds['step']:.1f} s"
    )
    greedy = summary["greedy"]
    assert isinstance(greedy, list)
    for answer in greedy[:8]:
        mark = "sorted" if answer["sorted"] else f"reward {answer['reward']:g}"
        out_console.print(escape(f"  {answer['prompt']}  →  {answer['response']}   {mark}"))
    files = "metrics.jsonl, log.txt, summary.json, curves.png"
    out_console.print(f"run directory: {escape(str(path))} ({files})")


def main() -> None:
    """Runs the command line; an error the user can act on is one message, not a traceback."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(args=arguments, prog_name="burnish")
    except BurnishError as error:
        if "--debug" in sys.argv:
            raise
        console = Console(stderr=True, highlight=False)
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
