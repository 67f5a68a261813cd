"""`benchmarks/gpu.py` next to its peers: the protocol, failures, timeouts and the table.

vLLM and TRL do not run here: a script in the place of their Python prints what `gpu_peers.py` would
print. The tests show that gpu.py hands over the work and reports any outcome; that `gpu_peers.py`
measures vLLM and TRL correctly is not tested.
"""

import json
import sys
from pathlib import Path

import pytest
import tokenizers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    import gpu
    import gpu_table
    import peers
    from turns import MARK

STAND_IN = """#!{python}
import json, os, pathlib, subprocess, sys, time
script, peer, file = sys.argv[1:]
job = json.loads(pathlib.Path(file).read_text())

def answer(name, **figures):
    print({mark!r} + json.dumps(dict(name=name, **figures)), flush=True)

{body}
"""


def stand_in(directory, body, name="python"):
    """A script that runs ``body`` in the place of a peer's Python."""
    path = directory / name
    path.write_text(STAND_IN.format(python=sys.executable, mark=MARK, body=body))
    path.chmod(0o755)
    return str(path)


def measure(directory, body, expected=("a", "b"), seconds=60):
    job = {"model": str(directory / "model")}
    return list(peers.measure_peer("vllm", stand_in(directory, body), job, expected, seconds))


def test_measurements_come_in_their_order_without_other_output(tmp_path):
    body = "print('INFO loading'); answer('about', vllm='1'); answer('b', x=2.5)\n"
    body += "print('INFO half', file=sys.stderr); answer('a', x=1)"
    found = measure(tmp_path, body)
    assert found == [("about", {"vllm": "1"}), ("b", {"x": 2.5}), ("a", {"x": 1})]


def test_a_peer_that_fails_is_reported_with_its_last_lines(tmp_path):
    body = "answer('a', x=1); [print('line', i) for i in range(100)]; raise MemoryError('full')"
    (name, figures), (failed, failure) = measure(tmp_path, body)
    assert (name, figures, failed) == ("a", {"x": 1}, "failure")
    assert failure["reason"].startswith("exit status 1, ")
    assert failure["missing"] == ["b"]
    assert failure["output"][-1] == "MemoryError: full"
    assert len(failure["output"]) == peers.LAST_LINES


def test_a_peer_that_ends_early_without_an_error_is_a_failure(tmp_path):
    _, (name, failure) = measure(tmp_path, "answer('b', x=1)")
    assert name == "failure"
    assert failure["missing"] == ["a"]
    assert failure["reason"].startswith("exit status 0, ")


def test_a_peer_that_fails_after_its_last_measurement_is_a_failure(tmp_path):
    *_, (name, failure) = measure(tmp_path, "answer('a'); answer('b'); sys.exit(3)")
    assert name == "failure"
    assert failure["missing"] == []
    assert failure["reason"].startswith("exit status 3, ")


@pytest.mark.parametrize("line", ["{", "[1]", '"b"', '{"x": 1}'])
def test_a_measurement_that_cannot_be_read_is_other_output(tmp_path, line):
    body = f"answer('a', x=1); print({MARK + line!r})"
    _, (_, failure) = measure(tmp_path, body)
    assert failure["missing"] == ["b"]
    assert failure["output"] == [MARK + line]


def test_a_peer_that_hangs_is_stopped_with_its_processes(tmp_path):
    """The second process keeps the pipe open: reading ends only if it is stopped as well."""
    body = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    body += "print('waiting'); answer('a', x=1); time.sleep(600)"
    (name, _), (_, failure) = measure(tmp_path, body, seconds=3)
    assert name == "a"
    assert failure["reason"].startswith("stopped at the limit of --peer-seconds 3, 3 s after")
    assert failure["missing"] == ["b"]
    assert failure["output"] == ["waiting"]


def test_a_python_that_does_not_exist_is_a_failure(tmp_path):
    job = {"model": str(tmp_path / "model")}
    ((_, failure),) = peers.measure_peer("trl", str(tmp_path / "none"), job, ["a"], 60)
    assert failure["reason"].startswith("cannot be started: ")
    assert failure["missing"] == ["a"]


def test_a_peer_does_not_inherit_packages_or_deterministic_products(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "packages of burnish")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("KEPT", "1")
    body = "answer('a', **{k: os.environ.get(k) for k in "
    body += "('PYTHONPATH', 'CUBLAS_WORKSPACE_CONFIG', 'KEPT')})"
    ((_, found),) = measure(tmp_path, body, expected=["a"])
    assert found == {"PYTHONPATH": None, "CUBLAS_WORKSPACE_CONFIG": None, "KEPT": "1"}


