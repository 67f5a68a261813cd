"""The command line: it parses options, calls ``burnish.api`` and prints results."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from burnish import api
from burnish.cli import engine, tables
from burnish.cli.chat import chat_command
from burnish.cli.interrupt import Interrupts
from burnish.cli.serve import serve_command
from burnish.cli.tables import print_sections, print_table, print_text
from burnish.console.display import Display
from burnish.console.progress import tell
from burnish.console.text import printable
from burnish.errors import BurnishError, ConfigError, RunError
from burnish.launch import torchrun
from burnish.launch.preflight import find_problems, raise_problems
from burnish.launch.resolve import survey
from burnish.machine.threads import share_cores
from burnish.model import hub
from burnish.recipe.load import (
    PRESETS,
    RECIPES,
    Table,
    list_recipes,
    read_recipe_table,
)
from burnish.recipe.plan import make_plan
from burnish.recipe.recipe import Recipe
from burnish.runs import directory, failure, resuming
from burnish.runs.run import answers, outcome, unsaved_best

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with reinforcement learning.",
)
app.command("serve")(serve_command)
app.command("chat")(chat_command)
app.add_typer(engine.app, name="engine")

RecipeName = Annotated[str, Argument(help="a name from `burnish recipes` or a .toml file")]
Overrides = Annotated[list[str] | None, Option("--set", metavar="A.B=C", help="may be repeated")]
Seed = Annotated[int | None, Option(help="the run's seed")]
Out = Annotated[Path | None, Option(help="a new run directory", show_default="runs/RECIPE-N")]
Data = Annotated[str | None, Option(help="your own rows: a file, a directory or hf:ORG/NAME")]
RewardOption = Annotated[
    list[str] | None,
    Option(
        "--reward",
        help="your own reward function, FILE.py:NAME; several are summed",
        metavar="REWARD",
    ),
]
EnvironmentOption = Annotated[
    str | None,
    Option("--environment", help="your own environment for multi-turn episodes, FILE.py:NAME"),
]
AgentOption = Annotated[
    str | None,
    Option("--agent", help="your own agent, which calls the policy as an API, FILE.py:NAME"),
]
RunPath = Annotated[Path, Argument(help="a run directory")]
Runtime = Annotated[str | None, Option(help="local, ray or torchrun")]
Address = Annotated[str | None, Option(help="a Ray cluster to join, such as auto or HOST:PORT")]
NoteOption = Annotated[str | None, Option("--note", help="a note about the run")]
TagsOption = Annotated[list[str] | None, Option("--tag", help="a tag; may be repeated")]
Quiet = Annotated[bool, Option("--quiet", help="one line per step, and every 30 s without one")]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"burnish {version_of('burnish')}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[bool, Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Define the options that need no command."""


@app.command("recipes")
def recipes_command() -> None:
    """List the recipes and presets."""
    presets = "\npresets, applied to any recipe with --set preset=NAME"
    for folder, title in {RECIPES: "recipes", PRESETS: presets}.items():
        print_text(title)
        found = {name: read_recipe_table(name, folder) for name in list_recipes(folder)}
        print_table((f"[bold]{n}", escape(table["description"])) for n, table in found.items())


