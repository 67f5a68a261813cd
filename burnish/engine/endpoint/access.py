"""Who may use the endpoint: names of the server in the Host header, and the key.

A page in a browser can't use the endpoint: a request must have the content type of JSON, which a
page of another origin can't send without a CORS preflight request, and its Host header must not be
a foreign name, which prevents DNS rebinding.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection, Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from burnish.engine.endpoint.answers import error_response
from burnish.engine.endpoint.backend import RequestRefused


def known_hosts(hosts: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of this server in lower case: localhost, this machine's name and
    ``hosts``."""
    return frozenset({"localhost", socket.gethostname().lower(), *map(str.lower, hosts)})


def check_access(app: ASGIApp, names: Collection[str], key: str | None) -> ASGIApp:
    """Return an application that passes requests to ``app``, except two kinds: requests whose Host
    header is neither an IP address nor one of ``names`` (status 403), and, unless ``key`` is None,
    requests without the header Authorization: Bearer KEY (status 401)."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = _check_host(_values(scope, b"host"), names)
            if refused is None and key is not None:
                refused = _check_key(_values(scope, b"authorization"), key)
            if refused is not None:
                return await error_response(refused)(scope, receive, send)
        return await app(scope, receive, send)

    return checked


def is_known(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an IP address or one of ``names``, which are in lower case. A
    port may follow; an invalid header is not known."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ip_address(name))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _check_host(hosts: Sequence[str], names: Collection[str]) -> RequestRefused | None:
    if [is_known(host, names) for host in hosts] == [True]:
        return None
    return RequestRefused(
        403,
        f"the Host header {', '.join(hosts)[:200]!r} is not a name of this server; use its IP "
        "address, or start it with --allow-host NAME",
    )


def _check_key(shown: Sequence[str], key: str) -> RequestRefused | None:
    words = " ".join(shown).split(None, 1)
    is_bearer = len(words) == 2 and words[0].lower() == "bearer"
    if is_bearer and hmac.compare_digest(words[1].strip().encode(), key.encode()):
        return None
    return RequestRefused(
        401,
        "this server needs its key: send the header Authorization: Bearer KEY, which OpenAI's "
        "client does with api_key = KEY",
        code="invalid_api_key",
    )