def test_the_tokenizer_encodes_characters_and_decodes_every_id(tmp_path):
    peers.write_tokenizer(tmp_path, 512)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    texts = peers.texts(4, 105)
    assert len(set(texts)) == 4
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert len(ids) == 105
        assert tokenizer.decode(ids) == text
    assert all(tokenizer.decode([i]) for i in range(len(peers.SPECIAL), 512))
    assert len({tokenizer.id_to_token(i) for i in range(512)}) == 512


def test_the_table_has_ratios_and_states_what_is_missing():
    rates = {"many": {"tokens/s": 300, "all": [300]}, "few": {"tokens/s": 90, "all": [90]}}
    found = {"torch": "2.11", "rollouts": rates, "step": {"learn": 1.5, "whole": 2.0}}
    vllm = {"about": {"vllm": "0.24.0"}, "many": {"tokens/s": 100}}
    vllm["failure"] = {
        "reason": "exit status 1, 9 s after the start",
        "missing": ["few"],
        "output": ["ValueError: a | b", "warning", ""],
    }
    trl = {"step": {"learn": 4.0, "whole": 5.0}}
    assert gpu_table.table(found | {"peers": {"vllm": vllm, "trl": trl}}).splitlines() == [
        "| measurement | burnish | peer | burnish is … times as fast |",
        "| --- | --- | --- | --- |",
        "| torch | 2.11 | | |",
        "| many | tokens/s 300, all [300] | vllm: tokens/s 100 | 3.00 |",
        "| few | tokens/s 90, all [90] | vllm: failed | |",
        "| step | learn 1.5, whole 2 | trl: learn 4, whole 5 | 2.50 |",
        "| vllm | | vllm 0.24.0 | |",
        "| vllm failed | | exit status 1, 9 s after the start: ValueError: a \\| b | |",
    ]
    assert gpu_table.table(found).splitlines() == [
        "| measurement | |",
        "| --- | --- |",
        "| torch | 2.11 |",
        "| many | tokens/s 300, all [300] |",
        "| few | tokens/s 90, all [90] |",
        "| step | learn 1.5, whole 2 |",
    ]


VLLM = """
config = json.loads((pathlib.Path(job["model"]) / "config.json").read_text())
assert config["vocab_size"] == job["vocabulary"]
for name, case in job["cases"].items():
    answer(name, **{"tokens/s": 10, "work": [case["samples"] * sum(case["new"]), case["prompt"]]})
"""
TRL = """
files = {path.name for path in pathlib.Path(job["model"]).iterdir()}
assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
assert job["repeats"] == 1 and job["device"] == "cpu"
lengths = [len(prompt) for prompt in job["prompts"]]
answer("step", whole=3.0, work=[*lengths, job["samples"], job["new"]])
raise ImportError("no module named trl")
"""


@pytest.mark.slow
def test_the_whole_script_reports_its_peers(tmp_path, monkeypatch, capsys):
    cases = {name: gpu.CASES[name] for name in ("one", "32 × 8 sharing 1,024 tokens")}
    monkeypatch.setattr(gpu, "CASES", cases)
    out = tmp_path / "out.json"
    given = ["rollouts", "step", "--device", "cpu", "--tiny", "--repeats", "1", "--out", out]
    given += ["--vllm", stand_in(tmp_path, VLLM, "vllm"), "--trl", stand_in(tmp_path, TRL, "trl")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, given)])
    gpu.main()
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    vllm, trl = found["peers"]["vllm"], found["peers"]["trl"]
    assert vllm == {
        "one": {"tokens/s": 10, "work": [24, 32]},
        "32 × 8 sharing 1,024 tokens": {"tokens/s": 10, "work": [8 * 8 * 24, 32]},
    }
    assert trl["step"] == {"whole": 3.0, "work": [32] * 8 + [8, 24]}
    assert trl["failure"]["missing"] == ["step with an importance correction"]
    ratio = f"{found['rollouts']['one']['tokens/s'] / 10:.2f} |"
    assert any(row.endswith(ratio) for row in printed.splitlines() if row.startswith("| one"))
    assert "trl: ImportError: no module named trl" in printed
    assert printed.splitlines()[-1].startswith("| trl failed | | exit status 1, ")


@pytest.mark.parametrize(
    "given", [["step", "--vllm"], ["rollouts", "--trl"], ["--profile", "--trl"]]
)
def test_a_peer_needs_its_part(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *given, sys.executable])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "needs the part" in capsys.readouterr().err
