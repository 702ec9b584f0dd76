"""Sends full models to one SGLang engine over a process group.

The sending rank is a separate process (`process_group_rank`), which is killed when anything takes
too long: its connections close, and an engine that waits for it continues. A dead engine breaks its
connection, or misses the deadline. So neither side waits longer than the timeouts here.
"""

import asyncio

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.inference.client import InferenceClient, Json, ServerError
from tinkercloud_worker.inference.weight_host import WeightHost, WeightSender
from tinkercloud_worker.inference.weights_folder import SavedWeights

NAME = "tinkercloud"
"""Name of the group in every engine."""
_RANK = "tinkercloud_worker.inference.sglang.process_group_rank"
_START_SECONDS = 120.0
"""Time for the sending rank to import torch, and listen."""
_STEP_SECONDS = 60.0
"""Time for all ranks to join, or for one part of a model to be sent and loaded."""
_RELEASE_SECONDS = 10.0
"""Time for an engine to report that the sending rank is gone."""


class SglangGroup:
    """A process group of a sending rank and all ranks of one engine. Belongs to one event loop."""

    def __init__(
        self, client: InferenceClient, backend: accelerator.Backend, host: WeightHost
    ) -> None:
        """Create a group without starting anything.

        Args:
            client: client of the engine.
            backend: communication backend.
            host: where the sending rank runs.
        """
        self._client = client
        self._backend = backend
        self._host = host
        self._rank: WeightSender | None = None

    async def join(self, ranks: int) -> None:
        """Create the process group, unless it exists.

        Args:
            ranks: number of ranks of the engine.

        Raises:
            InvalidRequest: the engine rejects it.
            ServerError: the engine or the sending rank failed.
            ServerUnreachable: the engine is unreachable.
        """
        if self._rank is not None and not await self._rank.has_ended():
            return
        try:
            await self.leave()
            await self._join(ranks)
        except OSError as error:
            await self.leave()
            raise ServerError(f"{self._purpose} failed: {error}") from None
        except BaseException:
            await self.leave()
            raise

    async def send(self, model: SavedWeights, most_bytes: int) -> None:
        """Send all tensors of a full model, between the begin and the end of an update.

        Args:
            model: the model.
            most_bytes: maximum size of a part, unless a single tensor is larger.

        Raises:
            NotFound: the weights do not exist any more.
            WeightHostLost: the machine with the weights was lost.
            InvalidRequest, ServerError, ServerUnreachable: as `join`. The group has ended then.
        """
        assert self._rank is not None  # noqa: S101 - both sides have joined
        rank = self._rank
        layout = {"group_name": NAME, "load_format": "flattened_bucket", "flush_cache": True}
        try:
            async with self._host.weights_of(model) as file:
                rank.send({"file": str(file), "most_bytes": most_bytes})
                # The sending rank reads and sends a part while the engine loads the previous one.
                while "names" in (part := await rank.receive(_STEP_SECONDS)):
                    await self._ask(rank, "/update_weights_from_distributed", {**part, **layout})
        except (InvalidRequest, ServerError) as error:
            await self.leave()
            raise type(error)(f"{error.message}{self._versions}") from None
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """End the sending rank. The engine's ranks leave the group at the next `join`."""
        rank, self._rank = self._rank, None
        if rank is not None:
            await rank.kill()

    async def close(self) -> None:
        """End the group on both sides, if the engine can be reached."""
        if self._rank is None:
            return
        try:
            await self._disband()
        except (InvalidRequest, ServerError):
            pass
        finally:
            await self.leave()

    @property
    def _versions(self) -> str:
        """Hint for error messages: NCCL rejects ranks of another version when they join."""
        ours = accelerator.required_version(self._backend)
        if ours is None:
            return ""
        return f" (NCCL here is {ours}; the engine must have the same version)"

    @property
    def _purpose(self) -> str:
        return f"the process group with {self._client.url}"

    async def _join(self, ranks: int) -> None:
        await self._disband()
        address = await self._host.address_towards(self._client.url)
        self._rank = rank = await self._start(address, 1 + ranks)
        port = (await rank.receive(_START_SECONDS))["port"]
        await self._ask(
            rank,
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1,
                "world_size": 1 + ranks,
                "group_name": NAME,
                "backend": self._backend,
            },
        )
        message = await rank.receive(_STEP_SECONDS)
        assert "joined" in message, message  # noqa: S101 - our own program

    async def _start(self, address: str, size: int) -> WeightSender:
        options = {
            "--backend": self._backend,
            "--address": address,
            "--world-size": str(size),
            "--group-name": NAME,
            "--seconds": str(_STEP_SECONDS),
        }
        return await self._host.start(_RANK, options, self._purpose)

    async def _disband(self) -> None:
        """Make the engine leave the group, which may be that of an earlier head."""
        body = {"group_name": NAME}
        try:
            await self._client.post("/destroy_weights_update_group", body, seconds=_RELEASE_SECONDS)
        except InvalidRequest as error:
            if "does not exist" not in error.message:
                raise

    async def _ask(self, rank: WeightSender, path: str, body: Json) -> None:
        """Run the engine's side of an operation; end the sending rank at the deadline."""
        longest = _STEP_SECONDS + _RELEASE_SECONDS
        call = asyncio.create_task(self._client.post(path, body, seconds=longest))
        try:
            await asyncio.wait({call}, timeout=_STEP_SECONDS)
            if call.done():
                await call
                return
            await self.leave()
            await call
        finally:
            call.cancel()
        raise rank.failure(f"{path} took longer than {_STEP_SECONDS:.0f} s")
