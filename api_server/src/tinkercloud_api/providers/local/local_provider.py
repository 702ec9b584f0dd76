"""Session heads as child processes of this server: one per base model, shared by all runs."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import (
    HeadEndpoint,
    Pending,
    Placement,
    RecordReport,
    ServedModel,
    SessionProvider,
    unknown_base_model,
)
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.providers.local.local_head import LocalHead
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound


class LocalProvider(SessionProvider):
    """Session heads that all runs of a base model share, and that this process starts."""

    def __init__(self, models: list[ServedModel], settings: Settings) -> None:
        self._models = {model.name: model for model in models}
        self._settings = settings
        self._client: aiohttp.ClientSession | None = None
        self._record_report: RecordReport | None = None
        self._heads: dict[str, LocalHead] = {}
        self._tenants = tuple(Tenant(name, spec) for name, spec in settings.tenants.items())

    async def start(self, record_report: RecordReport) -> None:
        """See `SessionProvider.start`."""
        self._client, self._record_report = open_client(), record_report
        try:
            for model in self.models():
                await self.add_model(model)
        except BaseException:
            await self.stop()
            raise

    async def add_model(self, model: ServedModel) -> None:
        """Serve another base model from now on; load one again that has failed to load.

        Raises:
            HeadFailed: it has failed just now, and is not tried again yet.
        """
        head = self._heads.get(model.name)
        if head is None:
            client, record_report = self._client, self._record_report
            assert client is not None and record_report is not None  # noqa: S101, PT018 - `start`
            head = LocalHead(model, self._settings, client, record_report)
            await head.adopt()
            limited = replace(model, max_lora_rank=self._settings.limits.max_lora_rank)
            self._models[model.name], self._heads[model.name] = limited, head
        if self._settings.preload:
            head.begin_start()

    async def remove_model(self, name: str) -> None:
        """Serve a base model no longer, and free its memory. This is idempotent."""
        # Runs are refused at once, and the head is forgotten only when it has ended.
        model = self._models.pop(name, None)
        if (head := self._heads.get(name)) is None:
            return
        try:
            await head.remove()
        except BaseException:
            if model is not None:
                self._models[name] = model
            raise
        del self._heads[name]

    async def stop(self) -> None:
        """See `SessionProvider.stop`."""
        try:
            await asyncio.gather(*[head.stop() for head in self._heads.values()])
        finally:
            if self._client is not None:
                await self._client.close()

    def models(self) -> list[ServedModel]:
        """See `SessionProvider.models`."""
        return list(self._models.values())

    def tenants(self) -> Sequence[Tenant]:
        """See `SessionProvider.tenants`."""
        return self._tenants

    async def admit(self, placement: Placement) -> ModelSpec:
        """See `SessionProvider.admit`. Options for pods have no effect here and are rejected."""
        assert placement.model is not None  # noqa: S101 - only runs are admitted
        if keys := placement.options.set_keys():
            raise InvalidRequest(
                f"{', '.join(keys)}: only supported on Kubernetes; remove the option from tags"
                " and user_metadata"
            )
        return placement.model

    def find(self, placement: Placement) -> HeadEndpoint | None:
        """See `SessionProvider.find`."""
        head = self._heads.get(placement.base_model)
        return head.endpoint if head is not None else None

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        """See `SessionProvider.acquire`."""
        head = self._heads.get(placement.base_model)
        if head is None:
            raise NotFound(unknown_base_model(placement.base_model, self.models()))
        return await head.acquire()

    def pending(self, placement: Placement) -> Pending:
        """See `SessionProvider.pending`."""
        which = f"the session head of {placement.base_model!r}"
        head = self._heads.get(placement.base_model)
        if head is not None and head.endpoint is not None:
            return Pending("active", f"{which} creates the run, or reads its saved state")
        reason = f"{which} is loading the model"
        if head is not None:
            reason = f"{reason} {head.progress()}"
        return Pending("paused_capacity", reason)

    def state_of(self, model: ServedModel) -> str | None:
        """See `SessionProvider.state_of`."""
        head = self._heads.get(model.name)
        return head.state() if head is not None else None

    def shared_heads(self) -> list[HeadEndpoint]:
        """See `SessionProvider.shared_heads`: all local heads are shared."""
        return [head.endpoint for head in self._heads.values() if head.endpoint is not None]

    def has_ended(self, placement: Placement, generation: str) -> bool:
        """See `SessionProvider.has_ended`."""
        endpoint = self.find(placement)
        # The endpoint is set until the head's last process has ended.
        return endpoint is None or endpoint.generation != generation

    def unsaved(self, placement: Placement) -> Path | None:
        """See `SessionProvider.unsaved`."""
        head = self._heads.get(placement.base_model)
        return head.unsaved if head is not None else None

    def journals(self, placement: Placement) -> Path | None:
        """See `SessionProvider.journals`."""
        head = self._heads.get(placement.base_model)
        return head.journals if head is not None else None

    def newly_ended(self) -> list[str]:
        """See `SessionProvider.newly_ended`."""
        ended = [generation for head in self._heads.values() for generation in head.newly_ended]
        for head in self._heads.values():
            head.newly_ended.clear()
        return ended
