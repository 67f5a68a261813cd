"""Tasksets of the package verifiers itself, with a model of fixed answers behind an endpoint."""

import asyncio
import json
import sys
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Thread

import pytest

from burnish.environments import taskset, taskset_agent
from burnish.environments.agent import AgentSettings, unlearned_traces
from burnish.environments.pool import EnvironmentPool
from burnish.environments.taskset import TasksetSource, load_taskset, require_verifiers, row_of
from burnish.environments.taskset_agent import AgentFailure, make_agent, play_task
from burnish.environments.taskset_rows import describe_tasks
from burnish.errors import DataError, MissingExtra

FOLDER = Path(__file__).parents[1] / "tasksets"
needs_verifiers = pytest.mark.skipif(
    not taskset.has_verifiers(), reason="the extra 'verifiers' is not installed"
)


class Model(BaseHTTPRequestHandler):
    """Answers every chat with the same text, and refuses prompts with the word "model"."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        if "fault: model" in body["messages"][0]["content"]:
            found = {"error": {"message": "no room", "code": "context_length_exceeded"}}
            return self.send(json.dumps(found), "application/json", 400)
        head = {"id": "x", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        said = {"role": "assistant", "content": "ab"}
        choice = {"index": 0, "finish_reason": "stop"}
        if not body.get("stream"):
            choices = [{**choice, "message": said}]
            whole = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
            return self.send(json.dumps(whole), "application/json")
        chunk = {**head, "object": "chat.completion.chunk", "choices": [{**choice, "delta": said}]}
        return self.send(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")

    def send(self, text, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.seen = []
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def clean_modules(monkeypatch):
    """Each test imports its taskset itself."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


pytestmark = pytest.mark.usefixtures("clean_modules")


def source(name, **given):
    return TasksetSource(str(FOLDER / f"{name}.py"), **given)


def play(loaded, place):
    """Play a task; return its result and the requests that the endpoint had."""
    with serving() as server:
        url = f"http://127.0.0.1:{server.server_port}/session/one/v1"
        row = row_of(loaded.tasks[place])
        result = asyncio.run(play_task(loaded, row, url, "secret"))
    return result, server.seen


@needs_verifiers
def test_a_task_is_played_through_the_endpoint():
    loaded = load_taskset(source("letters"))
    result, seen = play(loaded, 0)
    # Both replies are "ab", so half of the letters are "a".
    assert result == {"share": 0.5, "letters": 2.0, "reward": 0.5, "unlearned": []}
    assert [path for path, _, _ in seen] == ["/session/one/v1/chat/completions"] * 2
    assert {headers["Authorization"] for _, headers, _ in seen} == {"Bearer secret"}
    assert len({headers["X-Session-ID"] for _, headers, _ in seen}) == 1
    first, second = (body for _, _, body in seen)
    assert first == {"model": "policy", "messages": [{"role": "user", "content": "Write a."}]}
    assert second["stream"] is True
    assert second["messages"][1] == {"role": "assistant", "content": "ab"}


@needs_verifiers
def test_an_agent_plays_with_the_address_and_the_key_of_its_client():
    class Client:
        base_url = "http://127.0.0.1:1/v1/"
        api_key = "secret"

    run = make_agent({"taskset": str(FOLDER / "letters.py"), "tasks": 1})
    (row,) = (row_of(task) for task in load_taskset(source("letters", tasks=1)).tasks)
    with pytest.raises(AgentFailure, match="ProviderError: All connection attempts failed"):
        asyncio.run(run(Client(), row))


@needs_verifiers
def test_traces_that_are_not_trainable_are_named():
    result, seen = play(load_taskset(source("panel")), 1)
    sessions = list(dict.fromkeys(headers["X-Session-ID"] for _, headers, _ in seen))
    assert result["reward"] == 0.5
    assert result["unlearned"] == sessions[1:]
    assert len(sessions) == 2


@needs_verifiers
def test_a_role_of_several_that_learn_is_chosen():
    env = {"frozen": False}
    chosen = load_taskset(source("panel", env=env, role="critic"))
    result, seen = play(chosen, 0)
    assert result["unlearned"] == [seen[0][1]["X-Session-ID"]]
    with pytest.raises(AgentFailure, match=r"got 2 \(solver, critic\); set task.role"):
        play(load_taskset(source("panel", env=env)), 0)
    with pytest.raises(AgentFailure, match=r"got 2 \(solver, solver\)"):
        play(load_taskset(source("panel", env={"attempts": 2})), 0)


