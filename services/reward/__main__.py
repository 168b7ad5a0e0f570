"""`python -m services.reward --config FILE [--section.key value]`."""

from __future__ import annotations

import os

import torch

from services.http import serve
from services.launch import main
from services.reward.app import build
from services.reward.service import Scorers, Service
from solrl.config import Config
from solrl.metrics import Metrics
from solrl.rewards import load_scorer


def run(config: Config) -> None:
    def load() -> Scorers:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        names = (config.reward.name, config.reward.judge)
        return {name: load_scorer(name, config.reward.zoo) for name in names}

    metrics = Metrics("reward")
    service = Service(config, load=load, metrics=metrics)
    serve(build(config, service, metrics), config.services.reward)
    if service.worker.failure is not None:
        raise service.worker.failure


if __name__ == "__main__":
    main(run)
