"""The run: feed prompts, take selections, regenerate, train, publish; the only writer of records.

Order, always: checkpoint durable -> publish its adapter -> announce -> bound by every replica ->
acknowledge the entries -> feed the next iteration. Whatever dies in between, a resume starts from
the newest checkpoint and republishes its bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import redis
import torch
from torch.utils.tensorboard import SummaryWriter

from services.learner.groups import Group, GroupMaker, Seconds
from services.learner.status import Control
from solrl import adapters, lora, models, queue
from solrl.adapters import Manifest
from solrl.advantages import advantages
from solrl.clients.http import retrying
from solrl.clients.regenerator import RegeneratorClient
from solrl.clients.reward import RewardClient
from solrl.config import Config
from solrl.embeddings import EmbeddingStore
from solrl.errors import ConfigError, SolrlError, UnavailableError
from solrl.ledger import Ledger, Reward
from solrl.lora import Lora
from solrl.prompts import read_prompts
from solrl.records import Announcement, PromptRecord, ReplicaState, SelectionRecord
from solrl.rundir import RunDirectory
from solrl.seeds import prompt_order
from solrl.selection import Selection, contrast
from solrl.stats import kendall_tau
from solrl.training import Sample, Trainer

T = TypeVar("T")

#: Seconds between looks at the queue while nothing arrives.
POLL = 1.0
HOLD_TTL = 30


class Learner:
    """One run, from its checkpoint to `config.run.iterations`."""

    def __init__(self, config: Config, directory: RunDirectory, control: Control) -> None:
        self._config = config
        self.directory = directory
        self._control = control
        self._owner = f"{socket.gethostname()}/{os.getpid()}"
        self._redis = queue.connect(config.services.redis)
        self._prompts = read_prompts(config.prompts.train)
        torch.set_num_threads(os.cpu_count() or 1)
        model = models.load(config.model)
        self.base_sha256 = models.base_sha256(model.folder)
        self._store = EmbeddingStore.of(config.model, model)
        self.trainer = Trainer(model, config.train, run_seed=config.run.seed)
        state = directory.load_checkpoint(self.trainer)
        self.done = state.iterations_done if state else 0
        self._parent = state.parent_adapter if state else None
        self._ledger = Ledger(directory.path / "ledger.sqlite")
        self._ledger.forget_from(self.done)
        self._writer = SummaryWriter(str(directory.path / "tensorboard"), purge_step=self.done)
        timeout = config.services.call_timeout
        self.maker = GroupMaker(
            config,
            RegeneratorClient(config.services.regenerator, timeout=timeout),
            RewardClient(config.services.reward, timeout=timeout),
            control.waiting_for,
        )
        self._scraped = redis.Redis.from_url(
            config.services.redis,
            decode_responses=True,
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
        )
        control.metrics.refreshed_by(self._measure_redis)

    def check_scorers(self) -> None:
        """Both scorers must take every prompt they will meet; known now, not after training."""
        unseen = read_prompts(self._config.prompts.unseen)
        prompts = list(dict.fromkeys([*self._prompts, *unseen]))
        blank = np.full((len(prompts), 32, 32, 3), 255, np.uint8)
        for name in (self._config.reward.name, self._config.reward.judge):
            for prompt, fault in zip(
                prompts, self.maker.score(blank, prompts, name).errors, strict=True
            ):
                if fault is not None:
                    raise ConfigError(f"{name} cannot score the prompt {prompt!r}: {fault}")

    def train(self) -> None:
        """Run the iterations that are left; returns early when asked to stop."""
        with queue.answering(self._config.services.redis), self._holding_the_stack():
            self._feed, self._selected = self._streams()
            seconds = Seconds()
            if not self.directory.checkpoints():
                seconds.timed("publish", self._checkpoint)
            version, sha256 = seconds.timed("publish", self._publish)
            self._control.started(self.done, seconds, self._ledger.seconds())
            while self.done < self._config.run.iterations and self._control.may_go_on():
                version, sha256 = self._iteration(version, sha256)

    def close(self) -> None:
        self._ledger.close()
        self._writer.close()

    def _measure_redis(self) -> None:
        """Queue and replicas as they are now; what was seen last while Redis is away."""
        metrics = self._control.metrics
        try:
            waiting = queue.backlog(self._scraped, self._config.run.name)
            replicas = queue.replicas(self._scraped)
        except (redis.RedisError, UnavailableError):
            return
        for name, entries in waiting.entries.items():
            metrics.gauge("solrl_queue_entries", queue=name).set(entries)
            metrics.gauge("solrl_queue_oldest_seconds", queue=name).set(waiting.oldest[name])
        metrics.gauge("solrl_queue_dead_entries").set(waiting.dead)
        staleness = "solrl_replica_staleness_versions"
        metrics.gauge(staleness).clear()
        for state in replicas:
            mine = state.run == self._config.run.name
            behind = self.done - (state.version or 0) if mine else self.done + 1
            metrics.gauge(staleness, kind=state.kind, replica=state.id).set(behind)

    # --- one iteration -------------------------------------------------------------------------

    def _iteration(self, version: int, sha256: str) -> tuple[int, str]:
        begin = time.perf_counter()
        seconds = Seconds()
        iteration = self.done
        audit = iteration % self._config.audit.every == 0
        self._push(iteration, version, sha256)
        groups, entries = self._collect(iteration, version, sha256, audit=audit, seconds=seconds)
        rewards = self._advantages(groups)
        stats = seconds.timed("train", lambda: self._train(iteration, groups, rewards))
        metrics = self._metrics(groups, stats.__dict__)
        seconds.timed(
            "publish",
            lambda: self._record(
                iteration, version, groups, rewards, {**metrics, "seconds": seconds}
            ),
        )
        self.done += 1
        seconds.timed("publish", self._checkpoint)
        version, sha256 = seconds.timed("publish", self._publish)
        for entry in entries:
            self._insist(partial(self._selected.done, entry))
        total = time.perf_counter() - begin
        seconds["other"] = seconds.get("other", 0.0) + total - sum(seconds.values())
        self._ledger.time_iteration(iteration, seconds)
        self._control.finished(iteration, version, metrics, seconds)
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, value, iteration)
        self._writer.flush()
        return version, sha256

    def _push(self, iteration: int, version: int, sha256: str) -> None:
        config = self._config
        count = config.prompts.per_iteration
        order = prompt_order(config.run.seed, len(self._prompts), iteration * count, count)
        trace = hashlib.sha256(f"{config.run.name}|{self.directory.epoch}|{iteration}".encode())
        for slot, index in enumerate(order):
            record = PromptRecord(
                run=config.run.name,
                epoch=self.directory.epoch,
                iteration=iteration,
                slot=slot,
                request_id=f"{config.run.name}-{self.directory.epoch}-{iteration}-{slot}",
                trace_id=trace.hexdigest()[:32],
                prompt=self._prompts[index],
                prompt_index=index,
                run_seed=config.run.seed,
                candidates=config.explore.candidates,
                keep=config.explore.keep,
                steps=config.explore.steps,
                policy_version=version,
                adapter_sha256=sha256,
                reward=config.reward.name,
            )
            # Put again after a broken connection: a second copy of a slot is ignored.
            self._insist(partial(self._feed.put, record))

    def _collect(
        self, iteration: int, version: int, sha256: str, *, audit: bool, seconds: Seconds
    ) -> tuple[list[Group], list[str]]:
        """All slots' groups in slot order, and the entries to acknowledge once durable.

        Groups are regenerated as they arrive, while others are still being explored.
        """
        groups: dict[int, Group] = {}
        entries: list[str] = []
        last = time.monotonic()
        while len(groups) < self._config.prompts.per_iteration:
            waited = Seconds()
            deliveries = waited.timed(
                "explore",
                partial(self._insist, partial(self._selected.take, self._owner, wait=POLL)),
            )
            for delivery in deliveries:
                record = delivery.record
                fits = (
                    record.key == (self._config.run.name, iteration, record.slot)
                    and record.epoch == self.directory.epoch
                    and (record.policy_version, record.adapter_sha256) == (version, sha256)
                    and record.slot not in groups
                    and record.slot < self._config.prompts.per_iteration
                )
                if not fits:
                    self._selected.done(delivery.entry_id)
                    continue
                _split_wait(seconds, waited.pop("explore", 0.0), record)
                groups[record.slot] = self.maker.make(record, audit=audit, seconds=seconds)
                entries.append(delivery.entry_id)
                self._control.progress(iteration, len(groups))
                last = time.monotonic()
            seconds["explore"] = seconds.get("explore", 0.0) + waited.get("explore", 0.0)
            if time.monotonic() - last > self._config.services.selection_timeout:
                raise UnavailableError(
                    f"no selection of iteration {iteration} arrived within "
                    f"{self._config.services.selection_timeout:.0f} s; is the explorer at "
                    f"{self._config.services.explorer} alive? (see its log, or `solrl doctor`)"
                )
        return [groups[slot] for slot in sorted(groups)], entries

    def _advantages(self, groups: list[Group]) -> list[list[float]]:
        config = self._config.train
        usable = [g for g in groups if len(g.rewards) >= 2]
        centres = None
        if config.centring == "all":
            centres = [
                float(sum(proxies) / len(proxies))
                for g in usable
                if (
                    proxies := [
                        c.proxy_reward for c in g.selection.candidates if c.proxy_reward is not None
                    ]
                )
            ]
        values = iter(
            advantages([g.rewards for g in usable], scale=config.advantage_scale, centres=centres)
            if usable
            else []
        )
        # A group left with one picture has nothing to be compared with.
        return [next(values) if len(g.rewards) >= 2 else [0.0] * len(g.rewards) for g in groups]

    def _train(self, iteration: int, groups: list[Group], rewards: list[list[float]]) -> Any:
        samples = [
            Sample(
                slot=group.selection.slot,
                candidate=kept.candidate,
                clean=torch.from_numpy(latents),
                prompt=self._store.get(group.selection.prompt),
                advantage=advantage,
            )
            for group, group_advantages in zip(groups, rewards, strict=True)
            if any(group_advantages)
            for kept, latents, advantage in zip(
                group.kept, group.latents, group_advantages, strict=True
            )
        ]
        return self.trainer.train(
            samples, iteration=iteration, rollout_steps=self._config.regenerate.steps
        )

    def _metrics(self, groups: list[Group], stats: dict[str, Any]) -> dict[str, Any]:
        proxies = [
            [math.nan if c.proxy_reward is None else c.proxy_reward for c in g.selection.candidates]
            for g in groups
        ]
        contrasts = [_true_contrast(g) for g in groups]
        audited = [g.audit for g in groups if len(g.audit) >= 3]
        everything = [v for p in proxies for v in p if math.isfinite(v)]
        kept = [r for g in groups for r in g.rewards]
        return {
            "reward_all": _mean(everything),
            "reward_kept": _mean(kept),
            "contrast": _mean([c for c in contrasts if math.isfinite(c)]),
            "kendall_tau": _mean(
                [kendall_tau([a.proxy for a in g], [a.true for a in g]) for g in audited]
            ),
            "kendall_tau_ceiling": _mean(
                [kendall_tau([a.ceiling for a in g], [a.true for a in g]) for g in audited]
            ),
            "unscored_candidates": sum(not math.isfinite(v) for p in proxies for v in p),
            "excluded_candidates": sum(g.excluded for g in groups),
            "zero_spread_groups": sum(len(set(g.rewards)) < 2 for g in groups),
            **stats,
        }

    def _insist(self, call: Callable[[], T]) -> T:
        """Repeat while Redis is away, at most `services.retry_for` seconds."""

        def attempt() -> T:
            with queue.answering(self._config.services.redis):
                return call()

        return retrying(
            attempt,
            retry_for=self._config.services.retry_for,
            on_wait=self._control.waiting_for,
        )

    # --- records -------------------------------------------------------------------------------

    def _record(
        self,
        iteration: int,
        version: int,
        groups: list[Group],
        advantage: list[list[float]],
        metrics: dict[str, Any],
    ) -> None:
        rows: list[dict[str, Any]] = []
        rewards: list[Reward] = []
        name = self._config.reward.name
        for group, values in zip(groups, advantage, strict=True):
            selection = group.selection
            advantage_of = {c.candidate: a for c, a in zip(group.kept, values, strict=True)}
            for c in selection.candidates:
                kept = c.candidate in advantage_of
                rows.append(
                    {
                        "iteration": iteration,
                        "slot": selection.slot,
                        "candidate": c.candidate,
                        "epoch": self.directory.epoch,
                        "prompt_index": selection.prompt_index,
                        "prompt": selection.prompt,
                        "seed": c.seed,
                        "explore_version": selection.policy_version,
                        "explore_precision": selection.precision,
                        "explore_steps": selection.steps,
                        "solver": selection.solver,
                        "train_version": version if kept else None,
                        "train_precision": group.precision if kept else None,
                        "train_steps": self._config.regenerate.steps if kept else None,
                        "selected_as": c.selected_as,
                        "advantage": advantage_of.get(c.candidate),
                    }
                )
            found: list[tuple[int, str, str, float | None]] = [
                (c.candidate, "proxy", selection.reward_version, c.proxy_reward)
                for c in selection.candidates
            ]
            found += [
                (c.candidate, "true", group.reward_version, r)
                for c, r in zip(group.kept, group.rewards, strict=True)
            ]
            for a in group.audit:
                found.append((a.candidate, "audit", group.reward_version, a.true))
                found.append((a.candidate, "ceiling", group.reward_version, a.ceiling))
            rewards += [
                Reward(iteration, selection.slot, candidate, stage, name, reward_version, value)
                for candidate, stage, reward_version, value in found
            ]
        self._ledger.commit_iteration(
            rows,
            rewards,
            iteration=iteration,
            epoch=self.directory.epoch,
            policy_version=version,
            metrics=json.dumps({k: _json(v) for k, v in metrics.items()}),
        )

    def _checkpoint(self) -> None:
        self.directory.save_checkpoint(
            self.trainer, iterations_done=self.done, parent_adapter=self._parent
        )

    def _publish(self) -> tuple[int, str]:
        """Publish, announce and await the behaviour policy; version = iterations done."""
        weights = self.trainer.get("old")
        folder = self.directory.adapter_folder(self.done)
        sha256 = self._write_adapter(folder, weights, policy="behaviour")
        queue.announce(
            self._redis,
            Announcement(
                run=self._config.run.name,
                epoch=self.directory.epoch,
                version=self.done,
                sha256=sha256,
                path=str(folder),
                base_sha256=self.base_sha256,
            ),
        )
        self.replicas: list[ReplicaState] = queue.wait_for(
            self._redis,
            version=self.done,
            sha256=sha256,
            timeout=self._config.services.reload_timeout,
        )
        self._parent = sha256
        return self.done, sha256

    def write_ema(self) -> Path:
        """The policy taken home, `<run>/ema/<iterations done>/`."""
        folder = self.directory.path / "ema" / str(self.done)
        self._write_adapter(folder, self.trainer.get("ema"), policy="ema")
        return folder

    def _write_adapter(self, folder: Path, weights: Lora, *, policy: str) -> str:
        data = lora.to_bytes(weights)
        sha256 = hashlib.sha256(data).hexdigest()
        adapters.publish(
            folder,
            data,
            Manifest(
                run=self._config.run.name,
                epoch=self.directory.epoch,
                version=self.done,
                step=self.trainer.step,
                policy=policy,
                base_id=self._config.model.base,
                base_sha256=self.base_sha256,
                rank=weights.rank,
                alpha=weights.alpha,
                targets=tuple(sorted(weights.pairs)),
                sha256=sha256,
                parent=self._parent,
            ),
        )
        return sha256

    # --- the stack -----------------------------------------------------------------------------

    def _streams(self) -> tuple[queue.Stream[PromptRecord], queue.Stream[SelectionRecord]]:
        """The run's streams, emptied: everything in them can be made again from the checkpoint."""
        limit = 4 * self._config.prompts.per_iteration
        feed = queue.Stream(
            self._redis,
            run=self._config.run.name,
            name="prompts",
            record=PromptRecord,
            limit=limit,
        )
        selected = queue.Stream(
            self._redis,
            run=self._config.run.name,
            name="selected",
            record=SelectionRecord,
            limit=limit,
            idle_seconds=self._config.services.selection_timeout,
        )
        feed.clear()
        selected.clear()
        return feed, selected

    @contextmanager
    def _holding_the_stack(self) -> Iterator[None]:
        """Nobody else trains on this stack meanwhile; the hold ends soon after a crash."""
        # The path too: another directory may hold a run of the same name.
        name = f"{self._config.run.name} in {self.directory.path.resolve()}"
        queue.hold_stack(self._redis, name, self._owner, ttl=HOLD_TTL, taking_over=True)
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(HOLD_TTL / 3):
                try:
                    queue.hold_stack(self._redis, name, self._owner, ttl=HOLD_TTL)
                except (redis.RedisError, SolrlError) as error:
                    self._control.waiting_for(f"cannot renew the hold on the stack: {error}")

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            queue.release_stack(self._redis, name, self._owner)


def _split_wait(seconds: Seconds, waited: float, record: SelectionRecord) -> None:
    """Divide a wait for a selection between exploring and scoring as the gateway timed them."""
    total = record.seconds_explore + record.seconds_score
    share = record.seconds_score / total if total else 0.0
    seconds["explore"] = seconds.get("explore", 0.0) + waited * (1 - share)
    seconds["score"] = seconds.get("score", 0.0) + waited * share


def _true_contrast(group: Group) -> float:
    kept = tuple((i, c.selected_as) for i, c in enumerate(group.kept) if c.selected_as)
    return contrast(group.rewards, Selection(kept, ()))


def _mean(values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _json(value: Any) -> Any:
    """NaN is not JSON; an absent figure is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_prompts(config: Config) -> None:
    """Prompt files are read before anything starts; an unseen prompt must not be trained on."""
    both = set(read_prompts(config.prompts.train)) & set(read_prompts(config.prompts.unseen))
    if both:
        raise ConfigError(
            f"{len(both)} prompts are in both prompts.train and prompts.unseen, for example "
            f"{min(both)!r}"
        )
