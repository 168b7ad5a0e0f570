"""What every HTTP client of solrl shares: deadlines, the token, and errors as solrl's own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from solrl.errors import AdapterError, InputError, UnavailableError, VersionError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

#: A run's requests go before people's.
Priority = Literal["run", "people"]
PRIORITY_HEADER = "X-Solrl-Priority"
REQUEST_ID_HEADER = "X-Request-ID"
TOKEN_VARIABLE = "SOLRL_TOKEN"

FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0


class Problem(BaseModel):
    """An application/problem+json body (RFC 9457); every field may be missing from a stranger's."""

    type: str = "about:blank"
    title: str = ""
    status: int = 0
    detail: str = ""
    request_id: str = ""


class HttpClient:
    """One service at `url`. Thread-safe; close it, or use it as a context manager.

    `timeout` is the deadline of a whole call in seconds. `token` None takes SOLRL_TOKEN from the
    environment. Raises UnavailableError (transport, deadline, 429, 5xx: may be repeated),
    VersionError or AdapterError (409) and InputError (other 4xx).
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        timeout: float,
        token: str | None = None,
        priority: Priority = "run",
    ) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        headers: dict[str, str] = {PRIORITY_HEADER: priority}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self.url = url.rstrip("/")
        self._name = f"the {name} at {self.url}"
        self._timeout = timeout
        # trust_env: a proxy set for the internet must not see calls between services.
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
            trust_env=False,
            # Reading the certificates takes longer than most calls; plain HTTP needs none.
            verify=not self.url.startswith("http:"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """The body of a successful answer."""
        sent = dict(headers or {})
        if request_id is not None:
            sent[REQUEST_ID_HEADER] = request_id
        deadline = time.monotonic() + self._timeout
        parts: list[bytes] = []
        try:
            with self._http.stream(
                method, self.url + path, json=json, content=content, headers=sent
            ) as answer:
                for part in answer.iter_bytes():
                    parts.append(part)
                    # httpx bounds each read; a body that trickles must end too.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer did not end in time")
        except httpx.TimeoutException as error:
            raise UnavailableError(
                f"{self._name} did not answer {method} {path} within {self._timeout:g} s; "
                "it is busy, or services.call_timeout is too short"
            ) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InputError(f"{self.url!r} is not an http:// address: {error}") from error
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"{self._name} cannot be reached ({error or type(error).__name__}); "
                "start it with `solrl up`, or correct its address in [services]"
            ) from error
        body = b"".join(parts)
        if not answer.is_success:
            raise self._error(answer.status_code, body, f"{method} {path}")
        return body

    def parse(self, model: type[M], body: bytes) -> M:
        """`body` as `model`; UnavailableError when this is not the service it should be."""
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise self.nonsense(str(error)) from error

    def nonsense(self, what: str) -> UnavailableError:
        """The error for an answer that breaks the contract."""
        return UnavailableError(f"{self._name} gave an answer that cannot be used: {what}")

    def health(self) -> None:
        """Return when the service can serve now; else UnavailableError says why not."""
        self.call("GET", "/readyz")

    def _error(self, status: int, body: bytes, what: str) -> Exception:
        try:
            problem = Problem.model_validate_json(body)
        except ValidationError:
            problem = Problem(detail=body[:200].decode(errors="replace"))
        text = f"{self._name} answered {what} with {status}: {problem.detail or problem.title}"
        if status == 409:
            return AdapterError(text) if "AdapterError" in problem.type else VersionError(text)
        if status == 429 or not 400 <= status < 500:
            return UnavailableError(text)
        return InputError(text)


def retrying(
    call: Callable[[], T],
    *,
    retry_for: float,
    on_wait: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Repeat `call` on UnavailableError, ever more slowly, until `retry_for` seconds have passed.

    Then the last error is raised. `on_wait` hears each error that is waited out.
    """
    give_up = time.monotonic() + retry_for
    pause = FIRST_WAIT
    while True:
        try:
            return call()
        except UnavailableError as error:
            if time.monotonic() + pause > give_up:
                raise
            if on_wait is not None:
                on_wait(str(error))
        sleep(pause)
        pause = min(2 * pause, LONGEST_WAIT)
