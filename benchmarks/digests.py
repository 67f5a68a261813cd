"""Compares two checkouts: the same runs must write the same bytes.

python benchmarks/digests.py BEFORE AFTER                 all runs
python benchmarks/digests.py BEFORE AFTER --only ray,sft  runs whose names contain one of these
python benchmarks/digests.py BEFORE AFTER --vllm PYTHON   also vLLM, in the environment of PYTHON

Each run is one command line of `burnish`, executed with each checkout on the same machine. The
script compares digests of metrics.jsonl, rollouts.jsonl, evaluations.jsonl, rubrics.jsonl and the
checkpoints. The free loop is not deterministic: of its runs the script compares the verdict on the
ledger. vLLM draws its own random numbers: of its run the script compares the requests and the
checksums of the weights that burnish sends in the first rollout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "rubrics.jsonl")
CLOCKS = {"timings.jsonl", "incarnation", "time", "seconds"}
"""Entries of a checkpoint's state that depend on the clock or count restarts."""
VERDICT = "every group is accounted for"
REWARD = """
def mixed(response, row):
    return {"reward": sum(map(ord, response)) % 7 / 6, "vowels": float("e" in response)}
"""
SORT = [
    *("rollout.batch=12", "rollout.group_size=4", "train.batch=12", "train.steps=6"),
    *("train.epochs=2", "validation.every=3", "checkpoint.every=3", "log.rollouts=12"),
]
SHAPE = [
    *("model.layers=2", "model.width=32", "model.heads=4", "model.d_ff=48"),
    *("model.context=128", "model.name=scratch", "model.tokenizer=bytes", "device=cpu"),
    *("train.batch=8", "train.learning_rate=1e-2"),
    *("checkpoint.every=2", "validation.every=2"),
]
LANGUAGE = [
    *("task.name=files", "task.train=rows.jsonl", "task.reward=reward.py:mixed", *SHAPE),
    *("task.chat=false", "task.validation_rows=2", "engine.kv_mb=16", "log.rollouts=8"),
    *("rollout.batch=8", "rollout.group_size=4", "rollout.max_tokens=12", "objective.kl=none"),
    "train.steps=3",
]
RAY = ["runtime=ray", "runtime.generator.cpus=0", "runtime.learner.cpus=0", "runtime.threads=1"]
STALE = ["objective.proximal=behavior"]
CRITIC = ["objective.advantage=gae", "objective.advantage.whiten=true", "critic.learning_rate=1e-2"]
THINK = ["rollout.think.tokens=5", "rollout.think.end=:", "rollout.think.phrase=so:"]
MIXTURE = [
    *("task.name=mixture", "task.weights={a = 1, b = 2}", "task.scales={a = 0.5}"),
    "task.tasks={a = {name = 'files', train = 'rows.jsonl', reward = 'reward.py:mixed', "
    "chat = false}, b = {name = 'keywords', validation_prompts = 2, chat = false}}",
    *(setting for setting in LANGUAGE if not setting.startswith("task.")),
]
TRAIN = ["train", "sort"]
RUNS: dict[str, list[list[str]]] = {
    "sync, group mean, clip": [[*TRAIN, *SORT]],
    "sync, z-score, k3, log_kl": [
        [*TRAIN, *SORT, "objective.advantage=group_zscore", "objective.kl=k3", "train.log_kl=true"]
    ],
    "lagged by 2": [[*TRAIN, *SORT, *STALE, "loop.lag=2"]],
    "buffer": [
        [*TRAIN, *SORT, *STALE, "buffer.capacity=9", "buffer.max_uses=2", "buffer.order=weighted"]
    ],
    "active sampling": [
        [
            *TRAIN,
            *SORT,
            "selection.dead_groups=active",
            "selection.on_bound=learn",
            "loop.lag=1",
            *STALE,
        ]
    ],
    "solved prompts leave": [
        [*TRAIN, *SORT, "task.prompts=12", "selection.leave_at=0.9", "selection.target=0.5"]
    ],
    **{
        f"preset {name}": [[*TRAIN, *LANGUAGE, f"preset={name}"]]
        for name in ("dapo", "dr-grpo", "gspo", "minimax", "olmo3", "ppo", "rloo", "scalerl")
    },
    "preset reinforce-plus-plus": [[*TRAIN, *LANGUAGE, "preset=reinforce-plus-plus"]],
    "preset vineppo": [
        [
            *TRAIN,
            *LANGUAGE,
            "preset=vineppo",
            "objective.advantage.steps=4",
            "objective.advantage.continuations=2",
        ]
    ],
    "GDPO": [
        [
            *TRAIN,
            *LANGUAGE,
            "objective.advantage=gdpo",
            "objective.advantage.parts={vowels = 1, ended = 0.5}",
        ]
    ],
    "ReMax, SAPO": [[*TRAIN, *LANGUAGE, "objective.advantage=remax", "objective.loss=sapo"]],
    "OPO, GMPO": [[*TRAIN, *LANGUAGE, "objective.advantage=opo", "objective.loss=gmpo"]],
    "pass@k, CISPO": [
        [
            *TRAIN,
            *LANGUAGE,
            "objective.advantage=pass_at_k",
            "objective.advantage.k=2",
            "objective.loss=cispo",
        ]
    ],
    "MaxRL, DPPO": [[*TRAIN, *LANGUAGE, "objective.advantage=maxrl", "objective.loss=dppo"]],
    "shared critic, last layer": [
        [
            *TRAIN,
            *LANGUAGE,
            *CRITIC,
            "critic.shared=true",
            "train.learn=layers",
            "train.learn.last=1",
        ]
    ],
    "LoRA, think budget, importance": [
        [
            *TRAIN,
            *LANGUAGE,
            *THINK,
            "train.learn=lora",
            "train.learn.rank=2",
            "objective.importance=truncate",
            "train.micro_sequences=2",
            "train.epochs=2",
        ]
    ],
    "mixture, length penalty": [[*TRAIN, *MIXTURE, "length=solve_rate", "rollout.overlong=mask"]],
    "SFT, then teacher": [
        ["sft", *SHAPE, "task.train=pairs.jsonl", "task.validation_rows=2", "task.chat=false"],
        [*TRAIN, *LANGUAGE, "objective.advantage=teacher", "teacher.model=RUN"],
    ],
    "reward model": [
        [
            "reward",
            *SHAPE,
            "task.train=preferences.jsonl",
            "task.validation_rows=2",
            "task.chat=false",
        ],
    ],
    "Ray at lag 0": [[*TRAIN, *LANGUAGE, *RAY]],
    "Ray at lag 1": [[*TRAIN, *LANGUAGE, *RAY, *STALE, "loop.lag=1"]],
    "Ray, sorting at lag 1": [[*TRAIN, *SORT, *RAY, *STALE, "loop.lag=1"]],
    "mesh of two ranks": [
        [*TRAIN, *LANGUAGE, "runtime=torchrun", "mesh.shard=2", "runtime.threads=1"]
    ],
    "free loop on Ray": [
        [*TRAIN, *SORT, *RAY, *STALE, "loop.name=free", "loop.max_lag=2", "runtime.generators=2"]
    ],
}
"""Command lines of each run, in their order: a later one may name the run before it as RUN."""
VLLM = [*TRAIN, *LANGUAGE, "engine.name=vllm", "train.steps=1", "model.width=64", "model.heads=2"]
"""vLLM on a CPU needs heads of at least 32 dimensions."""


