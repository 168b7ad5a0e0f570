"""Triton's side of the explorer: tensors in, work for the scheduler; answers out.

A request is either an exploration: PROMPT BYTES[1], SEEDS INT64[n], STEPS INT32[1], and optionally
GUIDANCE FP32[1] (1), POLICY INT64[1] (-1 current, -2 base, else a version; -1) and SIZE INT32[1]
(0 native pixels, else the side they are reduced to; 0);
or CONTROL BYTES[1], JSON: {"load_adapter": folder} or {"status": true, "layers": false}.

An exploration is answered once a micro-batch: IMAGES UINT8[n,H,W,3], SEEDS INT64[n], VERSION
INT64[1] (-1 base), INFO BYTES[1] (JSON: sha256, precision, solver, nfe, seconds, truncated); a
control request once, with INFO alone. An error's text begins with the name of its class.
"""

from __future__ import annotations

import json
import locale
import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from services.explorer.scheduler import (
    Answer,
    CancelledWork,
    Exploration,
    Load,
    Pictures,
    Question,
    Scheduler,
)
from solrl.config import load_config
from solrl.errors import BusyError, InputError, UnavailableError
from solrl.generator import Generator, Policy

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Loaded by Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        # Nobody sets the locale of an embedded Python, and torch.compile reads UTF-8 templates.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        config = load_config(Path(os.environ["SOLRL_CONFIG"]))
        explore = config.explore
        generator = Generator.load(
            config,
            precision=explore.precision,
            micro_batch=explore.micro_batch,
            activation_scale=explore.activation_scale,
            role="explore",
        )
        generator.warm_up()
        self._scheduler = Scheduler(generator, merge=explore.activation_scale == "row")
        self._scheduler.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand every request to the scheduler. Never raises: that would leak shared memory."""
        for request in requests:
            client = Client(request)
            try:
                self._scheduler.submit(_work(request, client))
            except Exception as error:
                client.fail(error)

    def finalize(self) -> None:
        self._scheduler.stop()


class Client:
    """The scheduler's `Caller` for one Triton request."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()

    def cancelled(self) -> bool:
        return bool(self._request.is_cancelled())

    def send(self, answer: Answer, *, final: bool) -> None:
        tensors = _tensors(answer)
        response = pb_utils.InferenceResponse(output_tensors=tensors)
        self._sender.send(response, flags=FINAL if final else 0)

    def fail(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, _code(error)))
        self._sender.send(response, flags=FINAL)


def _code(error: Exception) -> Any:
    match error:
        case InputError():
            return pb_utils.TritonError.INVALID_ARG
        case BusyError() | UnavailableError():
            return pb_utils.TritonError.UNAVAILABLE
        case CancelledWork():
            return pb_utils.TritonError.CANCELLED
        case _:
            return pb_utils.TritonError.INTERNAL


def _work(request: Any, client: Client) -> Exploration | Load | Question:
    """Raises InputError for tensors that make no request."""
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    if "CONTROL" in inputs:
        return _control(_text(inputs["CONTROL"]), client)
    missing = [name for name in ("PROMPT", "SEEDS", "STEPS") if name not in inputs]
    if missing:
        raise InputError(f"the request lacks {', '.join(missing)}; or send CONTROL alone")
    policy: Policy = int(inputs["POLICY"][0]) if "POLICY" in inputs else -1
    if policy == -1:
        policy = "current"
    elif policy == -2:
        policy = "base"
    return Exploration(
        caller=client,
        prompt=_text(inputs["PROMPT"]),
        seeds=inputs["SEEDS"].tolist(),
        steps=int(inputs["STEPS"][0]),
        guidance=float(inputs["GUIDANCE"][0]) if "GUIDANCE" in inputs else 1.0,
        policy=policy,
        size=int(inputs["SIZE"][0]) if "SIZE" in inputs else 0,
    )


def _control(text: str, client: Client) -> Load | Question:
    try:
        order = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"CONTROL is not JSON ({error}): {text[:200]!r}") from error
    match order:
        case {"load_adapter": str(path)}:
            return Load(client, Path(path))
        case {"status": True}:
            return Question(client, layers=bool(order.get("layers")))
    raise InputError(
        f'CONTROL {text[:200]!r} is not known; allowed: {{"load_adapter": folder}}, '
        '{"status": true}'
    )


def _text(tensor: Any) -> str:
    try:
        return bytes(tensor[0]).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"text is not UTF-8: {error}") from error


def _tensors(answer: Answer) -> list[Any]:
    if not isinstance(answer, Pictures):
        return [_info(answer)]
    version = -1 if answer.version is None else answer.version
    return [
        pb_utils.Tensor("IMAGES", answer.images),
        pb_utils.Tensor("SEEDS", np.array(answer.seeds, dtype=np.int64)),
        pb_utils.Tensor("VERSION", np.array([version], dtype=np.int64)),
        _info(answer.info),
    ]


def _info(info: dict[str, Any]) -> Any:
    return pb_utils.Tensor("INFO", np.array([json.dumps(info).encode()], dtype=np.object_))
