"""Keeps an eye on Triton and the reward service, and keeps this explorer registered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.explorer.triton_client import Reload, TritonClient
from solrl.clients.reward import RewardClient
from solrl.config import ServiceSection
from solrl.errors import SolrlError, UnavailableError
from solrl.metrics import Metrics
from solrl.records import ReplicaState
from solrl.replica import Watcher

#: Seconds between two looks.
EVERY = 2.0

logger = logging.getLogger("solrl.explorer.neighbours")


class Neighbours:
    """Thread that asks both how they are; `problems` is empty when they can serve.

    Once Triton has said which model it holds, this replica registers and follows the learner's
    announcements. A Triton that was started again holds the base model; it is given back the
    adapter it had. `changed` is called when the services become usable or unusable.
    """

    def __init__(
        self,
        services: ServiceSection,
        *,
        replica: str,
        triton: TritonClient,
        reward: RewardClient,
        metrics: Metrics,
        changed: Callable[[bool], None],
    ) -> None:
        self.problems: tuple[str, ...] = (f"Triton at {triton.target} was not reached yet",)
        self.replica = replica
        self._services = services
        self._triton = triton
        self._reward = reward
        self._metrics = metrics
        self._changed = changed
        # Every load takes it, so that nothing is restored over a load that is under way.
        self._loading = threading.Lock()
        self._loaded: tuple[Path, str] | None = None
        self._watcher: Watcher | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="neighbours", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._watcher is not None:
            self._watcher.stop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def all_problems(self) -> tuple[str, ...]:
        """`problems`, and why no run can be followed; a call needs no Redis."""
        watcher = self._watcher
        redis = watcher.problem if watcher is not None else None
        return (*self.problems, redis) if redis else self.problems

    def load(self, folder: Path) -> Reload:
        """Load an adapter by hand; raises AdapterError, UnavailableError."""
        if self._watcher is None:
            raise UnavailableError(self.problems[0])
        return self._watcher.load(folder)  # type: ignore[return-value]

    def _load(self, folder: Path) -> Reload:
        with self._loading:
            answer = self._triton.load_adapter(str(folder), timeout=self._services.reload_timeout)
            self._loaded = (folder, answer.sha256)
        return answer

    def _look(self) -> None:
        while not self._stop.is_set():
            found = tuple(filter(None, (_fault(self._look_at_triton), _fault(self._reward.health))))
            if bool(found) != bool(self.problems):
                self._changed(not found)
                for problem in found:
                    logger.warning("cannot serve: %s", problem)
                if not found:
                    logger.info("Triton and the reward service answer; ready")
            self.problems = found
            self._stop.wait(EVERY)

    def _look_at_triton(self) -> None:
        with self._loading:
            status = self._triton.status()
            current = status["current"]
            if self._loaded is not None and (current or {}).get("sha256") != self._loaded[1]:
                logger.warning("Triton does not serve %s any more; loading it again", self._loaded)
                self._triton.load_adapter(
                    str(self._loaded[0]), timeout=self._services.reload_timeout
                )
        if self._watcher is None:
            self._watcher = Watcher(
                self._services.redis,
                identity=self._identity(status),
                load=self._load,
                metrics=self._metrics,
            )
            self._watcher.start()

    def _identity(self, status: dict[str, Any]) -> ReplicaState:
        return ReplicaState(
            kind="explorer",
            id=self.replica,
            address=self._services.explorer,
            base_sha256=status["base_sha256"],
            precision=status["precision"],
            fp4_share=status["fp4_share"],
        )


def _fault(look: Callable[[], None]) -> str | None:
    try:
        look()
    except SolrlError as error:
        return str(error)
    return None
