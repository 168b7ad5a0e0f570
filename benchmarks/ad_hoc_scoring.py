"""What does it cost a run when people score prompts? `python -m benchmarks.ad_hoc_scoring`.

A run through all services, in whose every second iteration several clients ask the reward service
to score prompts, one request after another without a pause. Iterations with and without them lie
side by side in one run; the first, which warms up, is left out. Printed: seconds an iteration of
both kinds with their spread, the ratio, and what the clients got.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from solrl.stack import free_ports

PROMPTS = ["strawberry, flat style", "penguin, 3d style"]
ROOT = Path(__file__).resolve().parent.parent
SOLRL = (sys.executable, "-m", "solrl.cli")


class Clients:
    """Threads that ask as fast as they are answered, while they are let."""

    def __init__(self, reward: str, count: int, pictures: int) -> None:
        self.letting = threading.Event()
        self.answered: list[float] = []
        self.refused = 0
        self._body = {"prompts": PROMPTS, "n": pictures}
        self._reward = reward
        for _ in range(count):
            threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._reward, timeout=600) as client:
            while True:
                self.letting.wait()
                begin = time.perf_counter()
                try:
                    answer = client.post("/v1/score-prompts", json=self._body)
                except httpx.TransportError:
                    return  # the measurement is over
                if answer.is_success:
                    self.answered.append(time.perf_counter() - begin)
                else:
                    self.refused += 1
                    time.sleep(0.2)


def measure(share: float, iterations: int, clients: int, pictures: int, folder: Path) -> None:
    environment = {
        **os.environ,
        "SOLRL_STATE": str(folder / "state"),
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build/inductor"),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
    }
    (port,) = free_ports(1)
    settings = {
        "run.directory": folder / "runs",
        "run.name": "ad-hoc",
        "run.iterations": iterations,
        "audit.every": 1000,
        "services.people_share": share,
        "services.learner_port": port,
    }
    words = [f"--{key}={value}" for key, value in settings.items()]
    up = [*SOLRL, "up", "configs/demo.toml", "--detach", *words]
    subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        ask = [*SOLRL, "status", "reward"]
        reward = subprocess.check_output(ask, env=environment, text=True).strip()
        asking = Clients(reward, clients, pictures)
        run = subprocess.Popen(
            [*SOLRL, "run", "configs/demo.toml", *words], env=environment, stdout=subprocess.DEVNULL
        )
        seconds: dict[bool, list[float]] = {False: [], True: []}
        done = 0
        while done < iterations:
            assert run.poll() is None, "the run ended early"
            time.sleep(0.2)
            try:
                status = httpx.get(f"http://127.0.0.1:{port}/v1/run", timeout=10).json()
            except httpx.HTTPError:
                continue
            if status["iterations_done"] > done:
                if done > 0:
                    seconds[asking.letting.is_set()].append(sum(status["seconds"].values()))
                done = status["iterations_done"]
                (asking.letting.set if done % 2 else asking.letting.clear)()
        run.terminate()
        run.wait(timeout=60)
    finally:
        subprocess.run([*SOLRL, "down"], env=environment, check=True, stdout=subprocess.DEVNULL)
    alone, asked = (statistics.fmean(seconds[kind]) for kind in (False, True))
    for kind, name in ((False, "alone"), (True, "asked")):
        spread = statistics.stdev(seconds[kind])
        mean = statistics.fmean(seconds[kind])
        print(f"  {name}: {mean:.1f} s an iteration, sd {spread:.1f}, n {len(seconds[kind])}")
    wait = statistics.median(asking.answered) if asking.answered else float("nan")
    print(
        f"  ratio {asked / alone:.3f}; {len(asking.answered)} requests of "
        f"{len(PROMPTS)} x {pictures} pictures answered, {asking.refused} refused, "
        f"median {wait:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 1.0])
    given = parser.parse_args()
    for share in given.shares:
        print(f"people_share {share}, {given.clients} clients without a pause:", flush=True)
        with tempfile.TemporaryDirectory(prefix="solrl-ad-hoc-") as folder:
            measure(share, given.iterations, given.clients, given.pictures, Path(folder))


if __name__ == "__main__":
    main()
