"""Providers of session heads that tests control."""

from pathlib import Path

from tinkercloud_api.providers.base import HeadRoute, Placement, ServedModel, Waiting
from tinkercloud_protocol.launch import ModelSpec


class OneHead:
    """A provider (`providers.base.SessionProvider`) that returns a fixed head."""

    def __init__(self) -> None:
        self.route: HeadRoute | None = None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 512)]

    async def admit(self, placement: Placement) -> ModelSpec:
        assert placement.model is not None
        return placement.model

    def find(self, _placement: Placement) -> HeadRoute | None:
        return self.route

    async def acquire(self, _placement: Placement) -> HeadRoute:
        assert self.route is not None
        return self.route

    def waiting(self, _placement: Placement) -> Waiting:
        return Waiting("active", "no reason")

    def shared_heads(self) -> list[HeadRoute]:
        return [self.route] if self.route is not None else []

    def runs(self) -> list[str]:
        return []

    async def is_gone(self, _placement: Placement) -> bool:
        return False

    def has_ended(self, _placement: Placement, _generation: str) -> bool:
        return False

    def unsaved(self, _placement: Placement) -> Path | None:
        return None

    def newly_ended(self) -> list[str]:
        return []

    def mistrust(self, route: HeadRoute) -> None: ...

    async def release(self, _placement: Placement) -> None: ...
