"""Files of environments are checked before an episode begins, and each error says what is wrong."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from burnish.environments.episode import EnvironmentLimits
from burnish.environments.loading import load_environment, split_spec
from burnish.environments.pool import EnvironmentPool
from burnish.errors import DataError

GAMES = Path(__file__).with_name("games.py")


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("spec", ["game", "games.py", "games.py:", "games:Echo"])
def test_a_spec_of_another_form(spec):
    with pytest.raises(DataError, match=r"environment must be FILE\.py:NAME, got '"):
        split_spec(spec)
    with pytest.raises(DataError, match="environment must be"):
        EnvironmentPool(spec)


def test_a_class():
    loaded = load_environment(f"{GAMES}:Echo", is_script=False)
    assert loaded.deterministic
    assert loaded.make().reset({}, 3) == "begin 0 3"
    assert not load_environment(f"{GAMES}:Chance", is_script=False).deterministic


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "games.py defines .*Echo.*, but not 'Nothing'"),
        ("NoStep", r"NoStep has no method step; define reset\(self, row, seed\) and step"),
        ("OneArgument", r"reset must take the arguments self, row, seed, but has \(self, row\)"),
        ("Needs", r"the class Needs must take no argument, but has \(size\)"),
        ("Unsure", "deterministic must be True or False, got 'yes'"),
        ("game", "must be a class or a function .* of type Echo; name the class"),
        ("os", "must be a class or a function .* of type module; name the class"),
    ],
)
def test_a_class_that_is_no_environment(name, message):
    with pytest.raises(DataError, match=message):
        load_environment(f"{GAMES}:{name}", is_script=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_it\nclass Game: ...", "install the package that provides nothing_of_"),
        ("class Game: ...\nx = 1 / 0", r"ZeroDivisionError: division by zero \(file.py, line 2\)"),
        ("class Game: ...\nraise SystemExit(3)", "SystemExit: 3"),
        ("class Game(:", r"SyntaxError: .* \(file.py, line 1\); correct"),
    ],
)
def test_a_file_that_can_not_be_loaded(tmp_path, text, message):
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(DataError, match=f"the file can't be loaded: .*{message}"):
        load_environment(f"{tmp_path}/file.py:Game", is_script=False)
    with pytest.raises(DataError, match="there is no file"):
        load_environment(f"{tmp_path}/none.py:Game", is_script=False)


def start(spec, seconds=60.0):
    pool = EnvironmentPool(spec, EnvironmentLimits(start_seconds=seconds))
    try:
        return pool.start().deterministic
    finally:
        pool.close()


def test_a_function_is_called_in_a_fork():
    assert start(f"{GAMES}:factory")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_factory", "int has no method reset"),
        ("raising_factory", r"the function raised RuntimeError: not today \(games.py, line"),
        ("exiting_factory", "the function's process exited with 4"),
    ],
)
def test_a_function_that_makes_no_environment(name, message):
    with pytest.raises(DataError, match=message):
        start(f"{GAMES}:{name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import time\nGame = time.sleep(600)", r"not respond within 0.5 s \(start_seconds\)"),
        ("import os\nprint('bye')\nGame = os._exit(5)", "exited with 5; the end of its output:\n "),
        ("import os\nGame = os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_file_that_never_loads_or_dies_loading(tmp_path, text, message):
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(DataError, match=message):
        start(f"{tmp_path}/file.py:Game", 0.5 if "sleep" in text else 60.0)


def script(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    command = [sys.executable, file]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=root, env={"PYTHONPATH": root}
    )
    return done.stdout + done.stderr


def test_a_script_without_a_main_guard(tmp_path):
    output = script(
        tmp_path,
        """
        from burnish.environments.pool import EnvironmentPool
        print("begins")
        FIRST = "hello"
        class Game:
            def reset(self, row, seed):
                return FIRST
            def step(self, message):
                return {"done": True}
        pool = EnvironmentPool(f"{__file__}:Game")
        print(pool.reset([("a", {}, 0)])[0].messages)
        pool.close()
        """,
    )
    assert output.splitlines() == ["begins", "[{'role': 'user', 'content': 'hello'}]"]


def test_a_file_that_starts_environments_is_not_run_again_and_again(tmp_path):
    file = tmp_path / "both.py"
    file.write_text(
        "from burnish.environments.pool import EnvironmentPool\n"
        "class Game: ...\n"
        "EnvironmentPool(f'{__file__}:Game').start()\n"
    )
    with pytest.raises(DataError, match="a file that starts environments was loaded as an envir"):
        start(f"{file}:Game")