@needs_verifiers
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "agent: TaskError: task Task scoring: KeyError: 'gold'"),
        ("late", r"the reward points was not computed \(scoring_timeout\)"),
        ("not_a_number", "the reward points must be finite, got nan"),
        ("none", "the trace has no reward"),
        ("model", "agent: ProviderError: upstream 400: .*no room"),
        ("setup", "agent: TaskError: task setup: RuntimeError: no disk"),
    ],
)
def test_an_episode_without_a_reward_is_a_failure(fault, message):
    loaded = load_taskset(source("faults", env={"agent": {"timeout": {"scoring": 0.2}}}))
    names = [task.data.fault for task in loaded.tasks]
    with pytest.raises(AgentFailure, match=message):
        play(loaded, names.index(fault))


@needs_verifiers
def test_a_task_that_has_changed_is_a_failure():
    loaded = load_taskset(source("letters"))
    row = row_of(loaded.tasks[3]) | {"task": 4}
    with pytest.raises(AgentFailure, match="another task 4 than when the run began"):
        asyncio.run(play_task(loaded, row, "http://127.0.0.1:1/v1", "none"))


@needs_verifiers
def test_programs_are_local_processes_and_nothing_is_retried():
    loaded = load_taskset(source("panel"))
    for role in loaded.roles.values():
        assert role.runtime.type == "subprocess"
        assert role.retries.max_retries == 0  # also if the environment's author has set another
    assert loaded.env.config.retries.max_retries == 0


