"""Fingerprints of base models, as manifests record them and heads report them."""

from dataclasses import dataclass, fields

_VERSION = "1"


@dataclass(frozen=True, slots=True)
class BaseFingerprint:
    """Tells base models apart, whatever they are called and wherever their files are."""

    config: str
    """Hexadecimal digest of the fields that say how the model computes."""
    weights: str
    """Hexadecimal digest of names, shapes, dtypes and samples of the values of all tensors."""

    @classmethod
    def parse(cls, text: str) -> "BaseFingerprint | None":
        """Read what `str` wrote; None if another version wrote it, which can't be compared."""
        version, *digests = text.split(":")
        known = version == _VERSION and len(digests) == len(fields(cls))
        return cls(*digests) if known else None

    def __str__(self) -> str:
        return f"{_VERSION}:{self.config}:{self.weights}"
