"""Routes of the reward service."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from starlette.requests import ClientDisconnect
from torch import Tensor

from services.http import create_app, json_only, lane_of, request_id_of
from services.reward.bodies import FORMS, ScoreRequest, check_prompts, pictures, read
from services.reward.prompts import PromptsAnswer, PromptsRequest, score_prompt
from services.reward.service import Service, Wait, fit
from services.worker import outcome
from solrl.clients.regenerator import RegeneratorClient
from solrl.clients.reward import RewardList, ScoreAnswer
from solrl.config import Config
from solrl.errors import UnavailableError
from solrl.metrics import Metrics

MAX_BODY = 256 * 2**20
#: Threads that decode people's picture files; a run's pixels need none.
DECODERS = 2

SCORE_BODY = {
    "required": True,
    "content": {
        FORMS[0]: {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "One tensor `images`, uint8 [n, H, W, 3]; metadata `prompts` and "
                "`rewards` as JSON lists.",
            }
        },
        FORMS[1]: {
            "schema": {
                "type": "object",
                "required": ["files", "prompts"],
                "properties": {
                    "files": {
                        "type": "array",
                        "items": {"type": "string", "format": "binary"},
                        "description": "PNG, JPEG, WEBP, GIF or BMP.",
                    },
                    "prompts": {"type": "array", "items": {"type": "string"}},
                    "rewards": {"type": "array", "items": {"type": "string"}},
                },
            }
        },
        FORMS[2]: {"schema": ScoreRequest.model_json_schema()},
    },
}


def build(config: Config, service: Service, metrics: Metrics) -> FastAPI:
    """The app around one service, which it starts and stops."""
    decoders = ThreadPoolExecutor(DECODERS, "decode")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start(on_failure=app.state.stop)
        yield
        await asyncio.to_thread(service.worker.stop)
        decoders.shutdown()

    app = create_app(
        service="reward",
        description="Scores pictures against their prompts.",
        metrics=metrics,
        problems=service.problems,
        lifespan=lifespan,
        max_body=MAX_BODY,
    )

    def wanted(rewards: list[str] | None) -> list[str]:
        return [config.reward.name] if rewards is None else rewards

    @app.get("/v1/rewards")
    async def rewards() -> RewardList:
        """The scorers served, and the pixels each works on."""
        return RewardList(rewards=service.rewards())

    @app.post(
        "/v1/score",
        openapi_extra={"requestBody": SCORE_BODY},
        response_model_exclude_defaults=True,
        responses={429: {"description": "too many requests are waiting"}},
    )
    async def score(request: Request) -> ScoreAnswer:
        """One row a picture: a value or an error a reward.

        `retry: true` marks an error of the scorer, not of the picture.
        """
        begin = time.perf_counter()
        lane = lane_of(request)
        with service.worker.admit(lane):
            raw = await read(request)
            prompts = check_prompts(raw.prompts, len(raw))
            chosen = service.choose(wanted(raw.rewards))

            def decode() -> dict[int, Tensor]:
                with service.worker.charged(lane):
                    return fit(pictures(raw), chosen)

            pixels = await asyncio.get_running_loop().run_in_executor(
                decoders if raw.files else None, decode
            )
            rows = await service.score(
                pixels, prompts, chosen, lane=lane, wait=_waiting_for(request)
            )
        return ScoreAnswer(
            scorers={reward.name: reward.version for reward in chosen},
            rows=rows,
            seconds=time.perf_counter() - begin,
        )

    @app.post(
        "/v1/score-prompts",
        dependencies=[Depends(json_only)],
        responses={
            409: {"description": "the policy version is not held"},
            503: {"description": "the regenerator, which makes the pictures, is not there"},
        },
    )
    async def score_prompts(asked: PromptsRequest, request: Request) -> PromptsAnswer:
        """Make pictures of each prompt and score them: mean, spread and every value."""
        begin = time.perf_counter()
        chosen = service.choose(wanted(asked.rewards))
        if not config.services.regenerator:
            raise UnavailableError(
                "services.regenerator is empty: prompts alone cannot be scored without the "
                "regenerator; start one with `python -m services.regenerator` and set its URL"
            )
        lane = lane_of(request)
        steps = asked.steps or config.regenerate.steps
        scored = []
        with (
            service.worker.admit(lane),
            RegeneratorClient(
                config.services.regenerator,
                timeout=config.services.call_timeout,
                priority=lane,
            ) as regenerator,
        ):
            for prompt in asked.prompts:
                if await request.is_disconnected():
                    raise ClientDisconnect
                row = await score_prompt(
                    service,
                    regenerator,
                    asked,
                    prompt,
                    chosen,
                    steps=steps,
                    lane=lane,
                    wait=_waiting_for(request),
                    request_id=request_id_of(request),
                )
                scored.append(row)
        return PromptsAnswer(
            steps=steps,
            guidance=asked.guidance,
            scorers={reward.name: reward.version for reward in chosen},
            prompts=scored,
            seconds=time.perf_counter() - begin,
        )

    return app


def _waiting_for(request: Request) -> Wait:
    return lambda future: outcome(request, future, threading.Event())
