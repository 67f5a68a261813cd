"""Docs can't rot: every path, dotted name, CLI command and metric they mention is real."""

import importlib
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from burnish import api, cli, config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MODULES = ["burnish.rl", "burnish.rl.sequences", "burnish.rl.advantages", "burnish"]
COMMANDS = typer.main.get_command(cli.app).commands
RUN_FILES = {"metrics.jsonl", "timings.jsonl", "recipe.toml", "summary.json", "log.txt"}
NAME = r"[A-Za-z_]\w*"


def text_of(page):
    return page.read_text(encoding="utf-8")


def spans(page):
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.S)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(page):
    fenced = re.findall(r"```sh\n(.*?)```", text_of(page), flags=re.S)
    lines = [line.strip() for block in fenced for line in block.splitlines()] + spans(page)
    return [line for line in lines if line.startswith("burnish ")]


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
    section, _, key = dotted.partition(".")
    field = config.Recipe.model_fields.get(section)
    return field is not None and key in getattr(field.annotation, "model_fields", {})


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
def test_commands_are_real(page):
    for line in commands(page):
        words = shlex.split(line, comments=True)[1:]
        assert words[0] in COMMANDS, line
        command = COMMANDS[words[0]]
        command = command.commands[words[1]] if words[0] == "data" and words[1:] else command
        known = {option for p in command.params for option in p.opts}
        given = {word for word in words if word.startswith("--")}
        assert given <= known | {"--help", "--debug"}, line
        if words[0] in ("train", "plan") and len(words) > 1:
            overrides = [b for a, b in pairwise(words) if a == "--set"]
            config.load(words[1], [o for o in overrides if "$" not in o])


def test_make_targets_are_real():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make (\w+)", text_of(page), flags=re.M):
            assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["objective.kl=k3", "objective.importance=truncate", "objective.loss=cispo"],
        ["task.reward=position_match"],
        ["train.precision=fp16", "train.log_kl=true"],
    ],
)
def test_every_metric_is_explained(overrides, tmp_path):
    path = api.train("sort", overrides=["train.steps=1", *overrides], out=tmp_path / "run")
    explained = set(spans(ROOT / "docs" / "algorithms.md"))
    for file in ("metrics.jsonl", "timings.jsonl"):
        for line in (path / file).read_text().splitlines():
            names = {re.sub("^validation/", "rollout/", name) for name in json.loads(line)}
            assert names <= explained


def test_the_readmes_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), flags=re.S)
    code = code.replace("overrides=[", 'overrides=["train.steps=2", ')
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "runs" / "sort-1" / "summary.json").exists()
