"""`python -m services.regenerator --config FILE [--section.key value]`."""

from __future__ import annotations

import os

import torch

from services.http import serve
from services.launch import main
from services.regenerator.app import build
from services.regenerator.service import Service
from solrl.config import Config
from solrl.generator import Generator
from solrl.metrics import Metrics


def run(config: Config) -> None:
    def load() -> Generator:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        return Generator.load(
            config,
            precision=config.regenerate.precision,
            micro_batch=config.regenerate.micro_batch,
        )

    metrics = Metrics("regenerator")
    service = Service(config, load=load, metrics=metrics)
    serve(build(service, metrics), config.services.regenerator)
    if service.worker.failure is not None:
        raise service.worker.failure


if __name__ == "__main__":
    main(run)
