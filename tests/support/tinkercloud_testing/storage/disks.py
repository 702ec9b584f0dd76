"""Disks that fail."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import ROOT, system_tool
from tinkercloud_testing.harness.waiting import wait_until

CAN_MOUNT = os.access("/dev/loop-control", os.W_OK)
"""Whether this machine can have `a_disk`: Linux, as root, and not in a container."""

_SIZE_BYTES = 64 << 20


@contextmanager
def no_files_over(size_bytes: int) -> Iterator[None]:
    """Make writes of this process beyond a file's size fail, as those to a full disk do.

    It writes no bytecode meanwhile: Python 3.11 keeps what a short write leaves of a module's, and
    no later process can import that module (https://github.com/python/cpython/issues/126606).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wrote_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = wrote_none


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Make all writes of a process to files fail, for root too, as a full disk does."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


@dataclass(frozen=True)
class Disk:
    """A disk with ext4, mounted at a folder."""

    device: Path
    folder: Path

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room on it."""
        filler = self.folder / "filler"
        try:
            _fill(filler)
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make it read-only as the kernel does after an error, then check it and mount it again.

        Nobody can remount a disk read-only on which a file is open for writing, but the kernel
        does: writing to such a file fails too. When it is mounted again, no file may be open.
        """
        Path(f"/sys/fs/ext4/{self.device.name}/trigger_fs_error").write_text("1")
        try:
            yield
        finally:
            wait_until(self._unmounted, f"the end of all uses of {self.folder}")
            # 1 means that it has repaired something.
            _run("e2fsck", "-fp", self.device, accepted=(0, 1))
            self.mount()

    def mount(self) -> None:
        """Mount it."""
        _run("mount", self.device, self.folder)

    def _unmounted(self) -> bool:
        done = subprocess.run(
            [system_tool("umount"), self.folder], check=False, capture_output=True
        )
        return done.returncode == 0


@contextmanager
def a_disk(image: Path, folder: Path) -> Iterator[Disk]:
    """Mount a small disk at an empty folder; install e2fsprogs first if it is missing (Debian).

    Args:
        image: the file to make, which has the content of the disk.
        folder: what is written there while the disk is not mounted fails.
    """
    _run(ROOT / "tools" / "install_e2fsprogs.sh")
    with image.open("wb") as file:
        file.truncate(_SIZE_BYTES)
    # Debian's installer sets this option for the root disk; the default is to ignore errors.
    _run("mkfs.ext4", "-q", "-m", "0", "-e", "remount-ro", image)
    device = Path(_run("losetup", "--find", "--show", image))
    mounted = 0
    try:
        _run("mount", "-t", "tmpfs", "-o", "ro", "none", folder)
        mounted += 1
        disk = Disk(device, folder)
        disk.mount()
        mounted += 1
        yield disk
    finally:
        for _ in range(mounted):
            _run("umount", "--lazy", folder)
        _run("losetup", "--detach", device)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _run(*command: str | Path, accepted: Sequence[int] = (0,)) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in accepted, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()
