"""An agent as an environment: one call of ``step`` runs the user's function for a whole episode.

    async def run(client, row):     # client: openai.AsyncOpenAI, which the policy answers
        ...
        return reward               # a number, or a dict with "reward" and metrics

The function runs in the process of its episode, with the limits of one call. Its result becomes the
episode's reward and metrics, and its exception the episode's error. The key "unlearned" of a result
is a list of traces (values of the header X-Session-ID) whose answers are not learned.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from burnish.environments.loading import LoadedEnvironment, execute_file, split_spec
from burnish.environments.protocol import InvalidResult
from burnish.errors import DataError

MODULE = "burnish_agent"
"""Module name of an agent's file in a worker."""
IMPORTED = ("openai", "openai.resources.chat", "httpcore", "anyio._backends._asyncio")
"""Modules that every episode needs. Clients import most of them with the first request."""
LOCAL_HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine, at which the server of agents listens."""
UNLEARNED = "unlearned"
"""Key of a result that lists traces which are not learned."""
BEGIN = "begin"
"""First message of an agent's environment, which nobody reads."""


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent's client."""

    timeout: float = 86_400.0
    """Seconds that the client waits for an answer. The answers of an episode may wait for all
    others, so the time for which an agent waits has no limit of its own."""
    given: Mapping[str, Any] | None = None
    """Argument with which the named function is called once, before the first episode, to return
    the agent's function; None if the named function is the agent's."""


def load_agent(spec: str, settings: AgentSettings, *, is_script: bool) -> LoadedEnvironment:
    """Execute the file of an agent, FILE.py:NAME, as a new module, and return its function as an
    environment. Of a running script (``is_script``), only the definitions are executed. Raise a
    DataError if the file can't be loaded or does not define such a function."""
    path, name = split_spec(spec, "agent")
    try:
        # Here, so that the processes of the episodes need not do it again.
        for name_of_module in IMPORTED:
            importlib.import_module(name_of_module)
        trusted()
    except ImportError:
        raise DataError(f"agent {spec} needs the package openai; install burnish[agents]") from None
    except OSError as error:
        raise DataError(
            f"agent {spec}: the certificates of TLS can't be read ({error}); check SSL_CERT_FILE "
            "and SSL_CERT_DIR"
        ) from None
    module = execute_file(path, name, MODULE, spec=f"agent {spec}", is_script=is_script)
    function = getattr(module, name)
    if settings.given is not None:
        function = function(settings.given)
    if not inspect.iscoroutinefunction(function):
        raise DataError(
            f"agent {spec}: must be a function 'async def {name}(client, row)', got "
            f"{'a function without async' if inspect.isfunction(function) else type(function)}"
        )
    try:
        inspect.signature(function).bind("client", "row")
    except TypeError as error:
        signature = inspect.signature(function)
        raise DataError(
            f"agent {spec}: {name} must take the arguments client, row, but has {signature} "
            f"({error})"
        ) from None
    return LoadedEnvironment(partial(AgentEnvironment, function, settings), path, False)


class AgentEnvironment:
    """One episode of an agent. ``reset`` takes the row, and ``step`` the base URL of the episode's
    server as the content of the message."""

    def __init__(self, run: Callable[[Any, Any], Any], settings: AgentSettings) -> None:
        self._run, self._settings = run, settings
        self._row: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._row = dict(row)
        return BEGIN

    async def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with open_client(message["content"], self._settings.timeout) as client:
            return read_result(await self._run(client, self._row))


def open_client(base_url: str, timeout: float) -> Any:
    """Return a client of the local server, which repeats no request and uses no proxy. An agent may
    call other servers with a copy of it, whose certificates are verified."""
    import openai

    own = openai.DefaultAsyncHttpxClient(trust_env=False, verify=trusted(), timeout=timeout)
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key="burnish",
        max_retries=0,
        timeout=timeout,
        http_client=own,
    )


@cache
def trusted() -> Any:
    """Return the TLS settings that verify certificates. Reading the known authorities takes almost
    a tenth of a second."""
    import httpx

    return httpx.create_ssl_context()


def proxy_exceptions(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables NO_PROXY and no_proxy of the environment ``given`` with this machine
    added, so that an agent's own clients and programs reach its server without a proxy."""
    found = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        hosts = [host.strip() for host in (given.get(name) or given.get(other, "")).split(",")]
        if "*" not in hosts:  # some clients know it only alone
            hosts = list(dict.fromkeys([*filter(None, hosts), *LOCAL_HOSTS]))
        found[name] = ",".join(hosts)
    return found


def read_result(value: Any) -> dict[str, Any]:
    """Return an agent's result as the result of an environment's step, which the caller checks.
    Raise an InvalidResult if it is neither a number nor a dict with a reward."""
    if not isinstance(value, Mapping):
        if isinstance(value, str | bytes) or value is None:
            kind = "nothing" if value is None else type(value).__name__
            raise InvalidResult(
                f"the agent must return a number, or a dict with 'reward', and returned {kind}"
            )
        return {"reward": value, "done": True}
    if value.get("reward") is None:
        known = ", ".join(map(str, value)) or "no key"
        raise InvalidResult(f"the agent's dict must have a 'reward', and has {known}")
    others = {k: v for k, v in value.items() if k not in ("reward", UNLEARNED)}
    found = {"reward": value["reward"], "metrics": others, "done": True}
    if UNLEARNED not in value:
        return found
    return found | {"messages": [{"role": "tool", "content": json.dumps(list(value[UNLEARNED]))}]}


def unlearned_traces(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the traces that are not learned from the messages of an agent's last observation."""
    return [str(trace) for message in messages for trace in json.loads(message["content"])]
