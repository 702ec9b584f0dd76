"""Parsers for quantities and times in Kubernetes' formats."""

import re

_FACTORS = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}


_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_QUANTITY = re.compile(rf"({_NUMBER})({'|'.join(_FACTORS)})?")


def parse_quantity(text: str | int | float) -> float:
    """Return the value of a quantity: cores, bytes, or a count.

    Raises:
        ValueError: it is not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity; expected e.g. 2, 500m or 4Gi")
    number, suffix = match.groups()
    return float(number) * (_FACTORS[suffix] if suffix is not None else 1.0)
