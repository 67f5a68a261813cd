"""``burnish watch``: runs in a browser while they run, read from their directories alone.

    /                    the runs of a directory
    /run/NAME            one run, as report.html shows it
    /run/NAME/status     what it is doing, and which version of its data is the newest
    /run/NAME/data       its data

The server listens on 127.0.0.1 and answers only those who call it by that name or as localhost: a
foreign page whose own name points here (DNS rebinding) is refused. A name in an address is looked
up among the runs that were found, and never becomes a path. What a run wrote is escaped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from markupsafe import Markup

from burnish.errors import RunError
from burnish.runs import pages, report, status
from burnish.runs.directory import read_recipe
from burnish.runs.metrics import iterate_rows
from burnish.runs.pages import encode
from burnish.wording import duration

HOST, NAMES, PORT = "127.0.0.1", ("127.0.0.1", "localhost"), 8420
EVERY = 2.0
"""Seconds between two looks of a page at its runs."""
LIMIT, REACH = 1_000_000, 1_000_000
"""Bytes of a page, and bytes that are read at each end of a file with responses."""
LISTED = 100_000
"""Bytes at each end of metrics.jsonl from which the list takes its figures."""
REST = 10
"""A page that took t seconds to make is not made again for this many times t."""
FILES = (
    "recipe.toml",
    "environment.json",
    "metrics.jsonl",
    "timings.jsonl",
    "rollouts.jsonl",
    "evaluations.jsonl",
    "summary.json",
)
"""A page is made of these."""
DAMAGE = (RunError, OSError, ValueError, LookupError, TypeError)
"""Errors that a damaged file, or one that has just gone, may raise."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Answer(NamedTuple):
    text: str
    kind: str = "text/plain"
    policy: str = "default-src 'none'"
    status: HTTPStatus = HTTPStatus.OK


class Drawn(NamedTuple):
    """A run's page as it was last made."""

    data: Markup
    version: str
    done: int
    total: int | None


class Kept(NamedTuple):
    signature: object
    """Sizes and times of the files that the value was made from."""
    value: Any
    until: float
    """The value is not made again before this time."""


class Runs:
    """The runs under a path, each drawn again only if its files have changed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = path, clock
        self.alone = (path / "recipe.toml").is_file()
        self._kept: dict[tuple[str, Path], Kept] = {}
        self._lock = threading.Lock()
        if not path.is_dir():
            raise RunError(
                f"watch needs a run directory or a directory of runs, {path} is neither; "
                "start a run there, or name another"
            )

    def find(self) -> dict[str, Path]:
        """The runs by name."""
        if self.alone:
            return {self.path.resolve().name: self.path}
        return {run.parent.name: run.parent for run in sorted(self.path.glob("*/recipe.toml"))}

    def draw(self, run: Path) -> Drawn:
        """A run's data, which is JSON, and their version."""

        def make() -> Drawn:
            found = report.describe(run, now=self.clock(), limit=LIMIT, reach=REACH)
            found["live"] = {"home": not self.alone, "every": EVERY}
            version = hashlib.sha256(encode(found).encode()).hexdigest()[:16]
            data = encode(found | {"version": version})
            return Drawn(data, version, found["done"], found["total"])

        drawn: Drawn = self._keep("page", run, make)
        return drawn

    def status(self, run: Path) -> dict[str, Any]:
        """What a run is doing, in words."""
        drawn, told, now = self.draw(run), status.read(run), self.clock()
        chip = report.chip(run, drawn.done, drawn.total, now=now)
        doing = told if chip["kind"] == "running" else None
        return {
            "version": drawn.version,
            "state": chip,
            "now": doing.sentence() if doing else "",
            "left": doing.left() if doing else "",
            "share": doing.share if doing else None,
        }

    def rows(self) -> list[dict[str, str]]:
        """A row for each run, the last updated first."""
        runs = self.find().items()
        rows = [(_updated(run), self._row(name, run)) for name, run in runs]
        now = self.clock()
        rows.sort(key=lambda row: -row[0])
        return [row | {"updated": duration(now - updated)} for updated, row in rows]

    def _row(self, name: str, run: Path) -> dict[str, str]:
        def make() -> dict[str, Any]:
            series = report.collect(iterate_rows(run / "metrics.jsonl", LISTED))
            steps = [step for points in series.values() for step, _ in points]
            figures = {name: tile.value for name, tile in report.headlines(series, "").items()}
            loss = figures.get(report.LOSS)
            return {
                "done": int(max(steps, default=0)),
                "total": report.total_steps(run, read_recipe(run)),
                "reward": figures.get(report.REWARD) or ("–" if loss is None else f"loss {loss}"),
                "held_out": figures.get(report.VALIDATION)
                or figures.get(report.VALIDATION_LOSS, "–"),
            }

        row = {"name": name, "link": f"/{_link(name)}"}
        try:
            found: dict[str, Any] = self._keep("row", run, make)
        except DAMAGE as error:
            empty = dict.fromkeys(("step", "reward", "held_out"), "–")
            return row | empty | {"kind": "stopped", "state": f"can't be read: {error}"}
        done, total = found["done"], found["total"]
        kind, state = report.state_of(run, now=self.clock())
        told = status.read(run) if kind == "running" else None
        doing = ", ".join(filter(None, (told.sentence(), told.left()))) if told else ""
        return row | {
            "kind": kind,
            "state": f"{state}: {doing}" if doing else state,
            "step": f"{done:,} of {total:,}" if total else f"{done:,}",
            "reward": found["reward"],
            "held_out": found["held_out"],
        }

    def _keep(self, kind: str, run: Path, make: Callable[[], Any]) -> Any:
        signature = [_stamp(run / name) for name in FILES]
        with self._lock:
            kept, now = self._kept.get((kind, run)), time.monotonic()
            if kept is None or (kept.signature != signature and now >= kept.until):
                value = make()
                end = time.monotonic()
                kept = Kept(signature, value, end + REST * (end - now))
                self._kept[kind, run] = kept
        return kept.value


