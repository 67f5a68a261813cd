"""``burnish serve``: an OpenAI-compatible endpoint for a model on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from typing import Annotated, Any

from typer import Argument, Option, echo

from burnish.api import open_engine, progress_display
from burnish.launch.preflight import require_extra
from burnish.recipe.load import load_recipe


def serve_command(
    model: Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")],
    port: Annotated[int, Option(min=0, max=65535, help="0 chooses a free port")] = 8421,
    host: Annotated[
        str, Option(help="0.0.0.0 accepts other machines; there is no API key")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, Option(help="a further name of this machine; may be repeated")
    ] = None,
    serial: Annotated[
        bool,
        Option("--serial", help="sample one request at a time: equal requests, equal bits"),
    ] = False,
) -> None:
    """Serve a model at an OpenAI-compatible endpoint, for example as a judge, until Ctrl-C."""
    require_extra("serve", "burnish serve")
    from burnish.engine.endpoint.app import Endpoint, make_app
    from burnish.engine.endpoint.server import listen, make_server, run_server
    from burnish.engine.endpoint.thread import EngineThread

    with progress_display(None, model):
        engine, tokenizer = open_model(model)
    from burnish.tasks.text import encode_chat

    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    try:
        with EngineThread(engine, serial=serial) as thread:
            chat = partial(encode_chat, tokenizer)
            endpoint = Endpoint(model, thread, encode=tokenizer.encode, encode_chat=chat)
            server = make_server(make_app(endpoint, allow_host or ()))
            echo(f"serving {model} at http://{name}:{listener.getsockname()[1]}/v1")
            asyncio.run(run_server(server, thread, listener))
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(0)  # torch's cleanup in a regular exit can take seconds


def open_model(model: str) -> tuple[Any, Any]:
    """Load a language model by name, directory, hf:ORG/NAME or run; return its engine and its
    tokenizer."""
    return open_engine(load_recipe({"task": "keywords", "model": {"name": model}}))
