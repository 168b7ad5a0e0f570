"""Routes of the regenerator."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from services.http import create_app, json_only, lane_of
from services.regenerator.service import Order, Result, Service
from services.worker import outcome
from solrl.clients.regenerator import RegeneratorStatus, ReloadAnswer
from solrl.clients.tensors import CONTENT_TYPE, pack
from solrl.metrics import Metrics
from solrl.picture_files import png_base64
from solrl.seeds import SEED_LIMIT

MAX_BODY = 2**20

Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


class RegenerateRequest(BaseModel):
    """Pictures of one prompt, one a seed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(max_length=4096, examples=["strawberry, flat style"])
    seeds: list[Seed] = Field(min_length=1, max_length=256, examples=[[0, 1, 2]])
    steps: int = Field(ge=1, le=200, examples=[10])
    guidance: float = Field(
        1.0, ge=1, le=50, description="Classifier-free guidance scale; 1 is off."
    )
    policy: Annotated[int, Field(ge=0)] | Literal["base", "current"] = "current"
    format: Literal["safetensors", "png"] = "safetensors"


class Picture(BaseModel):
    seed: int
    png: str = Field(description="base64")


class Pictures(BaseModel):
    """The answer for format = png."""

    version: int | None = Field(description="null is the base model")
    adapter_sha256: str | None
    precision: str
    truncated: bool = Field(description="The text encoder cut the prompt.")
    seconds: float
    images: list[Picture]


class AdapterRequest(BaseModel):
    """A folder of `<run directory>/<run>/adapters/`, as this process sees it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str = Field(min_length=1, max_length=4096)


def build(service: Service, metrics: Metrics) -> FastAPI:
    """The app around one service, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start(on_failure=app.state.stop)
        yield
        await asyncio.to_thread(service.stop)

    app = create_app(
        service="regenerator",
        description="Makes the pictures of given seeds at high precision.",
        metrics=metrics,
        problems=service.problems,
        lifespan=lifespan,
        max_body=MAX_BODY,
    )

    @app.post(
        "/v1/regenerate",
        dependencies=[Depends(json_only)],
        response_class=Response,
        responses={
            200: {
                "description": "safetensors: `latents` fp32 [n, C, h, w] and `images` uint8 "
                "[n, H, W, 3]; version, precision, seconds ... in its metadata. Or JSON.",
                "content": {CONTENT_TYPE: {}, "application/json": {}},
            },
            409: {"description": "the version is not held; names those that are"},
            429: {"description": "too many requests are waiting"},
        },
    )
    async def regenerate(body: RegenerateRequest, request: Request) -> Response:
        """Pictures and clean latents of `seeds`, in their order, all by one policy version."""
        cancelled = threading.Event()
        lane = lane_of(request)
        order = Order(body.prompt, tuple(body.seeds), body.steps, body.guidance, body.policy)
        result = await service.regenerate(
            order,
            lane=lane,
            cancelled=cancelled,
            wait=lambda future: outcome(request, future, cancelled),
        )

        def encode() -> Response:
            with service.worker.charged(lane):
                form = as_safetensors if body.format == "safetensors" else as_pngs
                return form(result, body.seeds)

        return await asyncio.to_thread(encode)

    @app.put(
        "/v1/adapter",
        dependencies=[Depends(json_only)],
        responses={409: {"description": "refused, and why; the version before keeps serving"}},
    )
    async def adapter(body: AdapterRequest) -> ReloadAnswer:
        """Load an adapter by hand. Loading the same one again changes nothing."""
        answer = await asyncio.to_thread(service.load_adapter, Path(body.path))
        return ReloadAnswer.model_validate(asdict(answer))

    @app.get("/v1/adapters")
    async def adapters() -> RegeneratorStatus:
        """The base model, the versions held, and this replica's registration."""
        return service.status()

    return app


def as_safetensors(result: Result, seeds: list[int]) -> Response:
    about = {
        "version": json.dumps(result.version),
        "adapter_sha256": json.dumps(result.adapter_sha256),
        "precision": result.precision,
        "truncated": json.dumps(result.truncated),
        "seconds": json.dumps(result.seconds),
        "seeds": json.dumps(seeds),
    }
    arrays = {"latents": result.latents.numpy(), "images": result.images.numpy()}
    return Response(pack(arrays, about), media_type=CONTENT_TYPE)


def as_pngs(result: Result, seeds: list[int]) -> Response:
    answer = Pictures(
        version=result.version,
        adapter_sha256=result.adapter_sha256,
        precision=result.precision,
        truncated=result.truncated,
        seconds=result.seconds,
        images=[
            Picture(seed=seed, png=png_base64(image))
            for seed, image in zip(seeds, result.images.numpy(), strict=True)
        ],
    )
    return Response(answer.model_dump_json(), media_type="application/json")
