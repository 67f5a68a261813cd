"""``burnish engine``: serve an engine to other machines, and check one before trusting it."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from burnish import config, preflight
from burnish.api import shown
from burnish.engine.environment import TOKEN
from burnish.progress import tell
from burnish.schema.recipe import Recipe
from burnish.types import FloatArray, IntArray
from burnish.wording import printable

app = typer.Typer(no_args_is_help=True, help="Serve an engine to other machines, or check one.")

Model = Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")]
Name = Annotated[str, Option(help="native, hf, vllm or sglang")]
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


TEXTS = (
    "In the morning the two friends walked along the river to the old mill, counted the boats and "
    "talked about the answer to a question that nobody had asked: how many words are there in",
    "1 2 3 4 5 6 7",
    "Once",
)
"""Prompts of the checks, of several lengths."""


class Reference:
    """burnish's own forward pass, by the model of a directory."""

    def __init__(self, directory: Path, precision: str, device: str) -> None:
        from burnish.model import checkpoint
        from burnish.models import DTYPES

        self.model = checkpoint.load(directory, dtype=DTYPES[precision]).to(device)
        self._first = {name: t.clone() for name, t in self.model.exchange().items()}
        self.probe = self.model.probe

    def score(self, prompt: IntArray, response: IntArray, temperature: float) -> FloatArray:
        import torch

        from burnish.model.attention import causal

        device = self.model.embed.weight.device
        ids = torch.from_numpy(np.concatenate([prompt, response])).long().to(device)
        with torch.no_grad():
            places = torch.arange(len(ids), device=device)
            hidden = self.model(ids, places, causal([len(ids)], device))
            logits = self.model.logits(hidden[len(prompt) - 1 : -1]).float() / temperature
            chosen = logits.gather(-1, ids[len(prompt) :, None])[:, 0]
            # PyTorch's log_softmax is 3e-5 off on ARM cores, with 49,152 logits in float32.
            scores = chosen - logits.logsumexp(-1)
        found: FloatArray = scores.cpu().numpy()
        return found

    def take(self, change: float) -> dict[str, Any]:
        from burnish.model.checkpoint import load_hf_state

        tensors = {name: tensor * (1 + change) for name, tensor in self._first.items()}
        load_hf_state(self.model, tensors)
        return tensors


@app.command()
def check(
    model: Model,
    name: Name = "native",
    python: Python = None,
    url: Annotated[str | None, Option(help="of an engine that serves")] = None,
    overrides: Overrides = None,
) -> None:
    """Compare an engine with burnish's own forward pass, in a table; exit code 1 if a check fails.

    The first checks are about log-probabilities, the others about ends, seeds and new weights.
    """
    with shown(None, model):
        recipe = _recipe(model, overrides, name=name, python=python, url=url)
        tell("load", "loading torch")
        from burnish import build, engines, models, sizes
        from burnish.engine.check import FAIL, TOKENS, Result, Suite

        recipe = build.prepare(recipe)
        engine, tokenizer = build.build_engine(recipe), models.open_tokenizer(recipe)
        own = engines.directory_of(recipe)
        reference = Reference(own, recipe.engine.precision, sizes.device_of(recipe))
        context = sizes.measured(recipe).context - 1
        prompts = [tokenizer.encode(text)[: context - TOKENS] for text in TEXTS]
    typer.echo(f"{name} with {model} in {recipe.engine.precision}")

    given, found = engines.settings_of(recipe, own), list[Result]()
    how = {"precision": given.precision, "on_update": given.on_update}
    suite = Suite(engine, reference, prompts, room=context - len(prompts[0]), **how)
    for check in suite.checks:
        found.append(suite.run(check))
        typer.echo(f"{check:<36} {found[-1].status:<12} {printable(found[-1].told)}")
    failed = sum(result.status == FAIL for result in found)
    typer.echo(f"{failed} of {len(found)} checks failed" if failed else "no check failed")
    raise typer.Exit(1 if failed else 0)
