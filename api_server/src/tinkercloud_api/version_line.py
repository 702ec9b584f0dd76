"""What `tinkercloud --version` prints."""

from importlib.metadata import version


def version_line() -> str:
    """Return the name and the version of this program."""
    return f"tinkercloud {version('tinkercloud-api')}"
