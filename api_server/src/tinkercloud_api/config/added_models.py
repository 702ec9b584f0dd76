"""The base models that were added to a running server, as a file that its next start reads.

`models.json` in the state folder maps the name of each to its folder or model id, like the setting
`models`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "models.json"


class AddedModelsError(Exception):
    """The file can't be read or written; the message says why and what to do."""


def read(state_dir: Path) -> dict[str, str]:
    """Return where each added model is, by its name.

    Raises:
        AddedModelsError: the file can't be read.
    """
    file = state_dir / FILE
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        # An unusable state folder is reported as such.
        return {}
    except (OSError, ValueError) as error:
        raise AddedModelsError(f"{file} can't be read ({error}); {_REMEDY}") from None
    if not isinstance(content, dict) or not all(isinstance(at, str) for at in content.values()):
        raise AddedModelsError(f"{file} is no JSON object of names and folders; {_REMEDY}")
    return content


def write(state_dir: Path, models: Mapping[str, str]) -> None:
    """Record the added models.

    Raises:
        AddedModelsError: the file can't be written.
    """
    staged = state_dir / f"{FILE}.new"
    try:
        staged.write_text(json.dumps(models, indent=2, ensure_ascii=False))
        staged.replace(state_dir / FILE)
    except OSError as error:
        raise AddedModelsError(
            f"{state_dir / FILE} can't be written ({error}), so the next start would not know the"
            " change; repair the disk, then repeat the command"
        ) from None


_REMEDY = "repair or delete it, then add the models again (`tinkercloud models add`)"
