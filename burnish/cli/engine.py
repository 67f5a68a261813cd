"""``burnish engine``: serve an engine to other machines, or check an engine's correctness."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from burnish.api import progress_display
from burnish.console.text import printable
from burnish.engine.protocol import ExternalEngine
from burnish.engine.remote.environment import TOKEN
from burnish.launch.preflight import find_problems, raise_problems
from burnish.launch.resolve import resolve
from burnish.recipe.load import load_recipe
from burnish.recipe.recipe import Recipe
from burnish.types import FloatArray, IntArray

app = typer.Typer(no_args_is_help=True, help="Serve an engine to other machines, or check one.")

Model = Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")]
Name = Annotated[str, Option(help="native, hf, vllm or sglang")]
Python = Annotated[
    str | None, Option(help="interpreter of the engine's environment; this one by default")
]
Overrides = Annotated[list[str] | None, Option("--set", metavar="A.B=C", help="may be repeated")]


def _recipe(model: str, overrides: list[str] | None, **engine: Any) -> Recipe:
    """Return a recipe for an engine, of which only the sections model and engine are used. Settings
    of the engine that are None keep their defaults. Raise the problems that its checks find."""
    given = {key: value for key, value in engine.items() if value is not None}
    named = {"task": "keywords", "model": {"name": model}, "engine": given}
    recipe = load_recipe(named, overrides or ())
    raise_problems(find_problems(recipe))
    return recipe


@app.command("serve")
def serve_engine_command(
    model: Model,
    name: Name = "native",
    python: Python = None,
    host: Annotated[str, Option(help="0.0.0.0 accepts other machines")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 chooses a free port")] = 8422,
    overrides: Overrides = None,
) -> None:
    """Serve an engine to runs that set engine.url, until Ctrl-C.

    A run authenticates with a token, the environment variable BURNISH_ENGINE_TOKEN on both sides.
    If it is not set here, a token is generated and printed. Tokens and weights are not encrypted:
    use a trusted network.
    """
    from burnish.engine.remote import listener as listening

    python = python or sys.executable
    with progress_display(None, model):
        recipe = _recipe(model, overrides, name=name, python=python)
        listener = listening.open_listener(host, port)
        resolved = resolve(recipe, checks=False)
        from burnish.launch import engines

        folder = engines.directory_of(resolved.source, resolved.recipe.engine.precision)
        settings = engines.settings_of(resolved, folder)
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
"""Prompts of different lengths for the checks."""
RUNNING = 8
"""Number of samples that decode concurrently during the checks. It is small, so that some requests
are queued while the weights are updated."""


class Reference:
    """The ``Oracle`` of the checks: computes log-probabilities with burnish's own forward pass,
    which the engine must match.

    It loads the model in a directory, and can change its weights as an update does.
    """

    def __init__(self, directory: Path, precision: str, device: str) -> None:
        from burnish.launch.models import DTYPES
        from burnish.model import checkpoint

        self.model = checkpoint.load_model(directory, dtype=DTYPES[precision]).to(device)
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

    def take(self, change: float, *, turned: bool = False, part: bool = False) -> dict[str, Any]:
        from burnish.model.checkpoint import load_hf_state

        tensors = {
            name: tensor * ((1 + change) * (-1 if turned and is_turned(name) else 1))
            for name, tensor in self._first.items()
            if ".self_attn." in name or not part
        }
        load_hf_state(self.model, self._first | tensors)
        return tensors


def is_turned(name: str) -> bool:
    """Return whether ``Reference.take(turned=True)`` negates the tensor of this name: q, k, v and
    the weight of the projection O, but not O's bias.

    The model's function stays the same, because (−q)·(−k) = q·k and (−O)(−v) = O v, but keys and
    values that were cached before the change become wrong, so that the checks detect a stale cache.
    """
    _, _, own = name.partition(".self_attn.")
    return own.startswith(("q_proj.", "k_proj.", "v_proj.")) or own == "o_proj.weight"


@app.command("check")
def check_engine_command(
    model: Model,
    name: Name = "native",
    python: Python = None,
    url: Annotated[str | None, Option(help="address of an engine that is already served")] = None,
    overrides: Overrides = None,
) -> None:
    """Compare an engine with burnish's own forward pass and print a table; exit code 1 if a check
    fails.

    The first checks cover log-probabilities, the others stop conditions, seeds and weight updates.
    The checks of caches after a weight update are done for both values of loop.on_update.
    """
    is_served = (url or "").startswith("tcp")
    running = None if is_served else RUNNING
    with progress_display(None, model):
        given = {"name": name, "python": python, "url": url, "max_running": running}
        recipe = _recipe(model, overrides, **given)
        resolved = resolve(recipe, checks=False)
        from burnish.engine.conformance import FAIL, TOKENS, UPDATES, Suite
        from burnish.launch import engines
        from burnish.recipe.runtime import FreeLoop

        recipe, source = resolved.recipe, resolved.source
        own, tokenizer = engines.directory_of(source, recipe.engine.precision), source.tokenizer
        reference = Reference(own, recipe.engine.precision, resolved.device)
        context = source.shape.context - 1
        prompts = [tokenizer.encode(text)[: context - TOKENS] for text in TEXTS]
        mode: str = engines.settings_of(resolved, own).on_update
    typer.echo(f"{name} with {model} in {recipe.engine.precision}")

    results = list[str]()
    others = {"keep": "recompute", "recompute": "keep"}
    for on_update in [mode] if is_served else [mode, others[mode]]:
        with progress_display(None, model):
            reference.take(0.0)
            loop = recipe.loop if is_served else FreeLoop(on_update=on_update)
            engine = engines.build_engine(
                replace(resolved, recipe=recipe.model_copy(update={"loop": loop}))
            )
        mode = on_update
        if is_served and isinstance(engine, ExternalEngine):
            mode = engine.facts["on_update"]  # the setting of the serving side
        suite = Suite(
            engine,
            reference,
            prompts,
            room=context - len(prompts[0]),
            precision=recipe.engine.precision,
            on_update=mode,
            running=running or 16,
        )
        for check in UPDATES if results else suite.checks:
            result = suite.run(check)
            results.append(result.status)
            title = f"{check}, {mode}" if check in UPDATES else check
            typer.echo(f"{title:<48} {result.status:<12} {printable(result.detail)}")
        engines.leave(engine)
    failed = results.count(FAIL)
    typer.echo(f"{failed} of {len(results)} checks failed" if failed else "no check failed")
    raise typer.Exit(1 if failed else 0)
