"""What several rooms of the tests share."""

import dataclasses
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from burnish.errors import ModelError
from burnish.model import hub
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

# A shell's background job ignores SIGINT, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def make_group(index, prompt, responses, rewards, *, version=0, temperature=1.0, sampled=None):
    completions = tuple(
        Completion(
            request_id="r",
            sample_index=i,
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=-0.1 * np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), version, dtype=np.int32),
            sampled=np.ones(len(ids), dtype=bool) if sampled is None else np.array(sampled[i]),
            params=SamplingParams(temperature=temperature),
            finish=Finish.STOP,
            stop=None,
            text=" ".join(map(str, ids)),
        )
        for i, ids in enumerate(responses)
    )
    text = " ".join(map(str, prompt))
    head = Prompt(f"p{index}", text, np.array(prompt, dtype=np.int32), "t", sorted(prompt))
    return Group(index, head, completions, tuple(Grade(r, correct=r >= 1) for r in rewards))


def aborted(completion, *, tokens=0):
    """The sample as an engine gives it that overflowed after so many tokens."""
    kept = {name: getattr(completion, name)[:tokens] for name in STREAMS}
    return dataclasses.replace(completion, **kept, finish=Finish.ABORT, text="")


STREAMS = ("token_ids", "logprobs", "versions", "sampled")


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ strftime_now('%Y') }}"
)


def byte_tokenizer(chat_template=CHAT_TEMPLATE):
    """A tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=chat_template)


@pytest.fixture
def two_groups():
    """Prompts of 2 and 3 tokens; responses of 2, 1 and of 3, 1, 2 tokens."""
    return [
        make_group(0, [5, 6], [[7, 8], [9]], [1.0, 0.0], temperature=0.5),
        make_group(1, [1, 2, 3], [[4, 5, 6], [7], [8, 9]], [2.0, 3.0, 7.0], version=1),
    ]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's directory, downloaded once into the user's cache."""
    try:
        return hub.resolve_model(hub.DEFAULT)
    except ModelError as error:
        if "can't be downloaded" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A file with a private key, and with a certificate for 127.0.0.1 that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, to make a certificate")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", f"{file}.crt"]
    subprocess.run([*made.split(), *names], check=True, capture_output=True, timeout=60)
    with file.open("a") as both:
        both.write(Path(f"{file}.crt").read_text())
    return file
