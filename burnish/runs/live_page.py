"""``burnish watch``: an HTTP server that shows active runs, reading only their directories.

    /                    the list of runs
    /run/NAME            the page of a run, like its report.html
    /run/NAME/status     the state of a run and the version of its data, as JSON
    /run/NAME/data       the data of a run's page, as JSON

The server listens on 127.0.0.1 and rejects requests whose Host header is not 127.0.0.1 or
localhost, which prevents DNS rebinding. A name in a URL is looked up among the runs that were found
and never used as a path. Text that a run wrote is escaped.
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

from burnish.console.text import duration
from burnish.errors import RunError
from burnish.runs import pages, report
from burnish.runs.note import RunNote
from burnish.runs.responses import excerpt

HOST, NAMES, PORT = "127.0.0.1", ("127.0.0.1", "localhost"), 8420
EVERY = 2.0
"""Seconds between two status requests of a page."""
LIMIT, REACH = 1_000_000, 1_000_000
"""Maximum size of the responses in a page, in characters of JSON, and number of bytes that are read
from each end of a file with responses."""
DAMAGE = (RunError, OSError, ValueError, LookupError, TypeError)
"""Errors that reading a damaged or just deleted file may raise."""


class HttpResponse(NamedTuple):
    """Body, content type, Content-Security-Policy and status of a response."""

    text: str
    kind: str = "text/plain"
    policy: str = "default-src 'none'"
    status: HTTPStatus = HTTPStatus.OK


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run: it has a recipe.toml."""
    return (path / "recipe.toml").is_file()


def find_runs(path: Path) -> dict[str, Path]:
    """Return the run at ``path``, or else all runs in that directory, by the names of their
    directories."""
    runs = [path.resolve()] if is_run(path) else sorted(filter(is_run, path.glob("*")))
    return {run.name: run for run in runs}


@lru_cache(maxsize=1000)
def cached_data(run: Path, version: str) -> dict[str, Any]:
    """Return the data of a run's page without its responses, cached per version of its files (see
    `run_status`). Callers must not modify it."""
    return report.report_data(run)


@lru_cache(maxsize=16)
def cached_responses(run: Path, version: str) -> dict[str, Any]:
    """Return the responses of a run's page, cached per version of its files (see `run_status`).
    Callers must not modify them."""
    return excerpt(run, LIMIT, REACH)


def run_status(run: Path, now: float) -> dict[str, Any]:
    """Return a run's state, and the version of its data: a text of its files' sizes and times that
    changes whenever a file changes.

    ``now`` is the time in seconds since 1970.
    """
    stamps = [file.stat() for name in report.FILES if (file := run / name).exists()]
    version = " ".join(f"{stamp.st_size}.{stamp.st_mtime_ns}" for stamp in stamps)
    data = cached_data(run, version)
    state = report.run_state(run, data["done"], data["total"], now=now)
    return {"version": version, "state": state}


def live_data(run: Path, now: float, *, home: bool) -> dict[str, Any]:
    """Return all data of a run's page, with its state and its responses. The page links to the list
    of runs if ``home`` is true."""
    status = run_status(run, now)
    version = status["version"]
    data = cached_data(run, version) | {"rollouts": cached_responses(run, version)}
    return data | status | {"live": {"home": home, "every": EVERY}}


def list_runs(path: Path, now: float) -> list[dict[str, Any]]:
    """Return one row for each run at ``path``, a run or a directory of runs, with its state and
    curves; the most recently updated run is first.

    ``now`` is the time in seconds since 1970. A damaged run has a row with the error.
    """
    rows = []
    for name, run in find_runs(path).items():
        age = now - report.updated(run)
        row = {"name": name, "link": f"/{link(name)}", "age": age, "updated": duration(age)}
        try:
            row |= run_status(run, now)
            data = cached_data(run, row["version"])
            row |= {name: data[name] for name in ("series", "note", "warnings")}
        except DAMAGE as error:
            row["state"] = {"kind": "stopped", "text": f"can't be read: {error}", "doing": ""}
            row |= {"series": {}, "note": RunNote()._asdict(), "warnings": []}
        rows.append(row)
    return sorted(rows, key=lambda row: row["age"])


def link(name: str) -> str:
    """Return the URL of the page of the run ``name``, relative to the server's root."""
    return f"run/{quote(name, safe='', errors='surrogateescape')}"


def respond(path: Path, address: str) -> HttpResponse:
    """Return the response to a GET request for ``address``, a URL or its path, for the runs at
    ``path``.

    A damaged run gives the status 500, and an unknown page the status 404.
    """
    now = time.time()
    try:
        names = urlsplit(address).path.split("/")[1:]
        match [unquote(name, errors="surrogateescape") for name in names]:
            case [""]:
                rows = list_runs(path, now)
                return page("runs", directory=path.resolve().name, runs=rows, every=EVERY)
            case ["run", name, *what] if (run := find_runs(path).get(name)) and len(what) < 2:
                if what == ["status"]:
                    return HttpResponse(json.dumps(run_status(run, now)), "application/json")
                data = live_data(run, now, home=not is_run(path))
                if what == ["data"]:
                    return HttpResponse(json.dumps(data), "application/json")
                if not what:
                    return page("report", data=pages.to_script_json(data))
    except DAMAGE as error:
        return HttpResponse(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
    return HttpResponse("There is no such page.", status=HTTPStatus.NOT_FOUND)


def page(name: str, **values: Any) -> HttpResponse:
    """Return the live page ``name``, a key of `pages.SCRIPTS`; ``values`` fill its template."""
    text = pages.render(name, live=True, **values)
    return HttpResponse(text, "text/html", pages.policy(name, live=True))


class Server(ThreadingHTTPServer):
    """HTTP server for the runs at a path. The constructor binds the port (0: any free port);
    ``serve_forever`` handles requests.

    Raise a RunError if the path is not a directory, or if the port can't be bound.
    """

    def __init__(self, path: Path, port: int = PORT) -> None:
        self.path = path
        if not path.is_dir():
            raise RunError(
                f"watch needs a run directory or a directory of runs, {path} is neither; "
                "start a run there, or name another directory"
            )
        try:
            super().__init__((HOST, port), PageRequestHandler)
        except OSError as error:
            raise RunError(
                f"watch can't listen on port {port}: {error.strerror}; choose another port with "
                "--port, or any free port with --port 0"
            ) from error

    @property
    def url(self) -> str:
        """URL of the first page: the run's page, or the list of runs if the path is a directory of
        runs."""
        home = f"http://{HOST}:{self.server_port}/"
        return home + link(self.path.resolve().name) if is_run(self.path) else home

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the client closed the connection before it had the response."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class PageRequestHandler(BaseHTTPRequestHandler):
    """Answers GET requests with `respond`, and requests for another host with the status 403."""

    server: Server
    timeout = 10

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        found = HttpResponse("Open this server as 127.0.0.1.", status=HTTPStatus.FORBIDDEN)
        if [host.rpartition(":")[0] or host for host in hosts] in [[name] for name in NAMES]:
            found = respond(self.server.path, self.path)
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
        """Print nothing: requests are not logged."""
