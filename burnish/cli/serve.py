"""``burnish serve``: an OpenAI-compatible endpoint for a model on this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from burnish.api import open_engine, progress_display
from burnish.calls import CallFormatName
from burnish.launch.preflight import require_extra
from burnish.launch.resolve import resolve
from burnish.recipe.load import load_recipe
from burnish.recipe.recipe import Recipe

KEY = "BURNISH_SERVE_KEY"
"""Environment variable with the key that requests must have."""


def serve_command(
    model: Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")],
    port: Annotated[int, Option(min=0, max=65535, help="0 chooses a free port")] = 8421,
    host: Annotated[
        str, Option(help="0.0.0.0 accepts other machines, which need the key")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, Option(help="a further name of this machine; may be repeated")
    ] = None,
    follow: Annotated[
        Path | None, Option(help="a run, whose newest checkpoint is loaded as it is saved")
    ] = None,
    tool_format: Annotated[
        CallFormatName | None, Option(help="how the model calls tools; by default as its template")
    ] = None,
    serial: Annotated[
        bool,
        Option("--serial", help="sample one request at a time: equal requests, equal bits"),
    ] = False,
) -> None:
    """Serve a model at an OpenAI-compatible endpoint, for agents or as a judge, until Ctrl-C.

    Requests need a key if other machines can send them: the environment variable BURNISH_SERVE_KEY,
    or else a key that is generated and printed.
    """
    require_extra("serve", "burnish serve")
    from burnish.engine.endpoint.access import is_loopback
    from burnish.engine.endpoint.app import Endpoint, make_app
    from burnish.engine.endpoint.backend import ModelCard
    from burnish.engine.endpoint.server import listen, make_server, run_endpoint
    from burnish.engine.endpoint.thread import EngineThread

    with progress_display(None, model):
        resolved = resolve(_recipe(model))
        from burnish.engine.endpoint.engine_backend import EngineBackend
        from burnish.engine.endpoint.prompts import ChatPrompts
        from burnish.launch.engines import build_engine
        from burnish.launch.following import RunFollower
        from burnish.tasks.text import TODAY, encode_chat

        engine, tokenizer = build_engine(resolved), resolved.source.tokenizer
    context, precision = resolved.source.shape.context, resolved.recipe.engine.precision
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    key = os.environ.get(KEY) or None
    try:
        with ExitStack() as stack:
            thread = stack.enter_context(EngineThread(engine, serial=serial))
            if follow is not None:
                stack.enter_context(RunFollower(follow, precision, thread.load, echo))
            chat = partial(encode_chat, tokenizer)
            prompts = ChatPrompts(tokenizer, chat, calls=tool_format, now=TODAY)

            def card() -> ModelCard:
                return ModelCard(model, context, version=thread.version if follow else None)

            backend = EngineBackend(thread, tokenizer, prompts, card)
            echo(f"serving {model} at http://{name}:{listener.getsockname()[1]}/v1")
            if key is None and not is_loopback(host):
                key = secrets.token_urlsafe(24)
                echo(f"{KEY}={key}")
            server = make_server(make_app(Endpoint(backend), allow_host or (), key))
            asyncio.run(run_endpoint(server, thread, listener))
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(0)  # torch's cleanup in a regular exit can take seconds


def open_named_model(model: str) -> tuple[Any, Any]:
    """Load a language model by name, directory, hf:ORG/NAME or run; return its engine and its
    tokenizer."""
    return open_engine(_recipe(model))


def _recipe(model: str) -> Recipe:
    return load_recipe({"task": "keywords", "model": {"name": model}})
