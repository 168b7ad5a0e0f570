"""The explorer's model, as reached through Triton's KServe v2 gRPC. No torch."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from solrl import errors
from solrl.errors import SolrlError, UnavailableError

MODEL = "explorer"
Policy = int | Literal["base", "current"]

#: Seconds of silence after which a stream asks whether the model still works.
SILENCE = 5.0
#: Deadline of that question. It is answered between two solver steps, or after a load.
PROBE_TIMEOUT = 30.0
#: How often a waiting stream looks whether its caller is gone, seconds.
POLL = 0.05

#: Error classes the model names at the beginning of an error's text.
_NAMED = re.compile(r"\b(InputError|VersionError|AdapterError|BusyError): (.*)", re.DOTALL)


class CancelledCall(SolrlError):
    """The caller went away."""


@dataclass(frozen=True)
class Batch:
    """Images uint8 [n,H,W,3] of `seeds`; version None = base, then `sha256` is empty."""

    images: NDArray[np.uint8]
    seeds: tuple[int, ...]
    version: int | None
    sha256: str
    precision: str
    solver: str
    nfe: int
    seconds: float
    truncated: bool


@dataclass(frozen=True)
class Reload:
    """What a load answers; see `solrl.generator.Reload`."""

    run: str
    epoch: int
    version: int
    sha256: str
    modules_bound: int
    modules_expected: int
    seconds: float
    canary: str


class TritonClient:
    """One Triton server. Thread-safe; every call opens its own stream.

    Raises the model's own InputError, VersionError, AdapterError and BusyError; UnavailableError
    for everything that may pass.
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def generate(
        self,
        prompt: str,
        seeds: Sequence[int],
        *,
        steps: int,
        guidance: float = 1.0,
        policy: Policy = "current",
        size: int = 0,
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        """Pictures as they are made, in the order of `seeds`; CancelledCall once `cancelled()`.

        A silent stream is not given up while the model answers that it works: the wait may be for
        the requests before this one. Closing the iterator cancels the request.
        """
        number = {"current": -1, "base": -2}[policy] if isinstance(policy, str) else policy
        inputs = [
            _tensor("PROMPT", np.array([prompt.encode()], dtype=np.object_)),
            _tensor("SEEDS", np.array(seeds, dtype=np.int64)),
            _tensor("STEPS", np.array([steps], dtype=np.int32)),
            _tensor("GUIDANCE", np.array([guidance], dtype=np.float32)),
            _tensor("POLICY", np.array([number], dtype=np.int64)),
            _tensor("SIZE", np.array([size], dtype=np.int32)),
        ]
        with self._stream(inputs, timeout) as answers:
            missing = len(seeds)
            while missing:
                batch = _batch(self._next(answers, cancelled))
                missing -= len(batch.seeds)
                yield batch

    def load_adapter(self, folder: str, *, timeout: float) -> Reload:
        """Bind an adapter folder, after the work that is queued already."""
        return Reload(**self._control({"load_adapter": folder}, timeout))

    def status(self, *, layers: bool = False, timeout: float = PROBE_TIMEOUT) -> dict[str, Any]:
        """What is served. An answer proves that the model's working thread is alive."""
        return self._control({"status": True, "layers": layers}, timeout)

    def _control(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        text = json.dumps(order).encode()
        with self._stream(
            [_tensor("CONTROL", np.array([text], dtype=np.object_))], timeout
        ) as all_:
            try:
                answer = all_.get(timeout=timeout)
            except queue.Empty as error:
                raise self._silent(timeout) from error
            return _info(self._checked(answer))

    @contextmanager
    def _stream(
        self, inputs: list[triton.InferInput], timeout: float
    ) -> Iterator[queue.SimpleQueue[Any]]:
        """One request on a stream of its own; what comes back is put on the queue yielded."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client = triton.InferenceServerClient(self.target)
        try:
            client.start_stream(
                lambda result, error: answers.put(error or result), stream_timeout=timeout
            )
            # A stream that failed already says why through the callback, and refuses the request.
            with suppress(InferenceServerException):
                client.async_stream_infer(MODEL, inputs)
            yield answers
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def _next(self, answers: queue.SimpleQueue[Any], cancelled: Callable[[], bool]) -> Any:
        heard = time.monotonic()
        while True:
            try:
                return self._checked(answers.get(timeout=POLL))
            except queue.Empty:
                if cancelled():
                    raise CancelledCall("the caller went away") from None
                if time.monotonic() - heard > SILENCE:
                    # A stub that dies in mid-stream is never heard of again on that stream.
                    self.status()
                    heard = time.monotonic()

    def _checked(self, answer: Any) -> Any:
        if not isinstance(answer, InferenceServerException):
            return answer
        named = _NAMED.search(answer.message())
        if named is not None:
            raise getattr(errors, named[1])(named[2])
        raise UnavailableError(
            f"Triton at {self.target} failed: {answer}; its log says more, and "
            "`python -m services.explorer.triton` starts it"
        )

    def _silent(self, timeout: float) -> UnavailableError:
        return UnavailableError(
            f"Triton at {self.target} did not answer within {timeout:.0f} s; it is to be restarted"
        )


def _tensor(name: str, values: NDArray[Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def _info(result: triton.InferResult) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(result.as_numpy("INFO")[0])
    return info


def _batch(result: triton.InferResult) -> Batch:
    version = int(result.as_numpy("VERSION")[0])
    return Batch(
        images=result.as_numpy("IMAGES"),
        seeds=tuple(result.as_numpy("SEEDS").tolist()),
        version=None if version == -1 else version,
        **_info(result),
    )