@needs_verifiers
def test_episodes_are_forks_of_a_process_that_has_loaded_the_taskset(monkeypatch):
    """Their requests go to no proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    spec = f"{taskset_agent.__file__}:make_agent"
    given = {"taskset": str(FOLDER / "panel.py"), "tasks": 2}
    rows = [row_of(task) for task in load_taskset(TasksetSource(**given)).tasks]
    with closing(EnvironmentPool(spec, tools=AgentSettings(given=given))) as pool, serving() as own:
        pool.reset([(row["prompt"], row, 0) for row in rows])
        url = f"http://127.0.0.1:{own.server_port}/session"
        said = [{"role": "assistant", "content": f"{url}/{i}/v1"} for i in range(2)]
        found = pool.step([(row["prompt"], one) for row, one in zip(rows, said, strict=True)])
    assert [one.error for one in found] == [None, None]
    assert [one.reward for one in found] == [0.5, 0.5]  # the replies "ab" of "Write a." and "b."
    critics = [headers["X-Session-ID"] for _, headers, _ in own.seen]
    assert all(len(unlearned_traces(one.messages)) == 1 for one in found)
    assert {unlearned_traces(one.messages)[0] for one in found} < set(critics)
    sent = {(path, headers["X-Session-ID"]) for path, headers, _ in own.seen}
    assert len(sent) == 4  # a solver and a critic in each of two sessions


@needs_verifiers
def test_a_taskset_that_a_supervisor_cannot_load_is_an_error_of_the_data():
    spec = f"{taskset_agent.__file__}:make_agent"
    given = {"taskset": str(FOLDER / "outdated.py")}
    with (
        closing(EnvironmentPool(spec, tools=AgentSettings(given=given))) as pool,
        pytest.raises(DataError, match=r"for verifiers before 0\.4"),
    ):
        pool.start()


@needs_verifiers
def test_tasks_are_described_by_another_process():
    rows = describe_tasks(source("letters", tasks=3))
    assert [(row["task"], row["prompt"]) for row in rows] == [
        (0, "Write a."),
        (1, "Write b."),
        (2, "Write c."),
    ]
    assert len({row["key"] for row in rows}) == 3
    assert "letters" not in sys.modules


@needs_verifiers
def test_an_error_of_the_other_process_arrives():
    with pytest.raises(DataError, match=r"for verifiers before 0\.4"):
        describe_tasks(source("outdated"))


@needs_verifiers
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (source("outdated"), "for verifiers before 0.4: it does not export a Taskset"),
        (source("older"), "for verifiers before 0.4: it does not export a Taskset"),
        (source("nowhere"), "there is no such file"),
        (TasksetSource("nowhere"), "there is no module of this name; install the package"),
        (TasksetSource("json"), "can't be loaded: TypeError: taskset module 'json' exports no"),
        (source("endless"), "endlessly many tasks; set task.tasks"),
        (source("letters", role="judge"), "task.role = 'judge' is no role of .*, only agent"),
        (
            source("letters", env={"agent": {"turns": 3}}),
            r"task.env.agent.turns: Extra inputs are not permitted",
        ),
        (
            source("letters", env={"agent": {"runtime": {"type": "docker"}}}),
            r"task.env.agent.runtime = .*remove it",
        ),
        (source("letters", env={"agent": {"model": "x"}}), "task.env.agent.model: burnish sets"),
        (source("letters", env={"retries": {"max_retries": 1}}), "task.env.retries: burnish sets"),
        (
            source("letters", env={"agent": {"harness": {"id": "bash"}}}),
            r"runs commands that the model writes .*task.commands = 'allow'",
        ),
        (
            source("letters", env={"agent": {"harness": {"id": "codex"}}}, runs_commands=True),
            r"the harness 'codex' needs a container",
        ),
        (
            source("letters", env={"taskset": {"id": "other"}}),
            "task.env.taskset.id = 'other' is another taskset",
        ),
    ],
)
def test_a_taskset_that_does_not_suit_is_refused(given, message):
    with pytest.raises(DataError, match=message):
        load_taskset(given)


@pytest.mark.parametrize("name", ["math", "sys", "json", "pydantic", "numpy"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_file_with_the_name_of_a_package_is_refused(monkeypatch, tmp_path, name, is_first):
    """The file hides the package if its folder comes first on the path; otherwise the package
    hides the file."""
    monkeypatch.setattr(taskset, "version", lambda _: "0.4.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path] if is_first else [*sys.path])
    (tmp_path / f"{name}.py").write_text("raise AssertionError('executed')\n")
    said = rf"taskset = '.*{name}.py': the file has the name of another module, {name} \(.*rename"
    with pytest.raises(DataError, match=f"{said} the file, for example {name}_tasks.py"):
        load_taskset(TasksetSource(str(tmp_path / f"{name}.py")))


@pytest.mark.parametrize("name", ["Letters", "my-letters", "a.b", "ä"])
def test_a_file_that_verifiers_cannot_import_by_name_is_refused(monkeypatch, tmp_path, name):
    monkeypatch.setattr(taskset, "version", lambda _: "0.4.0")
    (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(DataError, match=r"lower-case letters, .*; rename the file, for example \w"):
        load_taskset(TasksetSource(str(tmp_path / f"{name}.py")))


@needs_verifiers
def test_a_file_with_the_name_of_a_taskset_of_verifiers_is_refused(tmp_path):
    (tmp_path / "openenv.py").write_text("")
    with pytest.raises(DataError, match=r"another module, openenv \(a taskset of verifiers"):
        load_taskset(TasksetSource(str(tmp_path / "openenv.py")))


@needs_verifiers
def test_a_taskset_named_verifiers_is_refused_by_the_process_that_describes_it(tmp_path):
    (tmp_path / "verifiers.py").write_text("import verifiers.v1\n")
    with pytest.raises(DataError, match=r"another module, verifiers \(.*rename the file"):
        describe_tasks(TasksetSource(str(tmp_path / "verifiers.py")))


@needs_verifiers
def test_a_harness_may_run_commands_if_the_recipe_says_so():
    env = {"agent": {"harness": {"id": "bash"}}}
    loaded = load_taskset(source("letters", env=env, runs_commands=True))
    assert loaded.roles["agent"].harness.id == "bash"


@pytest.mark.parametrize(
    ("found", "is_supported"),
    [("0.3.1", False), ("0.4.0", True), ("0.4.7", True), ("0.5.0", False), ("1.0", False)],
)
def test_other_versions_of_verifiers_are_refused(monkeypatch, found, is_supported):
    monkeypatch.setattr(taskset, "version", lambda name: found)
    if is_supported:
        require_verifiers()
    else:
        with pytest.raises(DataError, match=rf"verifiers >=0.4,<0.5, got {found}; install it: pip"):
            require_verifiers()


def test_without_verifiers_the_extra_is_named(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(taskset, "version", version)
    with pytest.raises(MissingExtra, match=r"pip install 'burnish\[verifiers\]'"):
        require_verifiers()
