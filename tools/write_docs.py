"""Write the pages of docs/ that are derived from the code; with --check, only compare.

docs/configuration.md      from `tinkercloud_api.settings.Settings`
"""

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tinkercloud_api.settings import CONFIG_FILE_VARIABLE, ENV_PREFIX, Settings

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = f"""# Configuration

<!-- Written by `make docs` from the settings' own definitions. Do not edit. -->

Every setting is an environment variable. The same names, in lower case and without the prefix, are
keys of a TOML file named by `{CONFIG_FILE_VARIABLE}`; nested ones are tables there:

```toml
port = 8001

[models]
"Qwen/Qwen3-0.6B" = "/models/qwen3-0.6b"

[limits]
max_lora_rank = 64
```

Options of `tinkercloud serve` are stronger than the environment, which is stronger than the file.
A key that is not listed here is refused, wherever it stands.

| Environment variable | Default | Meaning |
| --- | --- | --- |
"""


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    """Return a line of the table for each setting."""
    lines = []
    for name, field in model.model_fields.items():
        variable = f"{prefix}{name.upper()}"
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            lines += rows(nested, f"{variable}__")
        else:
            lines.append(f"| `{variable}` | {default(field)} | {meaning(field)} |")
    return lines


def default(field: FieldInfo) -> str:
    """Return what a field is when nobody sets it."""
    if field.default is None:
        return ""
    if field.default is PydanticUndefined:
        value = {} if field.annotation == dict[str, str] else "a folder in the user's data home"
        return f"`{value}`" if value == {} else str(value)
    return f"`{field.default}`"


def meaning(field: FieldInfo) -> str:
    """Return a field's documentation on one line."""
    return " ".join((field.description or "").split()).replace("|", "\\|")


def main() -> None:
    """Write the pages, or say which are stale."""
    text = HEAD + "\n".join(rows(Settings, ENV_PREFIX)) + "\n"
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is stale: run `make docs`")
        return
    PAGE.write_text(text)


main()
