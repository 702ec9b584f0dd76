"""Providers of session heads that tests control."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinkercloud_api.providers.base import (
    FailingCondition,
    HeadEnd,
    HeadEndpoint,
    Pending,
    Placement,
    RecordReport,
    ServedModel,
)
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.responses.listings import GpuUse, PoolUse
from tinkercloud_protocol.wire.errors import WireError


class OneHead:
    """A provider (`providers.base.SessionProvider`) that returns a fixed head."""

    def __init__(self) -> None:
        self.endpoint: HeadEndpoint | None = None
        self.placed: frozenset[str] | None = None
        """Runs that have a place on the head."""
        self.gone: set[str] = set()
        """Runs whose head was permanently removed."""
        self.ends: dict[str, HeadEnd] = {}
        self.conditions: list[FailingCondition] = []
        self.of_tenants: Sequence[Tenant] = ()

    async def start(self, record_report: RecordReport) -> None: ...

    async def stop(self) -> None: ...

    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 512)]

    def tenants(self) -> Sequence[Tenant]:
        return self.of_tenants

    async def admit(self, placement: Placement) -> ModelSpec:
        assert placement.model is not None
        return placement.model

    def find(self, _placement: Placement) -> HeadEndpoint | None:
        return self.endpoint

    async def acquire(self, _placement: Placement) -> HeadEndpoint:
        assert self.endpoint is not None
        return self.endpoint

    async def changed(self, _placement: Placement) -> None: ...

    async def confirm(self, _placement: Placement) -> None: ...

    def pending(self, _placement: Placement) -> Pending:
        return Pending("active", "no reason")

    def state_of(self, _model: ServedModel) -> str | None:
        return None

    def failing_conditions(self) -> list[FailingCondition]:
        return self.conditions

    def pools(self) -> Mapping[str, PoolUse]:
        return {}

    def gpus_of(self, _model: ServedModel) -> GpuUse | None:
        return None

    def clusters(self) -> Mapping[str, str]:
        return {}

    def clusters_of_heads(self) -> Mapping[HeadEndpoint, str]:
        return {}

    def shared_heads(self) -> list[HeadEndpoint]:
        return [self.endpoint] if self.endpoint is not None else []

    def heads_of(self, _owner: str) -> list[HeadEndpoint]:
        return self.shared_heads()

    def placed_on(self, _endpoint: HeadEndpoint) -> frozenset[str] | None:
        return self.placed

    def has_own_head(self, _placement: Placement) -> bool:
        return False

    def end_of(self, placement: Placement) -> HeadEnd | None:
        return self.ends.get(placement.target)

    def runs(self) -> list[str]:
        return []

    def degraded(self) -> Mapping[str, str]:
        return {}

    async def is_gone(self, placement: Placement) -> bool:
        return placement.target in self.gone

    def has_ended(self, _placement: Placement, _generation: str) -> bool:
        return False

    def journals(self, _placement: Placement) -> Path | None:
        return None

    def may_have_journals(self, _placement: Placement) -> bool:
        return False

    def unsaved(self, _placement: Placement) -> Path | None:
        return None

    def newly_ended(self) -> list[str]:
        return []

    def invalidate(self, endpoint: HeadEndpoint) -> None: ...

    async def release(self, _placement: Placement) -> None: ...


class LoadingHead(OneHead):
    """A provider whose head loads until the test says that it is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = asyncio.Event()
        self.failure: WireError | None = None
        """Why the head can't start."""
        self.num_failures = 0

    def find(self, _placement: Placement) -> HeadEndpoint | None:
        return self.endpoint if self.ready.is_set() and self.failure is None else None

    async def acquire(self, _placement: Placement) -> HeadEndpoint:
        await self.ready.wait()
        if self.failure is not None:
            self.num_failures += 1
            raise self.failure
        assert self.endpoint is not None
        return self.endpoint

    def pending(self, _placement: Placement) -> Pending:
        return Pending("paused_capacity", "the model is loading")