@app.command("settings")
def settings_command(
    prefix: Annotated[
        str, Argument(help="a section or setting, such as rollout, or a name from TRL or verl")
    ] = "",
    schema: Annotated[
        bool, Option("--schema", help="print a JSON schema of recipe files, for editors")
    ] = False,
    markdown: Annotated[bool, Option("--markdown", help="print docs/settings.md")] = False,
) -> None:
    """Print settings with their type, default, meaning, and the recipes that set them."""
    from burnish.recipe import settings

    if schema:
        from burnish.recipe.schema import recipe_schema

        return typer.echo(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
    if markdown:
        return typer.echo(settings.settings_page(), nl=False)
    return typer.echo(settings.answer_settings(prefix))


@app.command("plan")
def plan_command(
    recipe: RecipeName,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    reward: RewardOption = None,
    environment: EnvironmentOption = None,
    agent: AgentOption = None,
) -> None:
    """Print what a recipe will compute, its estimated duration, and its missing requirements."""
    changes = _changes(overrides, seed=seed)
    given: dict[str, Any] = {"data": data, "reward": _one_or_all(reward)}
    loaded = api.recipe_of(recipe, changes, environment=environment, agent=agent, **given)
    rates = None
    with directory.claimed(out, loaded.name) as where, api.progress_display(None, loaded.name):
        tell("load", "loading torch to measure the model and the machine")
        from burnish.launch.local import look_at_prompts
        from burnish.machine import hardware

        found = look_at_prompts(survey(loaded, where))
        loaded, size = found.recipe, found.size
        if size is not None:
            device = None if loaded.device == "auto" else loaded.device
            rates = hardware.measure_rates(0.3, precision=loaded.train.precision, device=device)
    print_sections(make_plan(loaded, where, size, rates))
    if found.problems:
        problems = [("lacks", str(problem)) for problem in found.problems]
        print_sections([("the recipe can't run yet", problems)])
        raise typer.Exit(1)


@app.command("data")
def data_command(
    name: Annotated[str | None, Argument(help="without a name, the names are listed")] = None,
    out: Annotated[Path | None, Option(help="a new directory", show_default="NAME")] = None,
    rows: Annotated[int | None, Option(min=2, help="in all; a fifth is for validation")] = None,
    model: Annotated[str | None, Option(help="a name, directory or run")] = None,
    samples: Annotated[int | None, Option("-n", "--samples", min=1, help="per prompt")] = None,
    temperature: Annotated[float | None, Option(min=0, help="of the responses")] = None,
    max_tokens: Annotated[int | None, Option(min=1, help="per response")] = None,
    seed: Annotated[int | None, Option(help="seed of the rows")] = None,
) -> None:
    """Write the rows that built-in recipes learn from."""
    from burnish.cli.data import DATA_MAKERS, data_options, write_data

    if name is None:
        for one, (make, about, _) in DATA_MAKERS.items():
            flags = (f"--{key} {default}" for key, default in data_options(make).items())
            print_text(f"burnish data {one}: {about}\n  {' '.join(flags)}")
        return
    options: dict[str, Any] = {"rows": rows, "model": model, "samples": samples, "seed": seed}
    options |= {"temperature": temperature, "max_tokens": max_tokens}
    print_text(f"learn from them: {write_data(name, out, options)}")


@app.command("doctor")
def doctor_command() -> None:
    """Describe this machine, the optional parts, and each recipe's duration and requirements."""
    with api.progress_display(None, "doctor"):
        tell("load", "loading torch and measuring the machine")
        from burnish.cli import doctor

        sections = doctor.examine()
    print_sections(sections)


@app.command("train")
def train_command(
    recipe: RecipeName,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    reward: RewardOption = None,
    environment: EnvironmentOption = None,
    agent: AgentOption = None,
    runtime: Runtime = None,
    address: Address = None,
    note: NoteOption = None,
    tags: TagsOption = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe: sample, grade and learn, and record everything in a run directory."""
    changes = _changes(overrides, seed=seed, runtime=_runtime(runtime, address))
    given: dict[str, Any] = {"data": data, "reward": _one_or_all(reward)}
    loaded = api.recipe_of(recipe, changes, environment=environment, agent=agent, **given)
    _run(loaded, out, quiet=quiet, note=note, tags=tags or ())


@app.command("sft")
def sft_command(
    recipe: RecipeName = "sft",
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    runtime: Runtime = None,
    quiet: Quiet = False,
) -> None:
    """Fine-tune on prompts with given answers: a warm start for `burnish train`."""
    changes = _changes(overrides, task="pairs", seed=seed, runtime=_runtime(runtime))
    _run(api.recipe_of(recipe, changes, data=data), out, quiet=quiet)


@app.command("reward")
def reward_command(
    recipe: RecipeName = "reward",
    overrides: Overrides = None,
    seed: Seed = None,
    out: Out = None,
    data: Data = None,
    quiet: Quiet = False,
) -> None:
    """Train a reward model on pairs of a chosen and a rejected response."""
    changes = _changes(overrides, task="preferences", seed=seed)
    _run(api.recipe_of(recipe, changes, data=data), out, quiet=quiet)


@app.command("demo")
def demo_command(
    full: Annotated[bool, Option("--full", help="run the full recipe on any machine")] = False,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Train a language model with a recipe that this machine finishes in minutes."""
    with api.progress_display(None, "demo"):
        tell("load", "loading torch and measuring this machine")
        from burnish.cli import demo

        recipe, lines = demo.choose_demo(is_full=full, seed=seed)
    print_sections([("demo", lines)])
    _run(recipe, out, quiet=quiet)


def _run(
    recipe: Recipe,
    out: Path | None,
    *,
    quiet: bool,
    note: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    if torchrun.is_follower(recipe.runtime, recipe.mesh, sys.argv[1:]):
        return torchrun.obey(recipe)
    with directory.claimed(out, recipe.name) as path:
        with _live(path, quiet=quiet) as live:
            how: dict[str, Any] = {"show": live.show, "stop": live.is_stop_requested}
            api.train(recipe, out=path, note=note, tags=tags, **how)
        return _show_end(path)


@app.command("resume")
def resume_command(
    run: RunPath,
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, Option("--from", help="a checkpoint's name")] = None,
    anyway: Annotated[bool, Option("--anyway", help="even if machine or data changed")] = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last checkpoint, bit for bit."""
    recipe = resuming.resumed_recipe(run, overrides or ())
    if torchrun.is_follower(recipe.runtime, recipe.mesh, sys.argv[1:]):
        return torchrun.obey(recipe)
    with _live(run, quiet=quiet) as live:
        api.resume(
            run,
            overrides=overrides or (),
            from_checkpoint=checkpoint,
            anyway=anyway,
            show=live.show,
            stop=live.is_stop_requested,
        )
    return _show_end(run)


@app.command("chaos")
def chaos_command(
    recipe: RecipeName,
    overrides: Overrides = None,
    kills: Annotated[int, Option(min=1, help="number of actors to kill")] = 3,
    pause: Annotated[float, Option(min=0.1, help="maximum seconds between two kills")] = 10.0,
    seed: Seed = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe on Ray, kill actors at random times, and check that no responses were lost."""
    from burnish.cli.chaos import Killer, verdict

    loaded = api.recipe_of(recipe, _changes(overrides, seed=seed, runtime="ray"))
    with directory.claimed(out, loaded.name) as path:
        with _live(path, quiet=quiet) as live:
            killer = Killer(path, kills, loaded.seed, pause)
            killer.start()
            try:
                api.train(loaded, out=path, show=live.show, stop=live.is_stop_requested)
            finally:
                killer.end()
        found = verdict(path, loaded)
        print_text(
            f"killed: {', '.join(killer.killed) or 'nobody, the run was too short'}\n{found}"
        )
    raise typer.Exit(1 if found.problems else 0)


@app.command("sweep")
def sweep_command(
    file: Annotated[Path, Argument(help="a TOML file with recipes, seeds, and a grid or variants")],
    out: Annotated[
        Path | None, Option(help="directory of the runs", show_default="runs/NAME")
    ] = None,
    parallel: Annotated[int | None, Option(min=1, help="number of concurrent runs, on Ray")] = None,
    gpus: Annotated[float, Option("--gpus-per-run", min=0, help="GPUs or share of one")] = 0.0,
) -> None:
    """Run recipes × overrides × seeds and compare them in one page.

    The same command continues an interrupted sweep.
    """
    from burnish.cli import sweep

    out = out or Path("runs") / sweep.read_sweep(file).name
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        failed = sweep.run_sweep(file, out, print_text, parallel, gpus)
    except KeyboardInterrupt:
        print_text("stopped; the same command continues the sweep")
        raise typer.Exit(130) from None
    failures = [f"failed: {name}: {error}" for name, error in failed.items()]
    print_text("\n".join([*failures, f"report: {out / sweep.PAGE}"]))
    raise typer.Exit(1 if failed else 0)


@app.command("report")
def report_command(run: RunPath) -> None:
    """Write the report.html of a run, which may still be active."""
    from burnish.runs.report import write_report

    with failure.writing(run):
        print_text(f"report: {write_report(run)}")


@app.command("runs")
def runs_command(
    path: Annotated[Path, Argument(help="a run, or a directory of runs")] = Path("runs"),
    tags: TagsOption = None,
) -> None:
    """List runs, the last updated first, with state, best held-out result, tags and note."""
    from burnish.runs.listing import list_run_rows, tabulate_runs

    if not path.is_dir():
        raise RunError(f"there is no directory {path}; name a directory of runs")
    if not (rows := list_run_rows(path, time.time(), tags or ())):
        return print_text(f"{path} has no runs" + (" with these tags" if tags else ""))
    return print_table([escape(printable(cell)) for cell in line] for line in tabulate_runs(rows))


@app.command("note")
def note_command(
    run: RunPath,
    text: Annotated[str | None, Argument(help="the note; without it, the note stays")] = None,
    tags: TagsOption = None,
    untag: Annotated[list[str] | None, Option(help="a tag to remove; may be repeated")] = None,
) -> None:
    """Write a run's note and tags; without any argument, print them."""
    from burnish.runs.note import read_note, write_note

    directory.read_recipe(run)  # raises if there is no run
    change = text is not None or tags or untag
    with failure.writing(run):
        found = read_note(run)
        if change:
            found = write_note(run, text, add=tags or (), remove=untag or ())
    print_text(printable("\n".join(filter(None, [" ".join(found.tags), found.text])) or "no note"))


@app.command("watch")
def watch_command(
    path: Annotated[Path, Argument(help="a run, or a directory of runs")] = Path("runs"),
    port: Annotated[int, Option(min=0, max=65535, help="0 chooses a free port")] = 8420,
) -> None:
    """Serve a web page that shows runs live, until Ctrl-C."""
    from burnish.runs.live_page import Server

    with Server(path, port) as server, suppress(KeyboardInterrupt):
        print_text(f"watching {path} at {server.url}")
        server.serve_forever()


@app.command("export")
def export_command(
    run: RunPath,
    out: Annotated[Path, Argument(help="a new directory")],
    which: Annotated[str, Option(help="best, last, or a checkpoint's name")] = "best",
    adapter: Annotated[
        bool, Option("--adapter", help="write only the adapter, in PEFT's layout")
    ] = False,
    dtype: Annotated[str, Option(help="fp32, bf16 or fp16")] = "fp32",
) -> None:
    """Export a run's model as a Hugging Face directory."""
    chosen = api.export(run, out, which=which, adapter=adapter, dtype=dtype)
    print_text(f"{chosen.name} of {run} → {out}")


@app.command("eval")
def evaluate_command(
    recipe: Annotated[str, Argument(help="a recipe, or a run's directory")],
    model: Annotated[list[str] | None, Option(help="may be repeated to compare models")] = None,
    samples: Annotated[int | None, Option("-n", "--samples", help="per prompt")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy")] = None,
    max_tokens: Annotated[int | None, Option(help="per response")] = None,
    environment: Annotated[
        str | None, Option(help="another environment for its episodes, FILE.py:NAME")
    ] = None,
    agent: Annotated[str | None, Option(help="another agent, FILE.py:NAME")] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Annotated[Path | None, Option(help="a directory for the responses")] = None,
) -> None:
    """Evaluate models on held-out prompts, record every response, and write a report."""
    sampling = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens}
    named = {f"validation.{key}": value for key, value in sampling.items()}
    changes = _changes(overrides, seed=seed, **named)
    chosen = [
        api.evaluation_recipe(recipe, name, changes, environment, agent)
        for name in model or (None,)
    ]
    for one in chosen:  # check all of them before the first one runs
        raise_problems(find_problems(one))
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
    print_text(f"report: {page}")


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], Argument(help="run directories")],
    out: Annotated[Path, Option(help="the page to write")] = Path("compare.html"),
) -> None:
    """Compare runs or evaluations in one page, and print a table of the runs' results.

    Runs that differ only in their seed share a line. Reward and KL (nats per token) are means over
    the last 10 steps, or over the last third of a short run; other columns are from the last
    validation.
    """
    from burnish.runs.comparison import (
        describe_columns,
        describe_lengths,
        tabulate,
        write_comparison,
    )
    from burnish.runs.results import write_evaluation

    if all((run / "results.jsonl").exists() for run in runs):
        return print_text(f"report: {write_evaluation(runs, out)}")
    curves = write_comparison(runs, out)
    print_table(map(escape, row) for row in tabulate(curves))
    return print_text(
        "\n".join([*describe_columns(curves), *describe_lengths(curves), f"report: {out}"])
    )


