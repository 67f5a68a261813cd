"""``burnish engine``: serve an engine to other processes and machines."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import closing, suppress
from typing import Annotated, Any

import typer
from typer import Argument, Option

from burnish import config, preflight
from burnish.api import shown
from burnish.engine.environment import TOKEN
from burnish.progress import tell
from burnish.schema.recipe import Recipe

app = typer.Typer(no_args_is_help=True, help="Serve an engine to runs on other machines.")

Model = Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")]
Name = Annotated[str, Option(help="native")]
Python = Annotated[str | None, Option(help="of the engine's environment; this one by default")]
Overrides = Annotated[list[str] | None, Option("--set", metavar="A.B=C", help="may be repeated")]


def _recipe(model: str, overrides: list[str] | None, **engine: Any) -> Recipe:
    """A recipe whose engine is meant, checked."""
    given = {key: value for key, value in engine.items() if value is not None}
    named = {"task": "keywords", "model": {"name": model}, "engine": given}
    recipe = config.load(named, overrides or ())
    preflight.check(recipe)
    return recipe


@app.command()
def serve(
    model: Model,
    name: Name = "native",
    python: Python = None,
    host: Annotated[str, Option(help="0.0.0.0 lets other machines in")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one")] = 8422,
    overrides: Overrides = None,
) -> None:
    """Serve an engine to runs that name it by engine.url, until Ctrl-C.

    A run shows a token, which is the variable BURNISH_ENGINE_TOKEN on both sides; without one, a
    token is made and printed. Tokens and weights travel as they are: use a network that you trust.
    """
    from burnish.engine import listening

    python = python or sys.executable
    with shown(None, model):
        recipe = _recipe(model, overrides, name=name, python=python)
        listener = listening.listen(host, port)
        tell("load", "loading torch")
        from burnish import engines
        from burnish.sizes import settled

        recipe = settled(recipe)
        settings = engines.settings_of(recipe, engines.directory_of(recipe))
    token = os.environ.get(TOKEN)
    with closing(listener), suppress(KeyboardInterrupt):
        port = listener.getsockname()[1]
        typer.echo(f"serving {name} with {model} at tcp://{host}:{port}")
        if not token:
            token = secrets.token_urlsafe(16)
            typer.echo(f"{TOKEN}={token}")
        listening.accept(listener, token, settings, python, typer.echo)
