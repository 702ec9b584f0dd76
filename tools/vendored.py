"""Compare the vendored files of the console with the npm packages that they are copied from.

`python tools/vendored.py [FOLDER]` downloads each package that `FOLDER/vendored.toml` lists, from
the registry that npm is configured with. It compares digests and licences, and each file byte for
byte. With --licences, it only prints the packages as rows of `build/sbom/licenses.csv`.
"""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "api_server/src/tinkercloud_api/console/static/vendored"
LIST = "vendored.toml"


def main() -> None:
    """Compare all files, or exit with what differs."""
    arguments = sys.argv[1:]
    if arguments == ["--licences"]:
        print_licences()
        return
    folder = Path(arguments[0]) if arguments else FOLDER
    packages = listed(folder)
    problems = [*unlisted(folder, packages)]
    for name, package in packages.items():
        found = [*differences(folder / name, name, package)]
        problems += found
        if not found:
            print(f"{name} {package['version']}: {len(package['sha256'])} files are those of npm")
    if problems:
        sys.exit("\n".join(problems))


def listed(folder: Path) -> dict[str, Any]:
    """Return the packages of a folder's list, by name."""
    return tomllib.loads((folder / LIST).read_text())


def print_licences() -> None:
    """Print name, version, licence and page of each package."""
    rows = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for name, package in listed(FOLDER).items():
        rows.writerow((name, package["version"], package["licence"], package["page"]))


def unlisted(folder: Path, packages: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each file that the list does not have."""
    known = {folder / LIST}
    for name, package in packages.items():
        known |= {folder / name / Path(path).name for path in package["sha256"]}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in known:
            yield f"{path}: not in {LIST}; add it there, or remove the file"


def differences(folder: Path, name: str, package: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each difference between a package and what is copied from it.

    Args:
        folder: has the copied files.
        name: of the package.
        package: what the list says about it.
    """
    named = f"{name} {package['version']}"
    with tempfile.TemporaryDirectory() as scratch:
        archive = downloaded(f"{name}@{package['version']}", Path(scratch))
        integrity = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if package["integrity"] != f"sha512-{integrity}":
            yield f"{named}: npm has sha512-{integrity}, {LIST} has {package['integrity']}"
            return
        originals = files_of(archive)
    if (licence := json.loads(originals["package.json"])["license"]) != package["licence"]:
        yield f"{named}: npm has the licence {licence}, {LIST} has {package['licence']}"
    for path, digest in package["sha256"].items():
        original, copy = originals.get(path), folder / Path(path).name
        if original is None or hashlib.sha256(original).hexdigest() != digest:
            yield f"{named}: the package has no {path} with the sha256 {digest} of {LIST}"
        elif not copy.is_file() or copy.read_bytes() != original:
            yield f"{copy}: is not {path} of {named}; copy it from the package again"


def files_of(archive: Path) -> dict[str, bytes]:
    """Return the files of a package, by their paths in it."""
    with tarfile.open(archive) as opened:
        return {
            member.name.partition("/")[2]: found.read()
            for member in opened
            if (found := opened.extractfile(member)) is not None
        }


def downloaded(package: str, folder: Path) -> Path:
    """Return the archive of a package, such as `uplot@1.6.32`, in a folder; exit without it."""
    command = ["npm", "pack", package, "--loglevel=error", "--pack-destination", str(folder)]
    try:
        packed = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError:
        sys.exit("npm: not found; install Node.js with npm to compare vendored files")
    found = [*folder.glob("*.tgz")]
    if packed.returncode != 0 or len(found) != 1:
        why = "\n".join(packed.stderr.splitlines()[:4]) or f"exit status {packed.returncode}"
        sys.exit(f"{package}: npm could not download it, so that it was not compared\n{why}")
    return found[0]


main()
