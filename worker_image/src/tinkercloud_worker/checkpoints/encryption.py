"""Encrypts files with age (https://age-encryption.org) for the holders of public keys."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType

import pyrage

from tinkercloud_protocol.heads.checkpoint_manifest import ENCRYPTED_SUFFIX
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.checkpoints.formats import Files

_FIELD = "age_encryption_recipients"
_SECRET = "AGE-SECRET-KEY-"  # noqa: S105 - how secret keys begin, not one of them
_PART_BYTES = 256 << 10

Recipient = NewType("Recipient", object)
"""A public key of either kind, as the library reads it."""


def parse_recipients(keys: Sequence[str]) -> list[Recipient]:
    """Read public keys: age's own, or SSH keys of type ed25519 or rsa.

    Raises:
        InvalidRequest: one is invalid. The message shows its position only, as it may be a secret
            key that was sent by mistake.
    """
    return [_parse(index, key.strip()) for index, key in enumerate(keys)]


def _parse(index: int, key: str) -> Recipient:
    if key.upper().startswith(_SECRET):
        raise InvalidRequest(
            f"{_FIELD}.{index}: is a secret key; send its public key (age1...), and replace the"
            " secret key, which has left your machine"
        )
    kind = pyrage.ssh.Recipient if key.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return Recipient(kind.from_str(key))
    except pyrage.RecipientError as error:
        raise InvalidRequest(
            f"{_FIELD}.{index}: is not a public key of age ({error}); send one that begins with"
            " age1, or an SSH public key of type ssh-ed25519 or ssh-rsa"
        ) from None


def encrypted(encode: Callable[[], Files], recipients: Sequence[Recipient]) -> Files:
    """Return encoded files, each encrypted so that every recipient can decrypt it.

    Each unencrypted file is freed once it is encrypted.

    Args:
        encode: returns the files by name.
        recipients: one or more public keys.
    """
    plain, files = encode(), {}
    for name in list(plain):
        source, target = _Source(memoryview(plain.pop(name))), io.BytesIO()
        pyrage.encrypt_io(source, _Target(target), recipients)
        # Not a copy: CPython returns the internal buffer.
        files[f"{name}{ENCRYPTED_SUFFIX}"] = target.getvalue()
    return files


# The library holds the GIL. These classes are written in Python so that other threads can run
# whenever it reads or writes a part.


@dataclass(slots=True)
class _Source:
    content: memoryview
    position: int = 0

    def read(self, size: int = -1) -> bytes:
        size = _PART_BYTES if size < 0 else min(size, _PART_BYTES)
        part = bytes(self.content[self.position : self.position + size])
        self.position += len(part)
        return part


@dataclass(slots=True)
class _Target:
    file: io.BytesIO

    def write(self, part: bytes) -> int:
        return self.file.write(part)

    def flush(self) -> None:
        pass
