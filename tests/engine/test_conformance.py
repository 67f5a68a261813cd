"""The conformance suite passes the native engine, and sees an engine that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from burnish.cli.engine import Reference, app
from burnish.engine.conformance import BOUNDS, FAIL, NOT_OFFERED, PASS, UPDATES, Suite
from burnish.engine.native.engine import NativeEngine
from burnish.errors import EngineError
from burnish.model import checkpoint
from burnish.types import Completion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(), path)
    return path


def examined(engine: Any, model: Path, names: Any = None, mode: str = "recompute") -> Any:
    """The results of the checks, of all of them if none is named."""
    prompts = [tiny.prompt(20), tiny.prompt(3)]
    reference = Reference(model, "fp32", tiny.DEVICE)
    suite = Suite(engine, reference, prompts, room=75, on_update=mode)
    return {name: suite.run(name).status for name in names or suite.checks}


def test_the_native_engine_passes(model: Path) -> None:
    found = examined(tiny.engine(text=True), model)
    assert set(found.values()) == {PASS}
    assert len(found) == 21


def changed_request(**params: Any) -> Callable[[NativeEngine], None]:
    """An engine that overlooks settings of a request."""

    def spoil(engine: NativeEngine) -> None:
        submit = engine.submit
        engine.submit = lambda r: submit(replace(r, params=replace(r.params, **params)))

    return spoil


def changed_completion(change: Callable[[Completion], dict[str, Any]]) -> Any:
    def spoil(engine: NativeEngine) -> None:
        step = engine.step
        engine.step = lambda: [replace(c, **change(c)) for c in step()]

    return spoil


def changed_load(**fields: Any) -> Any:
    def spoil(engine: NativeEngine) -> None:
        load = engine.load
        engine.load = lambda weights: load(weights._replace(**fields))

    return spoil


def stale(engine: NativeEngine) -> None:
    """The version is new, and the weights are not."""

    def load(weights: Any) -> None:
        engine.version = weights.version

    engine.load = load  # type: ignore[method-assign]


def swallowing(engine: NativeEngine) -> None:
    load = engine.load

    def quiet(weights: Any) -> None:
        with suppress(EngineError):
            load(weights)

    engine.load = quiet  # type: ignore[method-assign]


def raw(completion: Completion) -> dict[str, Any]:
    """Log-probabilities of another temperature, roughly."""
    return {"logprobs": completion.logprobs * np.float32(completion.params.temperature or 1)}


def deaf(engine: NativeEngine) -> None:
    engine.abort = lambda request_id: None  # type: ignore[method-assign]


def alike(engine: NativeEngine) -> None:
    """All samples draw the same numbers, whatever the seed."""
    draws = engine._draws
    engine._draws = lambda samples, steps: (
        draws(samples, steps)[0] * 0 + 0.5,
        *draws(samples, steps)[1:],
    )


def overlooks_prompts(engine: NativeEngine) -> None:
    """The penalty counts only the tokens that a call has sampled, as SGLang does."""
    draws = engine._draws

    def fewer(samples: Any, steps: int) -> Any:
        points, heat, limited = draws(samples, steps)
        seen = {
            row: np.unique(samples[row].tokens[samples[row].group.prompt_length :])
            for row in limited.seen
        }
        seen = {row: ids if len(ids) else np.array([0]) for row, ids in seen.items()}
        return points, heat, limited._replace(seen=seen)

    engine._draws = fewer  # type: ignore[method-assign]


SPOILED: dict[str, tuple[Any, set[str]]] = {
    "raw": (changed_completion(raw), {f"log-probabilities at temperature {t}" for t in (0.7, 1.3)}),
    "alike": (alike, {"samples differ", "a seed repeats"}),
    "never greedy": (changed_request(temperature=1.0), {"greedy tokens"}),
    "overlooks end ids": (changed_request(stop_ids=()), {"end ids"}),
    "overlooks stops": (changed_request(stop=()), {"stop strings"}),
    "overlooks min_tokens": (changed_request(min_tokens=0), {"min_tokens"}),
    "cuts off": (
        changed_completion(lambda c: {"logprobs": c.logprobs + (c.params.top_p < 1)}),
        {"top_p"},
    ),
    "overlooks min_p": (changed_request(min_p=0.0), {"min_p"}),
    "overlooks the penalty": (changed_request(repetition_penalty=1.0), {"repetition_penalty"}),
    "penalizes what it reports": (
        changed_completion(lambda c: {"logprobs": c.logprobs - (c.params.repetition_penalty > 1)}),
        {"repetition_penalty"},
    ),
    "penalizes the response only": (overlooks_prompts, {"repetition_penalty"}),
    "deaf": (deaf, {"abort"}),
    "stale": (stale, {"new weights are in use", "weights in flight", "a failed load"}),
    "swallows errors": (swallowing, {"a failed load", "an older incarnation"}),
    "takes older": (changed_load(incarnation=0), {"an older incarnation"}),
    "old stamps": (
        changed_completion(lambda c: {"versions": c.versions * 0}),
        {"new weights are in use", "weights in flight"},
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_rule_is_seen(how: str, model: Path) -> None:
    spoil, wanted = SPOILED[how]
    engine = tiny.engine(text=True)
    spoil(engine)
    assert set(examined(engine, model, sorted(wanted)).values()) == {FAIL}


@pytest.mark.parametrize(("apart", "status"), [(0.02, PASS), (2.0, FAIL)])
def test_greedy_samples_may_part_at_a_tie(
    apart: float, status: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding in bf16 makes one of two likely tokens the likeliest, and then the other."""
    suite = Suite(tiny.engine(text=True), Reference(model, "fp32", tiny.DEVICE), [tiny.prompt(3)])
    suite.bounds = BOUNDS["bf16"]
    one, *others = suite._sample(temperature=0.0)
    turned = one.token_ids.copy()
    turned[5] = (turned[5] + 1) % tiny.VOCAB
    other = replace(one, token_ids=turned, logprobs=one.logprobs + np.float32(apart))
    monkeypatch.setattr(suite, "_sample", lambda **_: [one, other, *others[1:]])
    monkeypatch.setattr(suite, "_close", lambda done: "")
    assert suite.run("greedy tokens").status == status


