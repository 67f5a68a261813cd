"""HTTP API of an SGLang server: calls with a timeout, and errors that name the server."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from burnish.engine.remote.environment import version_parts
from burnish.errors import EngineError

OLDEST = "0.5.15"
"""Oldest supported SGLang: the version whose answers tests/engine/sglang_contract.json records."""
FACTS: dict[str, type] = {
    "version": str,
    "max_req_input_len": int,
    "skip_tokenizer_init": bool,
    "enable_deterministic_inference": bool,
    "dtype": str,
    "device": str,
    "tp_size": int,
    "pp_size": int,
    "dp_size": int,
    "enable_memory_saver": bool,
    "enable_weights_cpu_backup": bool,
}
"""The fields of /server_info that burnish reads, with their types."""


class SglangApi:
    """Makes the HTTP calls to one SGLang server; every error names its url."""

    def __init__(self, url: str, deadline: float, key: str | None = None) -> None:
        """``deadline``: timeout of each call in seconds; ``key``: the server's API key, None if it
        has none."""
        self.url, self.deadline, self._key = url.rstrip("/"), deadline, key
        self._opener = urllib.request.OpenerDirector()
        # Neither a proxy nor a redirect may pass the key to another server.
        for handler in (
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)
        self.lost: str | None = None
        """Why the server can't be called any more; None while it can."""

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call ``path``, by GET if ``body`` is None and otherwise by POST with the body as JSON.
        Return the answer's JSON object, or None if the answer is not an object.

        Raise an EngineError if the server refuses the call, redirects it, or answers with broken
        JSON. If the server can't be reached or does not answer within the timeout, all further
        calls fail, too.
        """
        if self.lost is not None:
            raise self.error(self.lost)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        request.add_header("Content-Type", "application/json")
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=self.deadline) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            why = f"refused {path} ({error.code}): {error.read(1000).decode(errors='replace')}"
            if error.code in (401, 403):
                why += "; engine.key must name the environment variable that holds its API key"
            elif 300 <= error.code < 400:
                where = error.headers.get("Location")
                why = f"sends {path} to {where}, which burnish does not follow; use that url"
        except (OSError, http.client.HTTPException) as error:
            why = f"does not answer {path}: {error}; check its log, and whether it is running"
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                why = (
                    f"has a connection that is not trusted: {error}; use http:// if it has no TLS, "
                    "or set SSL_CERT_FILE to its certificate authority"
                )
            elif TimeoutError in (type(error), type(getattr(error, "reason", None))):
                why = f"did not answer {path} within engine.deadline = {self.deadline:g} s"
            self.lost = why
        else:
            try:
                return json.loads(said) if said.startswith(b"{") else None
            except (ValueError, RecursionError) as error:
                why = f"answers {path} with broken JSON ({error}); is it an SGLang server?"
        raise self.error(why)

    def facts(self) -> dict[str, Any]:
        """Return the fields of /server_info that burnish reads (`FACTS`). Raise an EngineError if
        the server is too old or a field is missing or has the wrong type."""
        found = self.call("/server_info") or {}
        if isinstance(found.get("version"), str) and version_parts(
            found["version"]
        ) < version_parts(OLDEST):
            raise self.error(f"must be {OLDEST} or newer, is {found['version']}")
        wrong = [name for name, kind in FACTS.items() if type(found.get(name)) is not kind]
        if wrong:
            given = ", ".join(
                f"{name} = {found[name]!r:.40}" if name in found else f"no {name}" for name in wrong
            )
            raise self.error(
                f"answers /server_info with {given}; burnish needs SGLang {OLDEST} or newer, so "
                "check engine.url, and that no proxy answers instead"
            )
        return {name: found[name] for name in FACTS}

    def part(self, answer: Any, path: str, *names: str) -> Any:
        """Return the nested field ``names`` of ``answer``, which the server gave to a call of
        ``path``. Raise an EngineError if the field is missing."""
        for name in names:
            if not isinstance(answer, dict) or name not in answer:
                raise self.error(
                    f"answers {path} without {'.'.join(names)}; is it SGLang {OLDEST}?"
                )
            answer = answer[name]
        return answer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation inside a ``with`` block: calls in flight return their tokens so far,
        later calls wait until the block ends."""
        self.call("/pause_generation", {"mode": "abort"})
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                self.call("/continue_generation", {})
            raise
        self.call("/continue_generation", {})

    def error(self, why: str) -> EngineError:
        """Return an EngineError that says ``why`` and names the server, without the API key."""
        text = why if self._key is None else why.replace(self._key, "(key)")
        return EngineError(f"SGLang at {self.url} {text}")
