"""Pieces of grammars in llguidance's dialect of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Mapping
from typing import Any

HEADER = "%llguidance {}"
TEXT = r"TEXT: /(.|\n)*/"
"""Any text."""
_SPACES = r"[ ]?|\r?\n[ \t]{0,32}"
"""White space between two parts of JSON. Without a limit, a sample could consist of spaces."""


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule for JSON that matches a schema."""
    options = {"whitespace_pattern": _SPACES, "key_separator": ":", "item_separator": ","}
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': options})}"
