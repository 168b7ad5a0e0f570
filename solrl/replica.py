"""A replica's watcher: loads what the learner announces and answers under its stable id.

The explorer's gateway and the regenerator each run one. No torch: how to load is a callback.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import redis
from pydantic import ValidationError

from solrl import queue
from solrl.adapters import read_manifest
from solrl.errors import AdapterError, InputError, SolrlError, UnavailableError
from solrl.metrics import Metrics
from solrl.records import Announcement, ReplicaState

#: Seconds between registrations; well below queue.REPLICA_TTL.
HEARTBEAT = 1.0

logger = logging.getLogger("solrl.replica")


class Reloaded(Protocol):
    """What a load answers; `solrl.generator.Reload` is one."""

    @property
    def run(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def modules_bound(self) -> int: ...
    @property
    def modules_expected(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def canary(self) -> str: ...


def replica_id(kind: str) -> str:
    """The stable id of this process: SOLRL_REPLICA_ID, else host name and kind."""
    return os.environ.get("SOLRL_REPLICA_ID") or f"{socket.gethostname()}-{kind}"


class Watcher:
    """Thread that loads the latest announcement and keeps the replica registered.

    `load` binds an adapter folder whole or raises: AdapterError (or another InputError) when it
    cannot be bound, which is shown in `state.error` while the old version keeps serving;
    UnavailableError when it may work later, which is tried again at every heartbeat.
    `identity` is the registration before anything is loaded. `problem` says why announcements
    cannot be seen at the moment, None when all is well.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        identity: ReplicaState,
        load: Callable[[Path], Reloaded],
        metrics: Metrics,
    ) -> None:
        self.state = identity
        self._metrics = metrics
        metrics.gauge("solrl_policy_version").set(-1)
        self._problem: str | None = f"Redis at {redis_url} was not reached yet"
        self._url = redis_url
        self._load = load
        self._loading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replica-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and unregister; returns within a few seconds."""
        self._stop.set()
        self._thread.join()

    @property
    def problem(self) -> str | None:
        if not self._thread.is_alive():
            return "the thread that watches for adapters is not running; see the log"
        return self._problem

    def load(self, folder: Path) -> Reloaded:
        """Load one adapter by hand; refusals are raised, and change nothing."""
        with self._loading:
            before = self.state
            try:
                answer = self._load(folder)
            except InputError:
                self._metrics.counter("solrl_reloads_refused_total").inc()
                raise
            # Trying an older version by hand must not let an older learner back in.
            served = before.epoch or 0 if before.run == answer.run else 0
            self._took(answer, epoch=max(answer.epoch, served))
        return answer

    def _took(self, answer: Reloaded, *, epoch: int) -> None:
        self.state = self.state.model_copy(
            update={
                "run": answer.run,
                "epoch": epoch,
                "version": answer.version,
                "sha256": answer.sha256,
                "modules_bound": answer.modules_bound,
                "modules_expected": answer.modules_expected,
                "seconds": answer.seconds,
                "canary": answer.canary,
                "error": None,
            }
        )
        self._metrics.gauge("solrl_policy_version").set(answer.version)
        self._metrics.histogram("solrl_reload_seconds").observe(answer.seconds)
        for modules, count in (
            ("bound", answer.modules_bound),
            ("expected", answer.modules_expected),
        ):
            self._metrics.gauge("solrl_reload_modules", modules=modules).set(count)
        logger.info(
            "serving version %d of run %s: %d of %d modules bound in %.3f s",
            answer.version,
            answer.run,
            answer.modules_bound,
            answer.modules_expected,
            answer.seconds,
        )

    def _watch(self) -> None:
        client: redis.Redis | None = None
        seen = "0-0"
        with ThreadPoolExecutor(1, "replica-load") as pool:
            while not self._stop.is_set():
                try:
                    client = client or queue.connect(self._url)
                    seen = self._turn(client, seen, pool)
                    self._report(None)
                except (redis.RedisError, UnavailableError) as error:
                    text = str(error)
                    self._report(text if self._url in text else f"Redis at {self._url}: {text}")
                    self._stop.wait(HEARTBEAT)
        if client is not None and self._problem is None:
            queue.unregister(client, self.state)

    def _report(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s; trying again", problem) if problem else logger.info("Redis is back")

    def _turn(self, client: redis.Redis, seen: str, pool: ThreadPoolExecutor) -> str:
        """Adopt the newest announcement unless it is `seen`; register; wait for the next one."""
        newest: Any = client.xrevrange(queue.ANNOUNCEMENTS, count=1)
        entry_id, fields = newest[0] if newest else ("0-0", {})
        if newest and entry_id != seen:
            # Waiting for it here must not let the registration expire.
            adopting = pool.submit(self._adopt, fields.get("json", ""))
            while not wait([adopting], HEARTBEAT).done:
                queue.register(client, self.state)
            seen = entry_id if adopting.result() else seen
        queue.register(client, self.state)
        client.xread({queue.ANNOUNCEMENTS: entry_id}, block=int(HEARTBEAT * 1000))
        return seen

    def _adopt(self, text: str) -> bool:
        """Whether this announcement is dealt with, by loading or by refusing it."""
        try:
            announcement = Announcement.model_validate_json(text)
            with self._loading:
                check_announcement(announcement, self.state)
                answer = self._load(Path(announcement.path))
                self._took(answer, epoch=announcement.epoch)
        except (SolrlError, ValidationError) as error:
            if self.state.error != str(error):
                logger.error("announced adapter not loaded: %s", error)
            self.state = self.state.model_copy(update={"error": str(error)})
            refused = isinstance(error, (InputError, ValidationError))
            self._metrics.counter("solrl_reloads_refused_total").inc(refused)
            return refused
        return True


def check_announcement(announcement: Announcement, state: ReplicaState) -> None:
    """Raise AdapterError for another base model, an older epoch, or other bytes on disk."""
    named = f"adapter version {announcement.version} of run {announcement.run}"
    if announcement.base_sha256 != state.base_sha256:
        raise AdapterError(
            f"{named} was trained on base {announcement.base_sha256[:12]}, "
            f"this replica holds {state.base_sha256[:12]}"
        )
    if announcement.run == state.run and announcement.epoch < (state.epoch or 0):
        raise AdapterError(
            f"{named} comes from epoch {announcement.epoch}, epoch {state.epoch} is already "
            "served (an older learner is still alive?)"
        )
    on_disk = read_manifest(Path(announcement.path)).sha256
    if on_disk != announcement.sha256:
        raise AdapterError(
            f"{named} was announced with sha256 {announcement.sha256[:12]}, "
            f"{announcement.path} holds {on_disk[:12]}"
        )