@app.command("generate")
def generate_command(
    prompt: Annotated[
        list[str] | None, Argument(help="prompts to answer; with --environment, the model")
    ] = None,
    model: Annotated[
        str | None, Option(help="a name, directory or run", show_default="smollm2-135m")
    ] = None,
    adapter: Annotated[str | None, Option(help="a directory in PEFT's layout")] = None,
    samples: Annotated[int, Option("-n", "--samples", help="responses per prompt")] = 1,
    temperature: Annotated[float, Option(help="0 is greedy")] = 1.0,
    max_tokens: Annotated[
        int | None,
        Option(help="per response; an episode's default is its run's", show_default="128"),
    ] = None,
    seed: Annotated[int, Option(help="seed of the sampling")] = 0,
    raw: Annotated[bool, Option("--raw", help="do not use the chat template")] = False,
    environment: Annotated[
        str | None, Option(help="play one episode with FILE.py:NAME, turn by turn")
    ] = None,
    agent: Annotated[str | None, Option(help="run one episode of an agent, FILE.py:NAME")] = None,
    row: Annotated[str | None, Option(help="the episode's row, a JSON object")] = None,
    data: Annotated[str | None, Option(help="rows, of which the seed selects one")] = None,
    turns: Annotated[
        int | None, Option(min=1, help="limit of the episode", show_default="its run's, or 16")
    ] = None,
) -> None:
    """Sample responses from a model and print them, or play one episode with an environment or an
    agent."""
    words = prompt or []
    if environment is not None or agent is not None:
        from burnish.cli import episode

        chosen = [*words, *([model] if model else [])]
        if len(chosen) != 1 or samples != 1 or raw:
            raise ConfigError(
                "generate --environment plays one episode of one model, without -n and --raw; "
                "write `burnish generate MODEL --environment FILE.py:NAME`"
            )
        given: dict[str, Any] = {"adapter": adapter, "row": row, "data": data, "seed": seed}
        given |= {"max_tokens": max_tokens, "turns": turns, "agent": agent}
        recipe = episode.episode_recipe(chosen[0], environment, **given)
        raise typer.Exit(0 if episode.play_episode(recipe, temperature) else 1)
    if not words or (row, data, turns) != (None, None, None):
        raise ConfigError(
            "generate needs a prompt, and --row, --data and --turns need --environment; write "
            "`burnish generate PROMPT`, or `burnish generate MODEL --environment FILE.py:NAME`"
        )
    how: dict[str, Any] = {
        "temperature": temperature,
        "max_tokens": 128 if max_tokens is None else max_tokens,
    }
    how |= {"seed": seed, "n": samples, "chat": not raw}
    done = api.generate(words, model={"name": model or hub.DEFAULT, "adapter": adapter}, **how)
    for number, answer in enumerate(done):
        if len(done) > 1:
            print_text(f"── prompt {number // samples + 1}, sample {answer.sample + 1} ──")
        print_text(printable(answer.text))


