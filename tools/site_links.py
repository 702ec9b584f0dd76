"""A hook of MkDocs for links to files outside docs/.

Pages link to source files by relative path, so that the links work in the repository, where
`tests/house/test_links.py` checks their targets. The site contains the pages only. With
`TINKERCLOUD_REPOSITORY_URL`, such as `https://github.com/OWNER/NAME/blob/main`, these links lead
there; without it, their text remains.
"""

import os
import re
from pathlib import Path
from typing import Any

REPOSITORY_URL = os.environ.get("TINKERCLOUD_REPOSITORY_URL", "").rstrip("/")
DEFINITION = re.compile(r"^\[([^\]]+)\]:\s*(\S+)\n?", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:  # noqa: ANN401 - MkDocs' own
    """Return a page without relative links to files outside docs/."""
    folder = Path("docs", page.file.src_uri).parent
    targets = dict(DEFINITION.findall(markdown))

    def link(match: re.Match[str]) -> str:
        text, target = match[1], targets.get(match[3], "") if match[3] else match[2]
        path = os.path.normpath(folder / target)
        if not target.startswith("../") or path.startswith("docs/"):
            return match[0]
        return f"[{text}]({REPOSITORY_URL}/{path})" if REPOSITORY_URL else text

    def definition(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match[2])
        is_outside = match[2].startswith("../") and not path.startswith("docs/")
        return "" if is_outside else match[0]

    linked = re.sub(r"\[([^\]]+)\](?:\(([^)\s]+)\)|\[([^\]]+)\])", link, markdown)
    return DEFINITION.sub(definition, linked)
