"""Make an environment for each SDK version in the cache folder, with nothing else in it.

    install.py          all listed versions and the newest one of the index
    install.py 0.16.1   only these versions

An environment takes a few seconds and about 25 MB. Prints the versions, one on each line.
"""

import fcntl
import shutil
import subprocess
import sys

from tinkercloud_testing.clients.sdk_versions import ROOT, environments, versions

UV = str(ROOT / ".uv" / "bin" / "uv")


def newest() -> str | None:
    """Return the newest version on the package index, or None if it cannot be reached."""
    result = subprocess.run(  # noqa: S603 - our own uv
        [UV, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "-"],
        input="tinker",
        capture_output=True,
        text=True,
        check=False,
    )
    name, _, version = result.stdout.strip().partition("==")
    if name != "tinker":
        print(f"cannot determine the newest version: {result.stderr.strip()}", file=sys.stderr)
        return None
    return version


def install(version: str) -> None:
    """Make the environment of a version, unless it exists."""
    folder = environments() / f"tinker-{version}"
    if (folder / "installed").exists():
        return
    print(f"Installing tinker {version} ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        ["venv", "--quiet", "--python", sys.executable, str(folder)],
        ["pip", "install", "--quiet", "--python", str(folder), f"tinker=={version}"],
    ):
        subprocess.run([UV, *command], check=True)  # noqa: S603 - our own uv
    (folder / "installed").touch()


def main() -> None:
    """Install the versions and print them."""
    wanted = sys.argv[1:]
    if not wanted:
        latest = newest()
        wanted = versions()
        if latest is not None and latest not in wanted:
            wanted.append(latest)
    environments().mkdir(parents=True, exist_ok=True)
    with (environments() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for version in wanted:
            install(version)
    print("\n".join(wanted))


main()
