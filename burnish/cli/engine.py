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
RUNNING = 8
"""Samples that decode at once during the checks: few, so that some requests wait while weights
come."""


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
    """Whether a tensor takes part in a change of sign that leaves the model's function as it is:
    (−q)·(−k) = q·k, and −O (−v) = O v. A bias of the projection O would not."""
    _, _, own = name.partition(".self_attn.")
    return own.startswith(("q_proj.", "k_proj.", "v_proj.")) or own == "o_proj.weight"


@app.command()
def check(
    model: Model,
    name: Name = "native",
    python: Python = None,
    url: Annotated[str | None, Option(help="of an engine that serves")] = None,
    overrides: Overrides = None,
) -> None:
    """Compare an engine with burnish's own forward pass, in a table; exit code 1 if a check fails.

    The first checks are about log-probabilities, the others about ends, seeds and new weights. The
    checks of caches after new weights are done for both values of loop.on_update.
    """
    is_served = (url or "").startswith("tcp")
    running = None if is_served else RUNNING
    with shown(None, model):
        given = {"name": name, "python": python, "url": url, "max_running": running}
        recipe = _recipe(model, overrides, **given)
        tell("load", "loading torch")
        from burnish import build, engines, models, sizes
        from burnish.engine.check import FAIL, TOKENS, UPDATES, Suite
        from burnish.strategy import FreeLoop

        recipe = build.prepare(recipe)
        own, tokenizer = engines.directory_of(recipe), models.open_tokenizer(recipe)
        reference = Reference(own, recipe.engine.precision, sizes.device_of(recipe))
        context = sizes.measured(recipe).context - 1
        prompts = [tokenizer.encode(text)[: context - TOKENS] for text in TEXTS]
        mode = engines.settings_of(recipe, own).on_update
    typer.echo(f"{name} with {model} in {recipe.engine.precision}")

    results = list[str]()
    others = {"keep": "recompute", "recompute": "keep"}
    for on_update in [mode] if is_served else [mode, others[mode]]:
        with shown(None, model):
            reference.take(0.0)
            loop = recipe.loop if is_served else FreeLoop(on_update=on_update)
            engine = build.build_engine(recipe.model_copy(update={"loop": loop}))
        mode = on_update
        if is_served and isinstance(engine, engines.Apart):
            mode = engine.facts["on_update"]  # the setting of those who serve it
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
            typer.echo(f"{title:<48} {result.status:<12} {printable(result.told)}")
        engines.leave(engine)
    failed = results.count(FAIL)
    typer.echo(f"{failed} of {len(results)} checks failed" if failed else "no check failed")
    raise typer.Exit(1 if failed else 0)
