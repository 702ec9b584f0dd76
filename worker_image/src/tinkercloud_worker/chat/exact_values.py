"""Values of requests that chat templates would write in another way.

Templates of transformers receive plain JSON values, so 1e400 becomes Infinity, and half of a
surrogate pair is no text. While a template is rendered, integers of many digits and names stand for
them, which are replaced in the rendered text.
"""

import re
import secrets
from typing import Any

from tinkercloud_protocol.wire.exact_json import SURROGATE, ExactNumber

_INDEX_DIGITS = 8


class ExactValues:
    """Holds the exact values of one conversation while it is rendered. Used once."""

    def __init__(self) -> None:
        # Nobody can guess these, so no text of a client contains them.
        self._prefix = str(10**30 + secrets.randbelow(10**30))
        self.mark = f"mark{secrets.token_hex(16)}"
        """A text that the conversation does not have."""
        self._literals: list[str] = []

    def held(self, value: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return a JSON value as a template may receive it."""
        if isinstance(value, ExactNumber):
            self._literals.append(value.literal)
            return int(f"{self._prefix}{len(self._literals) - 1:0{_INDEX_DIGITS}}")
        if isinstance(value, str):
            return SURROGATE.sub(lambda half: f"{self.mark}{ord(half[0]):04x}", value)
        if isinstance(value, dict):
            return {self.held(name): self.held(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.held(each) for each in value]
        return value

    def restored(self, text: str) -> str:
        """Return a rendered text with the exact values."""
        text = re.sub(f"{self.mark}(d[0-9a-f]{{3}})", r"\\u\1", text)
        pattern = rf"{self._prefix}(\d{{{_INDEX_DIGITS}}})"
        return re.sub(pattern, lambda found: self._literals[int(found[1])], text)
