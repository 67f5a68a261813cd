"""``burnish watch``: runs in a browser while they run, read from their directories alone.

    /                    the runs of a directory
    /run/NAME            one run, as report.html shows it
    /run/NAME/status     how it stands, and which version of its data is the newest
    /run/NAME/data       its data

The server listens on 127.0.0.1 and answers only requests that call it by that name or as localhost:
a foreign page whose own name points here (DNS rebinding) is refused. A name in an address is looked
up among the runs that were found, and never becomes a path. Text that a run wrote is escaped.
"""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from burnish.errors import RunError
from burnish.runs import pages, report
from burnish.runs.responses import excerpt
from burnish.wording import duration

HOST, NAMES, PORT = "127.0.0.1", ("127.0.0.1", "localhost"), 8420
EVERY = 2.0
"""Seconds between two looks of a page at its runs."""
LIMIT, REACH = 1_000_000, 1_000_000
"""Bytes of a page's responses, and bytes that are read at each end of a file with responses."""
DAMAGE = (RunError, OSError, ValueError, LookupError, TypeError)
"""Errors that a damaged file, or one that has just gone, may raise."""


class Answer(NamedTuple):
    text: str
    kind: str = "text/plain"
    policy: str = "default-src 'none'"
    status: HTTPStatus = HTTPStatus.OK


def is_run(path: Path) -> bool:
    return (path / "recipe.toml").is_file()


def find(path: Path) -> dict[str, Path]:
    """The run at a path, or the runs in it, by name."""
    runs = [path.resolve()] if is_run(path) else sorted(filter(is_run, path.glob("*")))
    return {run.name: run for run in runs}


@lru_cache(maxsize=1000)
def described(run: Path, version: str) -> dict[str, Any]:
    """The data of a run's page without its responses, read once for each version of the files."""
    return report.describe(run)


@lru_cache(maxsize=16)
def responses(run: Path, version: str) -> dict[str, Any]:
    return excerpt(run, LIMIT, REACH)


def stand(run: Path, now: float) -> dict[str, Any]:
    """How a run stands, and the version of its data: sizes and times of the files of its page.

    ``now`` is in seconds since 1970.
    """
    stamps = [file.stat() for name in report.FILES if (file := run / name).exists()]
    version = " ".join(f"{stamp.st_size}.{stamp.st_mtime_ns}" for stamp in stamps)
    data = described(run, version)
    state = report.standing(run, data["done"], data["total"], now=now)
    return {"version": version, "state": state}


def draw(run: Path, now: float, *, home: bool) -> dict[str, Any]:
    """The data of a run's page, which links to the list of runs if it has a ``home``."""
    told = stand(run, now)
    data = described(run, told["version"]) | {"rollouts": responses(run, told["version"])}
    return data | told | {"live": {"home": home, "every": EVERY}}


def list_runs(path: Path, now: float) -> list[dict[str, Any]]:
    """A row for each run, the last updated first."""
    rows = []
    for name, run in find(path).items():
        age = now - report.updated(run)
        row = {"name": name, "link": f"/{link(name)}", "age": age, "updated": duration(age)}
        try:
            row |= stand(run, now)
            row["series"] = described(run, row["version"])["series"]
        except DAMAGE as error:
            row["state"] = {"kind": "stopped", "text": f"can't be read: {error}", "doing": ""}
            row["series"] = {}
        rows.append(row)
    return sorted(rows, key=lambda row: row["age"])


def link(name: str) -> str:
    return f"run/{quote(name, safe='', errors='surrogateescape')}"


def answer(path: Path, address: str) -> Answer:
    """The answer to a GET of an address, for the runs at a path."""
    now = time.time()
    try:
        names = urlsplit(address).path.split("/")[1:]
        match [unquote(name, errors="surrogateescape") for name in names]:
            case [""]:
                rows = list_runs(path, now)
                return page("runs", directory=path.resolve().name, runs=rows, every=EVERY)
            case ["run", name, *what] if (run := find(path).get(name)) and len(what) < 2:
                if what == ["status"]:
                    return Answer(json.dumps(stand(run, now)), "application/json")
                data = draw(run, now, home=not is_run(path))
                if what == ["data"]:
                    return Answer(json.dumps(data), "application/json")
                if not what:
                    return page("report", data=pages.encode(data))
    except DAMAGE as error:
        return Answer(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
    return Answer("There is no such page.", status=HTTPStatus.NOT_FOUND)


def page(name: str, **values: Any) -> Answer:
    text = pages.render(name, live=True, **values)
    return Answer(text, "text/html", pages.policy(name, live=True))


class Server(ThreadingHTTPServer):
    """Listens from the moment it is made; ``serve_forever`` answers."""

    def __init__(self, path: Path, port: int = PORT) -> None:
        self.path = path
        if not path.is_dir():
            raise RunError(
                f"watch needs a run directory or a directory of runs, {path} is neither; "
                "start a run there, or name another"
            )
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            raise RunError(
                f"watch can't listen on port {port}: {error.strerror}; choose another with --port, "
                "or any free one with --port 0"
            ) from error

    @property
    def url(self) -> str:
        home = f"http://{HOST}:{self.server_port}/"
        return home + link(self.path.resolve().name) if is_run(self.path) else home

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away before its answer came is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        found = Answer("Call this server 127.0.0.1.", status=HTTPStatus.FORBIDDEN)
        if [host.rpartition(":")[0] or host for host in hosts] in [[name] for name in NAMES]:
            found = answer(self.server.path, self.path)
        body = found.text.encode("utf-8", "replace")
        self.send_response(found.status)
        self.send_header("Content-Type", f"{found.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{found.policy}; frame-ancestors 'none'")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""