def write_inputs(folder: Path) -> None:
    folder.mkdir()
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ]
    rows = {
        "rows": [{"prompt": f"Say {word}."} for word in words],
        "pairs": [{"prompt": f"Say {word}.", "answer": f" {word}"} for word in words],
        "preferences": [
            {"prompt": f"Say {word}.", "chosen": word, "rejected": word[::-1] + "!"}
            for word in words
        ],
    }
    for name, found in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "reward.py").write_text(REWARD)


def run(checkout: Path, folder: Path, commands: list[list[str]]) -> list[Path]:
    """Executes the command lines of a run -> the directories that they write."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    outs: list[Path] = []
    for number, (command, *rest) in enumerate(commands):
        source, settings = ([], rest) if "=" in rest[0] else (rest[:1], rest[1:])
        settings = [
            setting.replace("RUN", outs[-1].name) if outs else setting for setting in settings
        ]
        outs.append(folder / f"run-{number}")
        flags = [flag for setting in settings for flag in ("--set", setting)]
        line = [sys.executable, "-m", "burnish", command, *source, *flags, "--out", outs[-1].name]
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{checkout}: {' '.join(line[1:])}\n{done.stdout}{done.stderr}")
    return outs


def digests(path: Path) -> dict[str, str]:
    """Digests of the deterministic files of a run, by their names."""
    files = [path / name for name in FILES if (path / name).exists()]
    found = {f"{path.name}/{file.name}": _hash(file.read_bytes()) for file in files}
    for file in sorted((path / "checkpoints").rglob("*")):
        if file.is_file():
            name = str(file.relative_to(path.parent))
            is_json = file.suffix == ".json"
            found[name] = _hash(file.read_bytes()) if is_json else checkpoint_digest(file)
    return found


def checkpoint_digest(file: Path) -> str:
    """Digest of a safetensors file: its tensors by name, and its metadata without clocks."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    about = {k: json.loads(v) for k, v in header.pop("__metadata__", {}).items()}
    tensors = []
    for name, entry in sorted(header.items()):
        start, end = entry["data_offsets"]
        tensors.append([name, entry["dtype"], entry["shape"], _hash(body[start:end])])
    return _hash(json.dumps([tensors, _without_clocks(about)], sort_keys=True).encode())


