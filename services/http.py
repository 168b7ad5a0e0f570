"""What every HTTP service of solrl has in common: routes, errors, limits, and how it is served."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import platform
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import solrl
from solrl.clients.http import PRIORITY_HEADER, REQUEST_ID_HEADER, TOKEN_VARIABLE, Priority
from solrl.errors import (
    AdapterError,
    BusyError,
    ConfigError,
    InputError,
    SolrlError,
    UnavailableError,
    VersionError,
)
from solrl.metrics import Metrics

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

#: Answered without a token: probes and scrapers have none.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
#: Seconds requests in flight get to finish after SIGTERM.
DRAIN_SECONDS = 15
#: Longer than a client keeps an idle connection, so that it is never closed under a request.
KEEP_ALIVE_SECONDS = 30
RETRY_AFTER_SECONDS = 1

STATUS: Sequence[tuple[type[SolrlError], int]] = (
    (VersionError, 409),
    (AdapterError, 409),
    (InputError, 422),
    (BusyError, 429),
    (UnavailableError, 503),
)

logger = logging.getLogger("solrl.http")


def create_app(
    *,
    service: str,
    description: str,
    metrics: Metrics,
    problems: Callable[[], Sequence[str]],
    lifespan: Lifespan,
    max_body: int,
    token: str | None = None,
) -> FastAPI:
    """An app with health, version, metrics, error and request-id handling; add the routes to it.

    `problems` says why the service cannot serve now (/readyz), empty when it can. `max_body` is
    the largest request body in bytes. `token` None takes SOLRL_TOKEN; empty means none is needed.
    """
    app = FastAPI(
        title=f"solrl {service}",
        description=description,
        version=solrl.__version__,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.stop = lambda: None
    metrics.refreshed_by(lambda: metrics.gauge("solrl_ready").set(not problems()))
    app.add_middleware(
        _Gate,
        token=os.environ.get(TOKEN_VARIABLE, "") if token is None else token,
        max_body=max_body,
        metrics=metrics,
    )

    async def solrl_error(request: Request, error: Exception) -> Response:
        metrics.counter("solrl_errors_total", kind=type(error).__name__).inc()
        status = next((s for kind, s in STATUS if isinstance(error, kind)), 500)
        return problem(request, status, str(error), kind=f"urn:solrl:error:{type(error).__name__}")

    app.add_exception_handler(SolrlError, solrl_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)

    @app.get("/healthz", tags=["operation"])
    async def healthz() -> dict[str, str]:
        """The process is alive; restarting it would not help."""
        return {"status": "alive"}

    @app.get("/readyz", tags=["operation"], responses={503: {"description": "and why not"}})
    async def readyz(request: Request) -> Response:
        """Requests can be served now."""
        if found := problems():
            return problem(request, 503, "; ".join(found), title="Not ready")
        return JSONResponse({"status": "ready"})

    @app.get("/version", tags=["operation"])
    async def version() -> dict[str, str]:
        return {
            "service": service,
            "version": solrl.__version__,
            "python": platform.python_version(),
        }

    @app.get("/metrics", tags=["operation"])
    def exposition() -> Response:
        """Prometheus text format."""
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


def lane_of(request: Request) -> Priority:
    """Whose request this is: a run's says so itself, all others are people's."""
    return "run" if request.headers.get(PRIORITY_HEADER) == "run" else "people"


def request_id_of(request: Request) -> str:
    return str(request.state.request_id)


def media_type_of(request: Request, allowed: Sequence[str]) -> str:
    """The request's content type without parameters; 415 unless it is one of `allowed`."""
    seen = request.headers.get("content-type", "")
    media_type = seen.partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise HTTPException(
            415, f"content type {seen[:80]!r} is not supported; send {' or '.join(allowed)}"
        )
    return media_type


async def json_only(request: Request) -> None:
    """Dependency of routes with a JSON body."""
    media_type_of(request, ["application/json"])


