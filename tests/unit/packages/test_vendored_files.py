"""Files that are copied from npm packages are compared with them, by npm itself."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tinkercloud_testing.resources.charts import ROOT

NAME, VERSION, SCRIPT = "lines", "1.2.3", b"draw();\n"
FILES = {"LICENSE": b"Do what you like.\n", "dist/lines.js": SCRIPT}
LIST = """
[lines]
version = "1.2.3"
licence = "MIT"
page = "https://lines.example"
integrity = "{integrity}"

[lines.sha256]
"""

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine")


@dataclass(frozen=True)
class Copy:
    """Files that are copied from a package of a registry on this machine."""

    folder: Path
    registry: str

    def compare(self, registry: str | None = None) -> tuple[int, str]:
        """Run the command; return its status and what it has printed."""
        environment = {
            "npm_config_registry": registry or self.registry,
            "npm_config_cache": str(self.folder.parent / "cache"),
            "npm_config_fetch_retries": "0",
        }
        command = [sys.executable, "tools/vendored.py", str(self.folder)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def packed(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return content.getvalue()


def integrity_of(archive: bytes) -> str:
    return f"sha512-{base64.b64encode(hashlib.sha512(archive).digest()).decode()}"


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    described = {"name": NAME, "version": VERSION, "license": "MIT"}
    archive = packed({"package.json": json.dumps(described).encode(), **FILES})
    served, folder = tmp_path / "registry", tmp_path / "vendored"
    served.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=served)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as registry:
        url = f"http://127.0.0.1:{registry.server_port}"
        dist = {"tarball": f"{url}/lines.tgz", "integrity": integrity_of(archive)}
        package = {
            "name": NAME,
            "dist-tags": {"latest": VERSION},
            "versions": {VERSION: {**described, "dist": dist}},
        }
        (served / "lines.tgz").write_bytes(archive)
        (served / NAME).write_text(json.dumps(package))
        (folder / NAME).mkdir(parents=True)
        lines = [LIST.format(integrity=integrity_of(archive))]
        for path, text in FILES.items():
            (folder / NAME / Path(path).name).write_bytes(text)
            lines.append(f'"{path}" = "{hashlib.sha256(text).hexdigest()}"\n')
        (folder / "vendored.toml").write_text("".join(lines))
        thread = threading.Thread(target=registry.serve_forever)
        thread.start()
        yield Copy(folder, url)
        registry.shutdown()
        thread.join()


def test_files_that_are_those_of_their_package_are_accepted(copy: Copy) -> None:
    assert copy.compare() == (0, "lines 1.2.3: 2 files are those of npm\n")


def test_a_byte_that_was_changed_is_refused(copy: Copy) -> None:
    changed = copy.folder / NAME / "lines.js"
    changed.write_bytes(SCRIPT.replace(b"draw", b"drab"))

    status, printed = copy.compare()

    assert status == 1
    assert f"{changed}: is not dist/lines.js of lines 1.2.3" in printed


@pytest.mark.parametrize("old", ["sha512-", 'licence = "MIT"', "1.2.3", 'lines.js" = "'])
def test_a_list_that_says_something_else_than_npm_is_refused(copy: Copy, old: str) -> None:
    listed = copy.folder / "vendored.toml"
    new = {"1.2.3": "1.2.4", 'licence = "MIT"': 'licence = "0BSD"'}.get(old, f"{old}0")
    listed.write_text(listed.read_text().replace(old, new))

    status, printed = copy.compare()

    assert (status, "lines" in printed) == (1, True)


def test_files_that_no_list_has_are_refused(copy: Copy) -> None:
    (copy.folder / NAME / "more.js").write_text("more();")

    status, printed = copy.compare()

    assert status == 1
    assert "more.js: not in vendored.toml" in printed


def test_a_registry_that_is_away_is_reported(copy: Copy) -> None:
    status, printed = copy.compare("http://127.0.0.1:9")

    assert status == 1
    assert "lines@1.2.3: npm could not download it" in printed
    assert "ECONNREFUSED" in printed
