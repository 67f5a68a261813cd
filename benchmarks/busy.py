"""How long a step takes on cores that have other work, against the same step alone.

    python benchmarks/busy.py
    python benchmarks/busy.py --spin 0 100 1000     other values of GOMP_SPINCOUNT, alone

The step is a quarter of that of step.py, for more rounds. In every round it runs alone, alone with
threads that wait as OpenMP's do by default, beside a busy process of nice 10, and in two processes
at once; ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from turns import Turns, Worker, spread

ROOT = Path(__file__).parents[1]
RECIPE = Path(__file__).with_name("step.toml")
SMALLER = {"rollout.batch": 8, "rollout.group_size": 4, "train.batch": 8}
THREADS = 2


def serve(waiting: str) -> None:
    import burnish
    from burnish import api
    from burnish.console.progress import Progress

    if waiting == "default":
        api.share_cores = lambda: None  # type: ignore[attr-defined]
    turns = Turns()

    def show(progress: Progress) -> None:
        if progress.phase == "step":
            turns.wait({})

    with tempfile.TemporaryDirectory() as out:
        burnish.train(str(RECIPE), overrides=SMALLER, out=Path(out) / "run", show=show)


def start(waiting: str, **env: str) -> Worker:
    command = [sys.executable, __file__, "--serve", waiting]
    return Worker(waiting, command, threads=THREADS, PYTHONPATH=str(ROOT), **env)


def together(workers: list[Worker]) -> float:
    """Seconds until each has made a step, all begun at once."""
    runs = [threading.Thread(target=worker.run) for worker in workers]
    begun = time.perf_counter()
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    return time.perf_counter() - begun


def beside_busy(worker: Worker) -> float:
    loop = [sys.executable, "-c", "import os; os.nice(10)\nwhile True: pass"]
    with subprocess.Popen(loop) as busy:
        try:
            time.sleep(0.5)
            return worker.run()["seconds"]
        finally:
            busy.kill()


def compare(repeats: int) -> None:
    own, other, default = start("burnish"), start("burnish"), start("default")
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        alone = own.run()["seconds"]
        seconds = {
            "default waiting, alone": default.run()["seconds"],
            "beside a busy process of nice 10": beside_busy(own),
            "two at once": together([own, other]),
        }
        print(f"  alone {alone:.2f} s, {seconds}", file=sys.stderr, flush=True)
        found.setdefault("alone, seconds", []).append(alone)
        for name, value in seconds.items():
            found.setdefault(f"{name}, times as long", []).append(value / alone)
    for name, values in found.items():
        print(f"  {name}: {spread(values)}")


def sweep(spins: list[str], repeats: int) -> None:
    workers = {"default": start("default")}
    workers |= {f"spin {n}": start("burnish", GOMP_SPINCOUNT=n) for n in spins}
    found: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            found[name].append(worker.run()["seconds"])
    for name, values in found.items():
        ratios = [a / b for a, b in zip(values, found["default"], strict=True)]
        print(f"  {name}: {spread(values)} s, {spread(ratios)} times the default's")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spin", nargs="+", help="values of GOMP_SPINCOUNT to try alone")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--serve", choices=["burnish", "default"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.spin:
        sweep(args.spin, args.repeats)
    else:
        compare(args.repeats)


if __name__ == "__main__":
    main()
