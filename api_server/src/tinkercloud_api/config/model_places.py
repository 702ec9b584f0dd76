"""The places of models, as users write them: a folder, or the id of a model."""

from pathlib import Path


class PlaceError(Exception):
    """A place can be no folder that this program reads; the message says why and what to do."""


def folder_at(where: str) -> Path | None:
    """Return the folder that a place names, or None if it names none.

    Raises:
        PlaceError: it is unknown whether it names one.
    """
    try:
        folder = Path(where).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError) as error:
        # No permission, a name that is too long, or `~` of an unknown user.
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise PlaceError(
            f"{where!r} cannot be read ({reason}); pass a folder that the user of this program may"
            " read, or a model id"
        ) from None


def absolute(where: str) -> str:
    """Return the absolute path of a folder; a model id is returned unchanged.

    Raises:
        PlaceError: it is unknown whether the place names a folder.
    """
    folder = folder_at(where)
    return where if folder is None else str(folder.absolute())
