"""Write the pages of docs/ that are derived from the code; with --check, only compare.

docs/configuration.md      from `Settings` of the API server and of the operator
"""

import json
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinkercloud_api.settings import CONFIG_FILE_VARIABLE, ENV_PREFIX, Settings
from tinkercloud_operator import settings as operator

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = f"""# Configuration

<!-- Written by `make docs` from the settings' own definitions. Do not edit. -->

Of the API server and the `tinkercloud` command, and [of the operator](#the-operator).

## The API server

Every setting is an environment variable; lists and tables are JSON in variables, such as
`TINKERCLOUD_MODELS='{{"Qwen/Qwen3-0.6B": "/models/qwen3-0.6b"}}'`. The same names, in lower case
and without the prefix, are keys of a TOML file named by `{CONFIG_FILE_VARIABLE}`; nested ones are
tables there:

```toml
port = 8001

[models]
"Qwen/Qwen3-0.6B" = "/models/qwen3-0.6b"

[limits]
max_lora_rank = 64
```

Options of `tinkercloud serve` override the environment, which overrides the file. Keys that are
not listed here are rejected.

With `TINKERCLOUD_PROVIDER=kubernetes`, the operator starts heads and configures them from the
BaseModels and its own settings. Settings of heads are then rejected, with a message that says where
to set them: `models`, `preload`, `orphan_grace_seconds`, `head_start_seconds`, `trainer`,
`sampler`, `limits` except `max_body_bytes` (which may be lowered), and `timings` except
`long_poll_seconds`.

"""
OPERATOR_HEAD = """
## The operator

The operator is configured by environment variables; lists and tables are JSON. The chart sets most
of them from its values; `operator.env` sets the others. Unknown variables with this prefix are
rejected.

"""
TABLE = """\
| Environment variable | Default | Meaning |
| --- | --- | --- |
"""
OF_THE_PLACE = {
    "state_dir": "a folder in the user's data home",
    "identity": "the name of the pod",
}
"""Defaults that each machine has its own of."""


def rows(model: type[BaseModel], prefix: str) -> list[str]:
    """Return a line of the table for each setting."""
    lines = []
    for name, field in model.model_fields.items():
        variable = f"{prefix}{name.upper()}"
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            lines += rows(nested, f"{variable}__")
        else:
            shown = OF_THE_PLACE.get(name) or default(field)
            lines.append(f"| `{variable}` | {shown} | {meaning(field)} |")
    return lines


def default(field: FieldInfo) -> str:
    """Return what a field is when nobody sets it."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f"`{json.dumps(value) if isinstance(value, dict | list) else value}`"


def meaning(field: FieldInfo) -> str:
    """Return a field's documentation on one line."""
    return " ".join((field.description or "").split()).replace("|", "\\|")


def main() -> None:
    """Write the pages, or say which are stale."""
    tables = [
        TABLE + "\n".join(rows(model, prefix)) + "\n"
        for model, prefix in ((Settings, ENV_PREFIX), (operator.Settings, operator.ENV_PREFIX))
    ]
    text = HEAD + tables[0] + OPERATOR_HEAD + tables[1]
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.exit(f"{PAGE} is stale: run `make docs`")
        return
    PAGE.write_text(text)


main()
