"""Is a service really ready? Each probe answers None, or in a few words why not yet.

A probe is asked again and again, so being refused is an answer here and not an error.
"""

from __future__ import annotations

import socket
import sys
from urllib.parse import urlsplit

from solrl.errors import ConfigError

#: Deadline of one question, seconds.
PATIENCE = 2.0


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of "host:port" or of a URL that names a port; ConfigError otherwise."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
        fault = "both are needed"
    except ValueError as error:
        fault = str(error)
    raise ConfigError(f"address {address!r} names no host and port: {fault}")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could bind there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def redis_ready(url: str) -> str | None:
    import redis

    with redis.Redis.from_url(
        url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE
    ) as client:
        try:
            client.ping()
        except redis.RedisError as error:
            return str(error)
    return None


def http_ready(url: str) -> str | None:
    import httpx

    try:
        answer = httpx.get(f"{url}/readyz", timeout=PATIENCE, trust_env=False)
    except httpx.TransportError:
        return "does not listen yet"
    if answer.is_success:
        return None
    is_problem = answer.headers.get("content-type", "").startswith("application/problem+json")
    return str(answer.json().get("detail", "")) if is_problem else f"HTTP {answer.status_code}"


def grpc_ready(target: str) -> str | None:
    """By the standard health service, which Triton and the explorer's gateway both offer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        except grpc.RpcError as error:
            unreachable = error.code() is grpc.StatusCode.UNAVAILABLE
            return "does not listen yet" if unreachable else f"{error.code().name.lower()}"
    return None if answer.status == answer.SERVING else "does not serve yet"


def explorer_ready(target: str) -> str | None:
    """The gateway, its Triton, its reward service and its Redis."""
    from solrl.clients.explorer import ExplorerClient
    from solrl.errors import SolrlError

    if (reason := grpc_ready(target)) is not None:
        return reason
    with ExplorerClient(target, timeout=PATIENCE) as client:
        try:
            return "; ".join(client.status().problems) or None
        except SolrlError as error:
            return str(error)


PROBES = {"http": http_ready, "grpc": grpc_ready, "explorer": explorer_ready}


def main(*arguments: str) -> None:
    """`python -m solrl.probes http|grpc|explorer ADDRESS`: exit 1 and say why when not ready."""
    if len(arguments) != 2 or arguments[0] not in PROBES:
        sys.exit(f"usage: python -m solrl.probes {'|'.join(PROBES)} ADDRESS; not {arguments}")
    kind, address = arguments
    if reason := PROBES[kind](address):
        sys.exit(f"{address} {reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