def problem(
    request: Request,
    status: int,
    detail: str,
    *,
    title: str = "",
    kind: str = "about:blank",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An application/problem+json answer (RFC 9457)."""
    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    return JSONResponse(
        {
            "type": kind,
            "title": title or HTTPStatus(status).phrase,
            "status": status,
            # A lone surrogate in what the client sent cannot be encoded back.
            "detail": detail.encode(errors="backslashreplace").decode(),
            "request_id": request_id_of(request),
        },
        status,
        headers={**retry, **(headers or {})},
        media_type="application/problem+json",
    )


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(request, 422, "; ".join(_fault(fault) for fault in error.errors()))


def _fault(fault: Mapping[str, Any]) -> str:
    """One fault of a body: where, what is allowed, what was seen."""
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "json_invalid":
        return f"{where}: not JSON: {fault['ctx']['error']}"
    seen = repr(fault.get("input"))
    seen = seen if len(seen) <= 80 else f"{seen[:77]}..."
    return f"{where}: {fault['msg'].removeprefix('Value error, ')} (seen: {seen})"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return problem(request, error.status_code, str(error.detail), headers=error.headers)


class _Gate:
    """Around every request: its id, the token, the body limit, the count, the last resort."""

    def __init__(self, app: ASGIApp, *, token: str, max_body: int, metrics: Metrics) -> None:
        self._app = app
        self._token = token
        self._max_body = max_body
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        seen_id = request.headers.get(REQUEST_ID_HEADER, "")
        plain = re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", seen_id)
        request.state.request_id = seen_id if plain else uuid.uuid4().hex
        status = 0
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large(f"more than {received - 1}")
            return message

        async def marked_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id_of(request)
            await send(message)

        begin = time.perf_counter()
        try:
            if refusal := self._refusal(request):
                await refusal(scope, receive, marked_send)
            else:
                await self._app(scope, counted_receive, marked_send)
        except ClientDisconnect:
            status = 499
        except Exception:
            logger.exception("request %s failed", request_id_of(request))
            self._metrics.counter("solrl_errors_total", kind="InternalError").inc()
            if status == 0:
                answer = problem(
                    request, 500, "an internal error; the service's log has it by the request id"
                )
                await answer(scope, receive, marked_send)
        route = getattr(scope.get("route"), "path", "none")
        seconds = time.perf_counter() - begin
        self._metrics.counter("solrl_http_requests_total", route=route, status=str(status)).inc()
        self._metrics.histogram("solrl_http_request_seconds", route=route).observe(seconds)
        if route not in OPEN_PATHS:
            logger.info(
                "%s %s %d %.3f s id=%s",
                request.method,
                route,
                status,
                seconds,
                request_id_of(request),
            )

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that needs no look at its body."""
        path = request.url.path
        if self._token and path not in OPEN_PATHS:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return problem(
                    request,
                    401,
                    "this service needs a bearer token: send `Authorization: Bearer $SOLRL_TOKEN`; "
                    + ("the one sent is another" if given else "none was sent"),
                    headers={"WWW-Authenticate": "Bearer"},
                )
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            return problem(
                request, 415, f"content encoding {encoding[:40]!r} is not supported; send it plain"
            )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            error = self._too_large(length)
            return problem(request, error.status_code, error.detail)
        return None

    def _too_large(self, seen: str) -> HTTPException:
        return HTTPException(
            413, f"the body has {seen} bytes, at most {self._max_body} are taken; send less at once"
        )


def listen(url: str) -> socket.socket:
    """A listening socket on SOLRL_BIND (default loopback) and the URL's port; ConfigError."""
    host = os.environ.get("SOLRL_BIND", "127.0.0.1")
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    if port is None:
        raise ConfigError(f"{url!r} names no port; write it as http://host:port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is taken by another program; stop that one, or set "
                "another port in [services]"
            ) from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error


def serve(app: FastAPI, url: str) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight; or until `app.state.stop()`."""
    listening = listen(url)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    )

    def stop() -> None:
        server.should_exit = True

    app.state.stop = stop
    host, port = listening.getsockname()[:2]
    logger.info("listening on http://%s:%d, documentation at /docs", host, port)
    server.run(sockets=[listening])
