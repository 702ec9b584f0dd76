"""Fingerprints of base models, which manifests record and heads report."""

from dataclasses import dataclass, fields

_VERSION = "1"


@dataclass(frozen=True, slots=True)
class BaseFingerprint:
    """Identifies a base model independently of its name and location."""

    config: str
    """Hexadecimal digest of the fields that determine how the model computes."""
    weights: str
    """Hexadecimal digest of the names, shapes, dtypes and sampled values of all tensors."""

    @classmethod
    def parse(cls, text: str) -> "BaseFingerprint | None":
        """Parse the output of `str`; return None for other versions, which cannot be compared."""
        version, *digests = text.split(":")
        known = version == _VERSION and len(digests) == len(fields(cls))
        return cls(*digests) if known else None

    def __str__(self) -> str:
        return f"{_VERSION}:{self.config}:{self.weights}"
