"""Docs can't rot: every path, dotted name, CLI command and metric they mention is real.

Nor can they grow: the README and the lines of all pages have limits.
"""

import importlib
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import burnish
from burnish import api
from burnish.cli import main
from burnish.graders import pool as grader
from burnish.recipe.load import list_recipes, load_recipe, setting_names
from burnish.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MODULES = ["burnish.rl", "burnish.rl.sequences", "burnish.rl.advantages", "burnish"]
COMMANDS = typer.main.get_command(main.app).commands
RUN_FILES = {
    "metrics.jsonl",
    "timings.jsonl",
    "recipe.toml",
    "summary.json",
    "log.txt",
    "ledger.jsonl",
    "timeline.jsonl",
    "actors.json",
    "rubrics.jsonl",
}
RUN_FILES |= {"status.json", "environment.json"}
NAME = r"[A-Za-z_]\w*"


WORDS, LINES, WIDTH = 800, 180, 100
"""Limits of the README: words outside tables and code, lines, and columns of a line."""


def text_of(page):
    return page.read_text(encoding="utf-8")


def without_code(page):
    return re.sub(r"```.*?```", "", text_of(page), flags=re.S)


def without_tables(text):
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def files_in(page):
    """Files that a page has its reader write: code blocks whose first line is "# NAME"."""
    blocks = re.findall(r"```\w+\n(# ([\w.]+)\n.*?)```", text_of(page), flags=re.S)
    return {name: text for text, name in blocks}


def spans(page):
    return re.findall(r"`([^`\n]+)`", without_code(page))


def steps(page):
    """The commands of its code blocks, in their order."""
    fenced = re.findall(r"```sh\n(.*?)```", text_of(page), flags=re.S)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    return [line for line in lines if line.startswith("burnish ")]


def commands(page):
    return steps(page) + [span for span in spans(page) if span.startswith("burnish ")]


def is_path(span):
    return bool(re.fullmatch(r"[\w./-]+", span)) and (
        "/" in span or span.endswith((".py", ".md", ".toml"))
    )


def is_metric(span):
    return bool(re.fullmatch(r"[a-z]+/[a-z0-9_]+", span)) and not (ROOT / span).exists()


def resolves(dotted):
    for prefix in ("", *(f"{module}." for module in MODULES)):
        parts = f"{prefix}{dotted}".split(".")
        for cut in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            try:
                for part in parts[cut:]:
                    thing = getattr(thing, part)
            except AttributeError:
                break
            return True
    return False


