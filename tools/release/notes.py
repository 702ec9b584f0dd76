"""Write the notes of a release from CHANGELOG.md; check that tag and version agree.

    python tools/release/notes.py TAG FILE

TAG is `v` and the version of pyproject.toml. The section of CHANGELOG.md that begins with `## ` and
this version becomes FILE.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading.

    Raises:
        ValueError: the section is missing or empty.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if re.match(rf"\[?{re.escape(version)}(?![\w.])", heading) and text.strip():
            return text.strip() + "\n"
    raise ValueError(
        f"CHANGELOG.md: expected a section with changes that begins with `## {version}`; rename"
        " `Unreleased` to it and add the date"
    )


def main() -> None:
    """Write the file, or exit with the difference."""
    tag, file = sys.argv[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if tag != f"v{project['version']}":
        sys.exit(f"the tag is {tag}, but the packages have version {project['version']}")
    try:
        text = notes((ROOT / "CHANGELOG.md").read_text(), project["version"])
    except ValueError as error:
        sys.exit(str(error))
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)


if __name__ == "__main__":
    main()
