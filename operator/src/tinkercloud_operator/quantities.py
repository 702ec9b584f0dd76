"""Kubernetes quantities as numbers."""

_FACTORS = {
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


def parse_quantity(text: str | int | float) -> float:
    """Return a quantity's value: cores, bytes, or a count.

    Raises:
        ValueError: it is not a quantity.
    """
    text = str(text)
    suffix = text.lstrip("0123456789.+-eE") if text[-1:].isalpha() else ""
    if suffix == "" and text.endswith("E"):
        suffix = "E"
    return float(text.removesuffix(suffix)) * _FACTORS.get(suffix, 1.0)