def _link(name: str) -> str:
    return f"run/{quote(name, safe='', errors='surrogateescape')}"


def _updated(run: Path) -> float:
    """When a run last wrote something, in seconds since 1970."""
    stamps = (_stamp(run / name) for name in (*FILES, status.FILE))
    return max((stamp[1] for stamp in stamps if stamp), default=0) / 1e9


def _stamp(file: Path) -> tuple[int, int] | None:
    """Size and time of a file's last change; None if there is no such file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def answer(runs: Runs, path: str) -> Answer:
    """The answer to a GET of this path."""
    try:
        names = urlsplit(path).path.split("/")[1:]
        parts = [unquote(name, errors="surrogateescape") for name in names]
        if parts == [""]:
            name = runs.path.resolve().name
            return page("runs", directory=name, runs=runs.rows(), every=EVERY)
        run = runs.find().get(parts[1]) if len(parts) > 1 and parts[0] == "run" else None
        if run is not None:
            match parts[2:]:
                case []:
                    return page("report", data=runs.draw(run).data)
                case ["data"]:
                    return Answer(runs.draw(run).data, "application/json")
                case ["status"]:
                    return Answer(json.dumps(runs.status(run)), "application/json")
    except DAMAGE as error:
        return Answer(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
    return Answer("There is no such page.", status=HTTPStatus.NOT_FOUND)


def page(name: str, **values: Any) -> Answer:
    text = pages.render(name, live=True, **values)
    return Answer(text, "text/html", pages.policy(name, live=True))


class Server(ThreadingHTTPServer):
    """Listens from the moment it is made; ``serve_forever`` answers."""

    def __init__(self, path: Path, port: int = PORT) -> None:
        self.runs = Runs(path)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"fails: {error.strerror}"
            raise RunError(
                f"watch needs a free port, {port} {why}; choose another with --port, "
                "or any free one with --port 0"
            ) from error

    @property
    def url(self) -> str:
        home = f"http://{HOST}:{self.server_port}/"
        return home + _link(self.runs.path.resolve().name) if self.runs.alone else home

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away before its answer came is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10
    server_version = "burnish"
    sys_version = ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if [host.rpartition(":")[0] or host for host in hosts] not in [[name] for name in NAMES]:
            self._send(Answer("Call this server 127.0.0.1.", status=HTTPStatus.FORBIDDEN))
        else:
            self._send(answer(self.server.runs, self.path))

    def _send(self, answer: Answer) -> None:
        body = answer.text.encode("utf-8", "replace")
        self.send_response(answer.status)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        policy = f"{answer.policy}; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", policy)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""
