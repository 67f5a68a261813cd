"""The same ids as transformers, and text that comes back whole."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import TEXTS
from tokenizers import decoders, models, pre_tokenizers, trainers

from burnish.errors import ModelError
from burnish.model.tokenizer import Tokenizer

ROLES = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}


def trained(kind: str, size: int = 700) -> tokenizers.Tokenizer:
    """A small BPE tokenizer trained on the texts above, in the make-up of each family."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "metaspace"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.decoder = decoders.ByteLevel()
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet = []
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "metaspace" else []
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*ROLES.values(), *bytes_as_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


@pytest.fixture(scope="module", params=["smollm", "metaspace"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    """(ours, transformers') from one directory that transformers wrote."""
    directory = tmp_path_factory.mktemp(request.param)
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained(request.param), **ROLES)
    peer.save_pretrained(directory)
    return Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)


def test_same_ids_and_texts_as_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, peer = pair
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == peer.encode(text)
        for skip in (False, True):
            theirs = peer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == theirs


def test_default_model(smollm2: Path) -> None:
    ours, peer = Tokenizer.load(smollm2), transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert ours.encode(text).tolist() == peer.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.end_ids == (2,)
    text = ours.chat(MESSAGES)
    assert text == peer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n")


@given(text=st.text())
@settings(deadline=None, max_examples=60)
def test_any_text_comes_back(text: str) -> None:
    ours = byte_level()
    assert ours.decode(ours.encode(text)) == text


@given(ids=st.lists(st.integers(0, 720), max_size=30))
@settings(deadline=None, max_examples=150)
def test_streamed_text_begins_the_decoded_text(ids: list[int]) -> None:
    """For any ids, also those that make no UTF-8 and those that the vocabulary lacks."""
    ours = byte_level()
    read, text = ours.stream(), ""
    for token in ids:
        text += read(token) or ""
    assert ours.decode(ids, skip_special=True).startswith(text)


_byte_level: list[Tokenizer] = []


def byte_level() -> Tokenizer:
    if not _byte_level:
        _byte_level.append(Tokenizer(trained("smollm")))
    return _byte_level[0]


def test_streamed_text_of_every_kind(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        read, streamed = ours.stream(), ""
        for count, token in enumerate(ids, 1):
            streamed += read(token) or ""
            assert ours.decode(ids[:count], skip_special=True).startswith(streamed)
        assert streamed == ours.decode(ids, skip_special=True)


def test_characters_appear_when_they_are_whole() -> None:
    ours = Tokenizer(trained("smollm", size=259))  # one token per byte
    tokens = ours.encode("é🙂!").tolist()
    read = ours.stream()
    assert [read(token) for token in tokens] == [None, "é", None, None, None, "🙂", "!"]
    assert read(tokens[2]) is None


TEMPLATES = {
    "plain": (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tools": (
        "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{{ messages | tojson(indent=2) }}{{ messages[0]['content'].upper() }}"
    ),
}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " <b>É</b> & 'you' "},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_as_transformers(name: str, pair: tuple[Tokenizer, Any]) -> None:
    ours, peer = pair
    ours.chat_template = TEMPLATES[name]
    theirs = peer.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ours.chat(MESSAGES) == theirs


def test_templates_are_not_trusted() -> None:
    def chat(template: str) -> str:
        return Tokenizer(tokenizers.Tokenizer(models.BPE()), chat_template=template).chat(MESSAGES)

    with pytest.raises(ModelError, match="unsafe"):
        chat("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="rejected"):
        chat("{{ messages.append(1) }}")
    with pytest.raises(ModelError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="rejected"):
        chat("{% for %}")
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(tokenizers.Tokenizer(models.BPE())).chat(MESSAGES)


def test_the_date_is_an_argument() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    ours = Tokenizer(tokenizers.Tokenizer(models.BPE()), chat_template=template)
    assert ours.chat(MESSAGES, now=datetime(2024, 7, 26)) == "26 Jul 2024"
    assert ours.chat(MESSAGES) == datetime.now().strftime("%d %b %Y")


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 9}, (5, 7)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 9}, (9,)),
        (None, None, (1,)),  # <|end|>, by the tokenizer's own settings
    ],
)
def test_end_ids(generation: Any, config: Any, want: tuple[int, ...], tmp_path: Path) -> None:
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained("smollm"), **ROLES)
    peer.save_pretrained(tmp_path)
    for name, content in {"generation_config": generation, "config": config}.items():
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).end_ids == want


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match="can't be read"):
        Tokenizer.load(tmp_path)


def test_bytes_are_tokens_of_their_own(tmp_path: Path) -> None:
    """257 tokens: 256 bytes and the end. "é" has two bytes in UTF-8."""
    Tokenizer.of_bytes().save(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 257
    assert tokenizer.end_ids == (256,)
    assert len(tokenizer.encode("3 - é\n")) == 7
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("7"), 256], skip_special=True) == "7"


def test_a_damaged_configuration_is_named(tmp_path):
    Tokenizer.of_bytes().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not a JSON file"):
        Tokenizer.load(tmp_path)
