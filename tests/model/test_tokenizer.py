"""The same ids as transformers, and text that comes back whole."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import TEXTS
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from burnish.errors import ModelError
from burnish.model.tokenizer import PRE_TOKENIZERS, Tokenizer

ROLES = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}


def trained(kind: str) -> tokenizers.Tokenizer:
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
        backend.pre_tokenizer = PRE_TOKENIZERS[kind]
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "metaspace" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*ROLES.values(), *bytes_as_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


@pytest.fixture(scope="module", params=["smollm", "llama-bpe", "qwen2", "metaspace"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    """(ours, transformers') from one directory that transformers wrote."""
    directory = tmp_path_factory.mktemp(request.param)
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained(request.param), **ROLES)
    peer.save_pretrained(directory)
    return Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_and_texts_as_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, peer = pair
    ids = ours.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == peer.encode(text)
    for skip in (False, True):
        theirs = peer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip) == theirs


@pytest.mark.parametrize("text", TEXTS)
def test_default_model(smollm2: Path, text: str) -> None:
    ours = Tokenizer.load(smollm2)
    assert ours.encode(text).tolist() == auto(smollm2).encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.end_ids == (2,)


_auto: dict[Path, Any] = {}


def auto(directory: Path) -> Any:
    if directory not in _auto:
        _auto[directory] = transformers.AutoTokenizer.from_pretrained(directory)
    return _auto[directory]


@given(text=st.text())
@settings(deadline=None, max_examples=60)
def test_any_text_comes_back(text: str) -> None:
    ours = byte_level()
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert b"".join(map(ours.token_bytes, ids.tolist())) == text.encode()


@given(ids=st.lists(st.integers(0, 720), max_size=30), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_streamed_text_equals_decoded_text(ids: list[int], skip: bool) -> None:
    """For any ids, also those that make no UTF-8 and those that the vocabulary lacks."""
    ours = byte_level()
    stream = ours.stream(skip_special=skip)
    pieces = [stream.push(token) for token in ids]
    assert stream.text == "".join(pieces)
    pieces.append(stream.flush())
    assert "".join(pieces) == stream.text == ours.decode(ids, skip_special=skip)
    at_once = ours.stream(skip_special=skip)
    assert at_once.push(*ids) + at_once.flush() == stream.text


_byte_level: list[Tokenizer] = []


def byte_level() -> Tokenizer:
    if not _byte_level:
        _byte_level.append(Tokenizer(trained("smollm")))
    return _byte_level[0]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_of_every_kind(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    ids = ours.encode(text).tolist()
    at_once = ours.stream()
    assert at_once.push(*ids) + at_once.flush() == ours.decode(ids)
    stream = ours.stream()
    for count, token in enumerate(ids, 1):
        stream.push(token)
        assert ours.decode(ids[:count]).startswith(stream.text)
    stream.flush()
    assert stream.text == ours.decode(ids)


def test_characters_appear_when_they_are_whole() -> None:
    ours = byte_level()
    tokens = {ours.token_bytes(i): i for i in range(ours.vocab_size)}
    stream = ours.stream()
    pieces = [stream.push(tokens[bytes([byte])]) for byte in "é🙂!".encode()]
    assert pieces == ["", "é", "", "", "", "🙂", "!"]
    assert stream.push(tokens[b"\xf0"]) == ""
    assert stream.flush() == "\ufffd"


TEMPLATES = {
    "plain": (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tools": (
        "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{{ messages | tojson }}{{ messages[0]['content'].upper() }}"
    ),
}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " <b>É</b> & 'you' "},
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"name": "f", "parameters": {"π": 1}}]])
def test_chat_templates_as_transformers(name: str, tools: Any, pair: tuple[Tokenizer, Any]) -> None:
    ours, peer = pair
    ours.chat_template = TEMPLATES[name]
    theirs = peer.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours.chat(MESSAGES, tools=tools) == theirs


def test_chat_template_of_the_default_model(smollm2: Path) -> None:
    text = Tokenizer.load(smollm2).chat(MESSAGES)
    assert text == auto(smollm2).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n")


def test_templates_are_not_trusted() -> None:
    def chat(template: str) -> str:
        return Tokenizer(tokenizers.Tokenizer(models.BPE()), chat_template=template).chat(MESSAGES)

    with pytest.raises(ModelError, match="unsafe"):
        chat("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="refused"):
        chat("{{ messages.append(1) }}")
    with pytest.raises(ModelError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="refused"):
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
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match="can't be read"):
        Tokenizer.load(tmp_path)


def write_gguf(path: Path, backend: tokenizers.Tokenizer, pre: str, *, bos: bool) -> Path:
    content = json.loads(backend.to_str())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    special = {token["content"] for token in content["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(bos)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_from_a_gguf(pre: str, tmp_path: Path) -> None:
    source = trained(pre)
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", source, pre, bos=False))
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        want = source.encode(text).ids
        assert ours.encode(text).tolist() == want
        assert again.encode(text).tolist() == peer.encode(text) == want
    assert ours.end_ids == again.end_ids == (1, 2)
    assert ours.chat([{"content": "x"}]) == again.chat([{"content": "x"}]) == "<|bos|>x"
    with_bos = Tokenizer.load(write_gguf(tmp_path / "b.gguf", source, pre, bos=True))
    assert with_bos.encode("a b").tolist() == [0, *source.encode("a b").ids]
    assert with_bos.encode("a b", add_special=False).tolist() == source.encode("a b").ids


def test_a_qwen2_gguf_splits_as_transformers_qwen2(tmp_path: Path) -> None:
    source = trained("qwen2")
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", source, "qwen2", bos=False))
    model = json.loads(source.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    peer = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=merges, **ROLES)
    for text in TEXTS[:-3]:  # its own special tokens would be in the others
        assert ours.encode(text).tolist() == peer.encode(text)


def test_splitting_by_hand() -> None:
    def pieces(name: str, text: str) -> list[str]:
        return [piece for piece, _ in PRE_TOKENIZERS[name].pre_tokenize_str(text)]

    text = "I'Ll a1234 \n\n b  c"
    assert pieces("llama-bpe", text) == ["I", "'Ll", "Ġa", "123", "4", "ĠĊĊ", "Ġb", "Ġ", "Ġc"]
    assert pieces("qwen2", text)[3:7] == ["1", "2", "3", "4"]
    assert pieces("smollm", "a12") == ["a", "1", "2"]
    assert pieces("gpt-2", "a12") == ["a", "12"]


def test_ggufs_that_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", trained("smollm"), "tekken", bos=False)
    with pytest.raises(ModelError, match="pre-tokenizer 'tekken' can't be rebuilt"):
        Tokenizer.load(path)
