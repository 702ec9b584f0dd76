"""What the memory of a trainer's device holds, and which models follow from that to be admitted.

What models take is known exactly; what passes take in addition is measured. A report is plain
numbers, so that those of several ranks can be compared in the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tinkercloud_protocol.heads.capacity import HeadCapacity, bytes_at_first, swapped_bytes

BYTES_PER_PARAMETER = 16
"""Bytes of memory per trained parameter: weight, gradient and two moments in float32."""
KEPT_FREE_BYTES = 256 << 20
"""Bytes that new models leave free for passes and sampling, at least."""
_UNLIMITED = 1 << 62
"""More bytes than any device has."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The sizes of one model on one device, in bytes."""

    full: int
    """What it takes once it has moments."""
    held: int
    """What it takes on the device, or would take there, with `promised`."""
    promised: int
    """What it will allocate but may not have allocated yet."""
    kept: int | None
    """What it takes outside the device; None: it is on the device."""
    can_leave: bool
    """Whether it can be paged out."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of one device that models share."""

    available: int | None
    """Bytes that can still be allocated; None if unknown: then nothing is limited."""
    pass_bytes: int
    """The most that recent passes have allocated in addition; 0 if unknown."""
    has_place: bool
    """Whether idle models have a place to go to."""
    place_free: int | None
    """Bytes that are left in that place; None if unknown."""
    models: Mapping[str, ModelBytes]
    """The models by id."""

    @property
    def promised(self) -> int:
        """Bytes that the models on the device will allocate."""
        return sum(model.promised for model in self.models.values() if model.kept is None)

    @property
    def num_loaded(self) -> int:
        """Number of models on the device."""
        return sum(model.kept is None for model in self.models.values())

    @property
    def room(self) -> int:
        """Bytes for more models, in addition to those that are on the device."""
        if self.available is None:
            return _UNLIMITED
        return self.available - self.promised - KEPT_FREE_BYTES

    def missing(self, size: int) -> int:
        """Return by how many bytes the device falls short of a size; 0 or less if it fits."""
        return size - self.room

    @property
    def kept_for_passes(self) -> int:
        """Bytes that a new model leaves free beyond those that it always does."""
        return max(0, self.pass_bytes - KEPT_FREE_BYTES)

    def needed_for(self, parameters: int) -> int:
        """Return the bytes that must be free for a new model with this many parameters.

        Models that are here may return even if the largest pass then has too little memory.
        """
        return parameters * BYTES_PER_PARAMETER + self.kept_for_passes

    def missing_to_swap(self, parameters: int) -> int:
        """Return how many bytes the place lacks once there is a new model, whichever is used then.

        Otherwise a model that is here could not return for the rest of a request.

        Args:
            parameters: the number of parameters of the new model.

        Returns:
            The bytes; 0 or less if any model can be paged in, at any time.
        """
        if not self.has_place or not self.models:
            return 0
        size = bytes_at_first(parameters * BYTES_PER_PARAMETER)
        excess, place = size + self.left - self.room, self.place_bytes
        if excess <= 0 or place is None:
            return 0
        largest = max([size, *self._sizes_that_move])
        return swapped_bytes(excess, largest) - place

    @property
    def _sizes_that_move(self) -> list[int]:
        """Bytes of each model that is away or may leave. What always stays needs no place."""
        return [
            model.full
            for model in self.models.values()
            if model.can_leave or model.kept is not None
        ]

    def refusal(self, parameters: int, kind: str, smaller: str, where: str = "") -> str:
        """Return why a new model is refused, with the numbers.

        Args:
            parameters: the number of its parameters on this device.
            kind: what it is.
            smaller: what to request instead.
            where: which device this is, after a space, if there are several.
        """
        takes, loaded = parameters * BYTES_PER_PARAMETER, self.num_loaded
        to_swap = self.missing_to_swap(parameters)
        note = f"; {to_swap} bytes are missing where idle models are kept" if to_swap > 0 else ""
        free = max(self.room - self.kept_for_passes, 0)
        return (
            f"lora_config: {kind} has {parameters} parameters{where} and takes {takes} bytes"
            f" (weights, gradient and moments in float32), but {free} bytes"
            f" are free: of {self.available} available bytes, {self.promised} are"
            f" reserved for the {loaded} models loaded here and"
            f" {KEPT_FREE_BYTES + self.kept_for_passes} are kept free for passes"
            f"{note}; end unused sessions, or request {smaller}"
        )

    def capacity(self) -> HeadCapacity | None:
        """Return how many models fit; None if nothing limits them."""
        if self.available is None:
            return None
        sizes = self._sizes_that_move or [model.full for model in self.models.values()]
        largest = max(sizes, default=0)
        free = max(0, self.room - self.kept_for_passes)
        measured = HeadCapacity(
            models=self.num_loaded,
            model_bytes=largest,
            pass_bytes=self.pass_bytes,
            free_bytes=free,
            held=tuple(self.models),
            with_idle_bytes=self.room - self.left if self.has_place else None,
            swap_bytes=self.place_bytes,
            device_bytes=self._without_idle if self.has_place else None,
        )
        more = measured.more_of(largest) if largest else None
        return replace(measured, more_models=more)

    @property
    def left(self) -> int:
        """Bytes that the models that are out would take on the device."""
        return sum(model.held for model in self.models.values() if model.kept is not None)

    @property
    def _without_idle(self) -> int:
        """Bytes for a new model if all models that can leave have left."""
        can_leave = (each for each in self.models.values() if each.kept is None and each.can_leave)
        return self.room + sum(each.held for each in can_leave) - self.kept_for_passes

    @property
    def place_bytes(self) -> int | None:
        """Bytes of the place of idle models, taken or free; None if they are not limited."""
        if self.place_free is None:
            return None
        return self.place_free + sum(model.kept or 0 for model in self.models.values())


def returning_refusal(name: str, missing: int) -> str:
    """Return why a model that was paged out can't return, with the bytes that are missing."""
    return (
        f"model {name} was unloaded while idle; loading it again needs {missing} more"
        " bytes, which other models occupy: send the request again later, or end unused"
        " sessions"
    )


def failed_return(name: str, rank: int) -> str:
    """Return why a model that was paged out stays out, although a rank seemed to have room."""
    return (
        f"model {name} was unloaded while idle, and rank {rank} of the trainer could not allocate"
        " memory for it: send the request again later, or end unused sessions"
    )
