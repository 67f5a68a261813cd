"""Peers of gpu.py: their models and jobs, and their processes, each with a time limit.

A peer runs `gpu_peers.py` with the Python of its own environment. Its model has random weights and
the shape of burnish's model, and its tokenizer is made here, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import random
import signal
import string
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from turns import MARK

SCRIPT = Path(__file__).with_name("gpu_peers.py")
SPECIAL = ("<s>", "<pad>", "</s>")
NOT_INHERITED = ("PYTHONPATH", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of burnish's own environment: its packages, and what `set_up_torch` sets for bitwise
equal results."""
LAST_LINES = 40


def write_config(directory: Path, config: dict[str, Any]) -> None:
    """Write the config.json of a model without weights, in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": 0, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config | ends | {"dtype": "bfloat16"}))


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer of ``vocabulary`` tokens that encodes ASCII text character by character and
    decodes every id, to a character or to three."""
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ"]  # Ġ is a space
    triples = ("".join(triple) for triple in product(letters, repeat=3))
    tokens = [*SPECIAL, *letters]
    tokens += islice(triples, vocabulary - len(tokens))
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("bos_token", "pad_token", "eos_token"), SPECIAL, strict=True))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def texts(count: int, length: int) -> list[str]:
    """Different texts of ``length`` characters, which are as many tokens of `write_tokenizer`."""
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_letters + " ", k=length)) for _ in range(count)]


def measure_peer(
    peer: str, python: str, job: dict[str, Any], expected: Collection[str], seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a peer for at most ``seconds`` and yield its measurements, each with its name, as soon as
    it prints them. If one of the ``expected`` names is missing, or if the process fails, the last
    item is named "failure" and holds the reason, the missing names and the last lines of the
    output."""
    file = Path(job["model"]).with_suffix(".json")
    file.write_text(json.dumps(job))
    start, missing, lines = time.monotonic(), dict.fromkeys(expected), deque[str](maxlen=LAST_LINES)
    try:
        process = subprocess.Popen(
            [python, str(SCRIPT), peer, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={name: v for name, v in os.environ.items() if name not in NOT_INHERITED},
            start_new_session=True,  # so that its own processes end with it
        )
    except OSError as error:
        yield "failure", _failure(f"cannot be started: {error}", missing, lines)
        return
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        _kill(process)

    assert process.stdout is not None
    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        for line in process.stdout:
            found = _measurement(line)
            if found is None:
                lines.append(line.rstrip()[:500])
                continue
            missing.pop(found[0], None)
            yield found
        status = process.wait()
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()
    if missing or status:
        reason = f"exit status {status}"
        if timed_out.is_set():
            reason = f"stopped at the limit of --peer-seconds {seconds:g}"
        reason += f", {time.monotonic() - start:.0f} s after the start"
        yield "failure", _failure(reason, missing, lines)


def _measurement(line: str) -> tuple[str, dict[str, Any]] | None:
    """Return the measurement in a line and its name; None if the line is other output."""
    if not line.startswith(MARK):
        return None
    try:
        found = json.loads(line.removeprefix(MARK))
    except ValueError:
        return None
    return (found.pop("name"), found) if isinstance(found, dict) and "name" in found else None


def _failure(reason: str, missing: Collection[str], lines: Collection[str]) -> dict[str, Any]:
    return {"reason": reason, "missing": [*missing], "output": [*lines]}


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
