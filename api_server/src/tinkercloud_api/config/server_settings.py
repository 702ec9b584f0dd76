"""The settings of the last server of a state folder, as a file that another server can start with.

`settings.toml` has what was set by argument, variable or file, without secrets. It is a valid
TINKERCLOUD_CONFIG_FILE.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from tinkercloud_api.config.settings import Settings

FILE = "settings.toml"
_LEFT_OUT = "# left out: "
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NOT_PORTABLE = ("state_dir",)
"""Settings that a restored server has to have of its own."""


def write(state_dir: Path, settings: Settings) -> None:
    """Record the settings of a server in its state folder.

    Raises:
        OSError: the file can't be written.
    """
    staged = state_dir / f"{FILE}.new"
    staged.write_text(render(settings))
    staged.replace(state_dir / FILE)


def render(settings: Settings) -> str:
    """Return settings as TOML; a comment names those that are left out."""
    left_out = [*_secrets(settings), *(set(_NOT_PORTABLE) & settings.model_fields_set)]
    shown = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    for path in left_out:
        *tables, name = path.split(".")
        values = shown
        for table in tables:
            values = values[table]
        values.pop(name, None)
    lines = [f"{_LEFT_OUT}{', '.join(sorted(left_out))}"] if left_out else []
    lines += [f"{_key(name)} = {_value(value)}" for name, value in shown.items()]
    return "".join(f"{line}\n" for line in lines)


def left_out(text: str) -> list[str]:
    """Return the names of the settings that `render` has left out of a text."""
    named = [line for line in text.splitlines() if line.startswith(_LEFT_OUT)]
    return named[0].removeprefix(_LEFT_OUT).split(", ") if named else []


def checkpoint_root(text: str) -> str | None:
    """Return the setting `checkpoint_root` in a text of `render`; None if it is not set."""
    found = tomllib.loads(text).get("checkpoint_root")
    return found if isinstance(found, str) else None


def models(text: str) -> dict[str, str]:
    """Return the setting `models` in a text of `render`."""
    return dict(tomllib.loads(text).get("models", {}))


def _secrets(model: BaseModel) -> Iterator[str]:
    """Yield the names of the secrets that are set, such as `downloads.signing_key`."""
    for name in sorted(model.model_fields_set):
        value = getattr(model, name)
        if isinstance(value, SecretStr):
            yield name
        elif isinstance(value, BaseModel):
            yield from (f"{name}.{inner}" for inner in _secrets(value))


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a JSON value as TOML on one line."""
    if isinstance(value, Mapping):
        entries = [f"{_key(name)} = {_value(each)}" for name, each in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # JSON's strings, numbers and booleans are TOML's, except for escaped surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value(name)