def _changes(overrides: list[str] | None, **options: Any) -> list[str | Table]:
    """Return the changes to a recipe that a command's options and its --set arguments make; options
    that are None are left out."""
    given = {key: value for key, value in options.items() if value is not None}
    return [given, *(overrides or ())]


def _one_or_all(rewards: list[str] | None) -> str | list[str] | None:
    """Return the value of a repeatable option as a reward: None, one, or a list of several."""
    return rewards[0] if rewards and len(rewards) == 1 else rewards or None


def _runtime(name: str | None, address: str | None = None) -> Table | None:
    """Return the [runtime] section for --runtime and --address; None if it is the default.

    An address implies Ray. Without a name, a process that torchrun started uses torchrun.
    """
    name = name or ("torchrun" if torchrun.is_started() else address and "ray")
    found = {"name": name, "address": address}
    return {key: value for key, value in found.items() if value is not None} or None


def _live(path: Path, *, quiet: bool) -> Interrupts:
    return Interrupts(path, Display(path.name, tables.out_console, quiet=quiet))


def _show_end(path: Path) -> None:
    """Print a run's results, some answers before and after training, and the path of its report."""
    end = directory.load_json(path / "summary.json")
    warnings = [f"warning: {warning}" for warning in end.get("warnings", ())]
    notes = [f"note: {unsaved}"] if (unsaved := unsaved_best(path)) else []
    report = f"report: {path / 'report.html'}"
    print_text("\n".join([*outcome(end), *notes, *answers(end), *warnings, report]))


def main() -> None:
    """Run the command line. Errors for users are printed as one message without a traceback."""
    share_cores()
    try:
        app(prog_name="burnish")
    except (BurnishError, OSError) as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        message = escape(printable("\n".join(lines)))
        tables.err_console.print(f"[red]error:[/] {message}", soft_wrap=True)
        if torchrun.is_started():
            os._exit(1)  # a regular exit destroys process groups, which may wait for a dead rank
        sys.exit(1)
