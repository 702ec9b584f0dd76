"""The models of a head: the state of each, and what belongs to that state."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelPlace, ModelState, after

_WITHOUT_ROUTES = frozenset({ModelState.NEW, ModelState.LIVE, ModelState.WRITTEN})
"""States in memory in which requests for sampling sessions do not wait for the model."""


@dataclass(frozen=True, slots=True)
class SuspendedModel:
    """The record of a suspended model in a head's memory."""

    spec: ModelSpec
    sessions: frozenset[str]
    """Sampling sessions of the model's own weights, which are restored with it."""
    manifest: SuspendedManifest


@dataclass(slots=True)
class _Entry:
    """A model that is not absent."""

    state: ModelState
    stored: SuspendedModel | None = None
    task: asyncio.Task[Any] | None = None
    refused_since: float = 0.0


class ModelRegistry:
    """Holds the state of each model by the table of `model_lifetime`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        """The models that are not absent; of one place, the one that came there first is first."""
        self._live: dict[str, LiveModel] = {}
        self.in_memory: Mapping[str, LiveModel] = MappingProxyType(self._live)
        """The models in memory by id, as they change."""
        self._models_of: dict[str, str] = {}
        """By sampling session whose requests wait for a model, or are refused as it was moved."""

    def state(self, name: str) -> ModelState:
        """Return the state of a model, which may be unknown."""
        entry = self._entries.get(name)
        return entry.state if entry is not None else ModelState.ABSENT

    def names(self, place: ModelPlace) -> list[str]:
        """Return the models of a place, the one that came there first at the beginning."""
        return [name for name, each in self._entries.items() if each.state.place is place]

    def of_owner(self, owner: str) -> list[LiveModel]:
        """Return the models of an owner that are in memory."""
        return [model for model in self._live.values() if model.spec.owner == owner]

    def stored(self, name: str) -> SuspendedModel | None:
        """Return the state of a model that this head has written and can resume or take back."""
        entry = self._entries.get(name)
        return entry.stored if entry is not None else None

    def task(self, name: str) -> asyncio.Task[Any] | None:
        """Return the task that ends the state of a model; None if none runs."""
        entry = self._entries.get(name)
        task = entry.task if entry is not None else None
        return None if task is None or task.done() else task

    def tasks(self, *states: ModelState) -> set[asyncio.Task[Any]]:
        """Return the running tasks of all models that are in these states."""
        names = [name for name, each in self._entries.items() if each.state in states]
        return {task for name in names if (task := self.task(name)) is not None}

    def start(self, name: str, task: asyncio.Task[Any]) -> None:
        """Record the task that ends the state of a model."""
        self._entries[name].task = task

    def add(self, name: str, event: ModelEvent, model: LiveModel) -> None:
        """Change the state of a model that comes into memory.

        Raises:
            ImpossibleTransition: the event can't happen in the model's state.
        """
        self.apply(name, event)
        self._live[name] = model

    def store(self, name: str, suspended: SuspendedModel) -> None:
        """Record that the state of a model was written, and that its memory is being freed.

        Raises:
            ImpossibleTransition: the model was not being written.
        """
        self.apply(name, ModelEvent.STORED)
        self._entries[name].stored = suspended

    def refuse(self, name: str, now: float) -> None:
        """Refuse a model that is moved before it has arrived.

        Raises:
            ImpossibleTransition: the head has the model.
        """
        self.apply(name, ModelEvent.REFUSE)
        self._entries[name].refused_since = now

    def refused_since(self, name: str) -> float:
        """Return when a refused model was moved."""
        return self._entries[name].refused_since

    def apply(self, name: str, event: ModelEvent) -> None:
        """Change the state of a model after an event.

        Raises:
            ImpossibleTransition: the event can't happen in the model's state.
        """
        before = self.state(name)
        state = after(before, event)
        if state is ModelState.ABSENT:
            del self._entries[name]
        elif (entry := self._entries.get(name)) is None:
            entry = self._entries[name] = _Entry(state)
        else:
            entry.state = state
            if state.place is not before.place:
                self._entries[name] = self._entries.pop(name)
            if state.place in {ModelPlace.MEMORY, ModelPlace.NOWHERE}:
                entry.stored = None
        if state.place is not ModelPlace.MEMORY:
            self._live.pop(name, None)
        if state.place is ModelPlace.NOWHERE or state in _WITHOUT_ROUTES:
            for session in [each for each, model in self._models_of.items() if model == name]:
                del self._models_of[session]

    def route(self, sessions: Iterable[str], name: str) -> None:
        """Let requests for the sampling sessions of a model wait for it."""
        self._models_of.update(dict.fromkeys(sessions, name))

    def model_of(self, target: str) -> str:
        """Return the model that requests for a target wait for: a sampling session, or a model."""
        return self._models_of.get(target, target)

    def forget_moved(self, limit: int) -> None:
        """Forget the models that were moved earliest, beyond a number of them."""
        moved = self.names(ModelPlace.ELSEWHERE)
        for name in moved[: max(0, len(moved) - limit)]:
            if self.task(name) is None:
                self.apply(name, ModelEvent.FORGET)