def is_setting(dotted):
    return dotted in set(setting_names(Recipe))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    links = re.findall(r"\]\(([^)#]+)\)", text_of(page))
    paths = [link for link in links if not link.startswith("http")]
    paths += [s for s in spans(page) if is_path(s) and not is_metric(s) and s not in RUN_FILES]
    missing = [p for p in paths if not (ROOT / p).exists() and not (page.parent / p).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_resolve(page):
    dotted = [s for s in spans(page) if re.fullmatch(rf"{NAME}(\.{NAME})+", s)]
    wrong = [
        s for s in dotted if not (is_path(s) or s in RUN_FILES or is_setting(s) or resolves(s))
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_real(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files_in(page).items():
        Path(name).write_text(text)
    for line in commands(page):
        words = shlex.split(line, comments=True)[1:]
        assert words[0] in COMMANDS, line
        command, rest = COMMANDS[words[0]], words[1:]
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        known = {option for p in command.params for option in p.opts}
        given = {word for word in words if word.startswith("--")}
        assert given <= known | {"--help", "--debug"}, line
        if words[0] in ("train", "plan") and len(words) > 1:
            overrides = [f"runtime={b}" for a, b in pairwise(words) if a == "--runtime"]
            overrides += [b for a, b in pairwise(words) if a == "--set"]
            load_recipe(words[1], [o for o in overrides if "$" not in o])


def test_the_readme_has_limits():
    readme = ROOT / "README.md"
    words = " ".join(without_tables(without_code(readme))).split()
    lines = text_of(readme).splitlines()
    too_wide = [line for line in without_tables(text_of(readme)) if len(line) > WIDTH]
    assert (len(words) <= WORDS, len(lines) <= LINES, too_wide) == (True, True, [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_a_limit(page):
    """Outside tables and code; a line that holds an address may be as long as the address."""
    lines = without_tables(without_code(page))
    assert [line for line in lines if len(line) > WIDTH and "://" not in line] == []


def test_every_recipe_and_every_extra_is_described():
    shown = re.findall(r"^\| (`.*?) \|", text_of(ROOT / "docs" / "recipes.md"), flags=re.M)
    assert set(list_recipes()) <= {name.strip("`") for s in shown for name in s.split(", ")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"].keys() <= set(spans(ROOT / "README.md"))


def test_make_targets_are_real():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make (\w+)", text_of(page), flags=re.M):
            assert re.search(rf"^{target}:", makefile, flags=re.M), target


EVERY_PIECE = ["objective.kl=k3", "objective.importance=truncate", "objective.loss=cispo"]
EVERY_PIECE += ["objective.kl.ema=0.9", "objective.entropy.target=1"]
EVERY_PIECE += ["task.reward=position_match", "train.precision=fp16", "train.log_kl=true"]


@pytest.mark.parametrize("overrides", [[], EVERY_PIECE])
def test_every_metric_is_explained(overrides, tmp_path):
    path = api.train(
        "sort", overrides=["train.steps=1", "train.epochs=1", *overrides], out=tmp_path / "run"
    )
    explained = set(spans(ROOT / "docs" / "algorithms.md"))
    for file in ("metrics.jsonl", "timings.jsonl"):
        for line in (path / file).read_text().splitlines():
            names = json.loads(line).keys() - explained
            assert {re.sub("^validation/", "rollout/", name) for name in names} <= explained


def test_the_readmes_own_task_runs(smollm2, tmp_path, monkeypatch):
    """As it stands there, but on a tiny model: the shell's way, then the script's, with workers."""
    monkeypatch.chdir(tmp_path)
    readme = text_of(ROOT / "README.md")
    reward, script = re.findall(r"```python\n(.*?)```", readme, flags=re.S)
    (row,) = re.findall(r"```json\n(.*?)```", readme, flags=re.S)
    (command,) = [line for line in commands(ROOT / "README.md") if "--reward" in line]
    assert max(len(reward.splitlines()), len(script.splitlines())) < 12
    (tmp_path / "rows.jsonl").write_text(row * 4)
    (tmp_path / "reward.py").write_text(reward)
    (tmp_path / "mine.py").write_text(script)
    small = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128, "name": "scratch"}
    overrides = [f"model.{key}={value}" for key, value in small.items()]
    overrides += [f"model.tokenizer={smollm2}", "train.steps=1", "rollout.max_tokens=4"]
    flags = [flag for override in overrides for flag in ("--set", override)]
    pools, real = [], grader.GraderPool
    monkeypatch.setattr(grader, "GraderPool", lambda *given: pools.append(given) or real(*given))
    done = CliRunner().invoke(main.app, [*shlex.split(command)[1:], *flags])
    assert done.exit_code == 0, done.output
    tiny = partial(api.train, overrides=overrides)
    monkeypatch.setattr(burnish, "train", tiny, raising=False)
    runpy.run_path("mine.py", run_name="__main__")
    assert len(pools) == 4  # of each run and of the check before it
    for run, part in ((1, "length"), (2, "ended")):
        last = (tmp_path / f"runs/demo-small-{run}/metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["rollout/grades_scored"] == 1.0
        assert f"rollout/part_{part}" in json.loads(last)


TINY = {
    'name = "smollm2-135m"': 'name = "scratch"\nlayers = 2\nwidth = 32\nheads = 4\nd_ff = 48',
    "batch = 96": "batch = 4",
    "group_size = 8": "group_size = 2",
    "max_tokens = 48": "max_tokens = 4",
    "steps = 10": "steps = 2",
    "batch = 24": "batch = 2",
    "last = 15": "last = 1",
    "log_kl_responses = 8": "log_kl_responses = 2",
}
"""Changes to the recipe of docs/own_task.md under which it ends in seconds."""


def run_command(words):
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, f"{words}: {done.output} {done.exception}"
    return done.stdout


@pytest.mark.slow
def test_the_page_about_own_tasks_runs(smollm2, tmp_path, monkeypatch):
    """Its files and its commands in their order, on a tiny model, up to transformers' own."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "own_task.md"
    for name, text in files_in(page).items():
        Path(name).write_text(text)
    recipe = Path("mine.toml").read_text()
    for here, there in TINY.items():
        assert recipe.count(here) == 1, here
        recipe = recipe.replace(here, there)
    Path("mine.toml").write_text(recipe)
    runpy.run_path("rows.py")
    skipped = ("doctor", "watch", "generate")  # no end, or the default model
    lines = [line for line in steps(page) if line.split()[1] not in skipped]
    assert {line.split()[1] for line in lines} >= {"plan", "train", "resume", "compare", "export"}
    for line in lines:
        line = line.replace("train.steps=20", "train.steps=3")
        line = line.replace("--model smollm2-135m", "--model runs/mine-2")
        run_command(shlex.split(line)[1:])
    assert Path("compare.html").exists()
    runpy.run_path("mine.py", run_name="__main__")
    runpy.run_path("use.py", run_name="__main__")


SHORTER = {
    "sft": ["task.epochs=0.1"],
    "train": ["train.steps=2", "rollout.batch=16", "train.batch=16", "checkpoint.every=1"],
}
"""Overrides under which the tutorial's runs end in seconds."""


def shell_words(line):
    """The arguments of a command as bash reads them."""
    shell = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(shell, check=True, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    """Its commands in their order, with fewer steps, up to transformers' own."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "tutorial.md"
    every = "doctor data sft plan train watch report eval generate compare export resume serve"
    lines = [line for line in steps(page) if line.split()[1] != "chat"]
    assert {line.split()[1] for line in lines} == set(every.split())
    for line in lines:
        _, command, *rest = shell_words(line)
        if command not in ("doctor", "watch", "serve"):  # no end, or the whole machine
            overrides = [word for one in SHORTER.get(command, ()) for word in ("--set", one)]
            run_command([command, *rest, *overrides])
    assert Path("compare.html").exists()
    (chat,) = re.findall(r"^printf '(.*)' \| burnish (.*)$", text_of(page), flags=re.M)
    typed = chat[0].encode().decode("unicode_escape")
    said = CliRunner().invoke(main.app, shell_words(chat[1]), input=typed)
    assert (said.exit_code, len(said.stdout) > 2) == (0, True)
    capsys.readouterr()
    Path("use_sums.py").write_text(files_in(page)["use_sums.py"])
    runpy.run_path("use_sums.py", run_name="__main__")
    assert capsys.readouterr().out.strip()
    Path("again.py").write_text(files_in(page)["again.py"])
    runpy.run_path("again.py", run_name="__main__")