def _without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_clocks(v) for k, v in value.items() if k not in CLOCKS}
    return value


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ledger_verdict(checkout: Path, folder: Path) -> dict[str, str]:
    """What `burnish report` says about the ledger of a run with the free loop."""
    code = "import sys; from pathlib import Path; from burnish.runs.ledger import judge; "
    code += "found = judge(Path(sys.argv[1]), batch=3, window=12, max_lag=2); "
    code += "print(found.steps, found.groups, found.problems)"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    line = [sys.executable, "-c", code, str(folder)]
    return {"verdict": subprocess.check_output(line, env=environment, text=True)}


PROXY = '''#!{executable}
"""Stands before the Python of an engine's environment and logs the requests and weights."""
import sys
sys.path.insert(0, {here!r})
import digests
digests.proxy({python!r}, {log!r}, sys.argv[1:])
'''


def vllm_messages(checkout: Path, folder: Path, python: str) -> dict[str, str]:
    """Digests of the requests and of the weights that a run sends to vLLM."""
    proxy, log = folder / "python", folder / "messages.jsonl"
    here = str(Path(__file__).parent)
    values = {"executable": sys.executable, "here": here, "python": python, "log": str(log)}
    proxy.write_text(PROXY.format(**values))
    proxy.chmod(0o755)
    run(checkout, folder, [[*VLLM, f"engine.python={proxy}"]])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = sorted({row["call"] for row in rows})
    return {
        kind: _hash(json.dumps([r for r in rows if r["call"] == kind]).encode()) for kind in kinds
    }


def proxy(python: str, log: str, arguments: list[str]) -> None:
    """Runs the engine behind a socket of its own and logs the messages that it receives."""
    if "-m" not in arguments:
        os.execv(python, [python, *arguments])
    place = arguments.index("-m") + 2
    outer = socket.socket(fileno=int(arguments[place]))
    inner, theirs = socket.socketpair()
    arguments[place] = str(theirs.fileno())
    child = subprocess.Popen([python, *arguments], pass_fds=[theirs.fileno()])
    theirs.close()
    answers = threading.Thread(target=_copy, args=(inner, outer), daemon=True)
    answers.start()
    with open(log, "a") as file:
        for raw, header, body in _messages(outer):
            call = header.get("call")
            if call in ("submit", "load"):
                header |= {"files": len(header["files"])} if "files" in header else {}
                file.write(json.dumps({"call": call, "header": header, "body": _hash(body)}) + "\n")
                file.flush()
            inner.sendall(raw)
    inner.close()
    sys.exit(child.wait())


def _messages(connection: socket.socket) -> Iterator[tuple[bytes, dict[str, Any], bytes]]:
    """Messages of `burnish/engine/remote/wire.py`: two lengths, a JSON header, raw arrays."""
    while (lengths := _read(connection, 16)) is not None:
        sizes = [int.from_bytes(lengths[i : i + 8], "little") for i in (0, 8)]
        header, body = (_read(connection, size) or b"" for size in sizes)
        yield lengths + header + body, json.loads(header), body


def _read(connection: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(1 << 20, size - len(found)))
        if not part:
            return None
        found += part
    return bytes(found)


def _copy(source: socket.socket, target: socket.socket) -> None:
    while part := source.recv(1 << 20):
        target.sendall(part)


def compare(before: Path, after: Path, only: list[str], python: str | None) -> bool:
    """Prints a line per run -> whether all are equal."""
    names = [name for name in RUNS if not only or any(part in name for part in only)]
    equal = True
    for name in [*names, *["vLLM"] * (python is not None)]:
        found = []
        for checkout in (before, after):
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "work"
                write_inputs(folder)
                if name == "vLLM":
                    found.append(vllm_messages(checkout, folder, str(python)))
                    continue
                paths = run(checkout, folder, RUNS[name])
                if "free" in name:
                    found.append(ledger_verdict(checkout, paths[0]))
                else:
                    found.append({k: v for path in paths for k, v in digests(path).items()})
        differ = [key for key in {**found[0], **found[1]} if found[0].get(key) != found[1].get(key)]
        equal &= not differ
        summary = _hash(json.dumps(found[0], sort_keys=True).encode())[:12]
        told = f"equal, {len(found[0])} digests, {summary}" if not differ else f"DIFFER: {differ}"
        print(f"{name:32} {told}", flush=True)
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="parts of the runs' names, with commas")
    parser.add_argument("--vllm", help="Python of an environment that has vLLM")
    args = parser.parse_args()
    only = [part for part in args.only.split(",") if part]
    equal = compare(args.before.resolve(), args.after.resolve(), only, args.vllm)
    print("all runs are equal" if equal else "runs differ")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
