"""Checks an imported `adapter_model.safetensors` while it is received: its header, and each value.

IEEE 754 and bfloat16: a value is NaN or infinite if all bits of its exponent are set. The bits are
looked up a byte at a time, so that the API server needs no library for tensors.
"""

from collections.abc import Sequence

from tinkercloud_protocol.adapters import peft
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest


def _marks(mask: int) -> bytes:
    """Return a table that maps a byte to 1 if all bits of a mask are set, else to 0."""
    return bytes(int(byte & mask == mask) for byte in range(256))


_EXPONENTS = {"F32": (_marks(0x7F), _marks(0x80)), "BF16": (_marks(0x7F), _marks(0x80))}
"""Bits of the exponent in the last byte of a little-endian value, and in the one before it."""
_HALF_EXPONENT = _marks(0x7C)
"""The same in the last byte of an F16; it has no others."""


def is_finite(content: bytes, dtype: str) -> bool:
    """Return whether all values are finite.

    Args:
        content: whole values, little-endian.
        dtype: their dtype, a key of `peft.ITEM_BYTES`.
    """
    item = peft.ITEM_BYTES[dtype]
    last = content[item - 1 :: item]
    if dtype == "F16":
        return 1 not in last.translate(_HALF_EXPONENT)
    upper, lower = _EXPONENTS[dtype]
    marked = last.translate(upper)
    if 1 not in marked:
        return True
    rest = content[item - 2 :: item].translate(lower)
    return not int.from_bytes(marked, "little") & int.from_bytes(rest, "little")


class AdapterFile:
    """An adapter's file that arrives in parts. A part of any size takes as much memory."""

    def __init__(self, size_bytes: int, rank: int) -> None:
        """Start before the first byte.

        Args:
            size_bytes: size of the whole file.
            rank: rank according to the configuration.
        """
        self._size = size_bytes
        self._rank = rank
        self._start = bytearray()
        self._tensors: Sequence[tuple[str, str, Sequence[int], range]] = ()
        self._number = self._place = 0
        """The tensor of the next byte, and the place of that byte."""
        self._rest = b""
        """The first bytes of a value whose others are in the next part."""
        self.lora: LoraConfig | None = None
        """Configuration of the adapter, once its header has arrived."""

    def add(self, part: bytes) -> bytes:
        """Check the next part; return the bytes that may be stored.

        These are the part, or nothing until the header has been checked.

        Raises:
            InvalidRequest: the file is not a LoRA adapter of this size and rank, or a value is NaN
                or infinite.
        """
        if self.lora is not None:
            self._check(part)
            return part
        self._start += part
        if len(self._start) < peft.LENGTH_BYTES:
            return b""
        end = peft.header_bytes(bytes(self._start[: peft.LENGTH_BYTES]))
        if len(self._start) < end:
            return b""
        whole, self._start = bytes(self._start), bytearray()
        self.lora = peft.read_header(whole[:end], self._size, self._rank)
        self._tensors = peft.tensors_of(whole[:end])
        self._check(whole[end:])
        return whole

    def _check(self, part: bytes) -> None:
        view = memoryview(part)
        while view:
            name, dtype, _, place = self._tensors[self._number]
            if self._place == place.stop:
                self._number += 1
                continue
            taken = view[: place.stop - self._place]
            view = view[len(taken) :]
            self._place += len(taken)
            content = self._rest + bytes(taken)
            whole = len(content) - len(content) % peft.ITEM_BYTES[dtype]
            self._rest = content[whole:]
            if not is_finite(content[:whole], dtype):
                raise InvalidRequest(
                    f"adapter_model.safetensors: {name!r} has values that are NaN or infinite; the"
                    " adapter would make every result NaN. Import a checkpoint from before that"
                )