def test_caches_that_are_kept_are_seen(model: Path) -> None:
    names = ["weights in flight"]
    assert examined(tiny.engine(text=True), model, names) == {names[0]: PASS}
    assert examined(tiny.engine(text=True, on_update="keep"), model, names) == {names[0]: FAIL}


def finds_older_pages(engine: NativeEngine) -> None:
    """The prefix cache has no versions."""
    engine.scheduler.pages.forget_names = lambda: None  # type: ignore[method-assign]


def keeps_everything(engine: NativeEngine) -> None:
    engine.scheduler.update = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "mode"),
    [(finds_older_pages, "keep"), (keeps_everything, "keep"), (keeps_everything, "recompute")],
)
def test_a_cache_of_older_weights_is_seen(spoil: Any, mode: str, model: Path) -> None:
    """A new request reads pages of before the update, and its tokens have the new version."""
    engine = tiny.engine(text=True, on_update=mode, max_running=8)
    assert set(examined(engine, model, UPDATES[:2], mode).values()) == {PASS}
    for names in (UPDATES[:2], UPDATES[1:2]):
        spoil(engine := tiny.engine(text=True, on_update=mode, max_running=8))
        assert set(examined(engine, model, names, mode).values()) == {FAIL}


@pytest.mark.slow
def test_the_command_checks_both_modes(model: Path) -> None:
    tiny.tokenizer().save(model)
    given = [str(model), "--set", "engine.kv_mb=8", "--set", "engine.precision=fp32"]
    found = CliRunner().invoke(app, ["check", *given])
    assert found.exit_code == 0, found.output
    rows = [line for line in found.output.splitlines() if " pass " in line]
    assert len(rows) == 21 + len(UPDATES)
    for name in UPDATES:
        assert [f"{name}, {mode} " in found.output for mode in ("keep", "recompute")] == [True] * 2


def test_a_refusal_is_not_offered(model: Path) -> None:
    engine = tiny.engine(text=True)
    submit = engine.submit

    def refuse(request: Any) -> None:
        if request.params.top_p < 1 or request.params.min_tokens:
            raise EngineError("not here")
        submit(request)

    engine.submit = refuse  # type: ignore[method-assign]
    found = examined(engine, model, ["top_p", "min_tokens", "samples differ"])
    assert list(found.values()) == [NOT_OFFERED, NOT_OFFERED, PASS]
