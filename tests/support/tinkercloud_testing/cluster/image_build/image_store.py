"""The images that containerd holds for the real node, managed with its own client `ctr`.

All runs share one store, so that a layer is imported once. Whatever interrupts an import (a test's
time limit, Ctrl-C, the end of the test run), the next import works: the first two are cleaned up at
once, the last one when the next run starts.
"""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinkercloud_testing.cluster.image_build.images import Image, write_archive
from tinkercloud_testing.cluster.nodes.node_config import REGISTRY

OUR_IMAGES = "tinkercloud.test/"
_GARBAGE_LEASE = "garbage"


@dataclass(frozen=True)
class ImageStore:
    """The image store of a running containerd."""

    client: Sequence[str]
    """The command that starts a `ctr` of this containerd, without a subcommand."""

    def load(self, *images: Image) -> None:
        """Import images; pods name them with `imagePullPolicy: Never`.

        Raises:
            subprocess.CalledProcessError: containerd rejected them.
        """
        leases = set(self._leases())
        try:
            self._import(images)
        except BaseException:
            # An import that was killed does not delete its lease, which keeps what it has written.
            self._remove_leases(set(self._leases()) - leases)
            self._collect_garbage()
            raise

    def remove_leftovers(self) -> None:
        """Remove what earlier runs left, killed ones included, except the images they named.

        No pod may run yet.
        """
        for kind, leftover in (
            ("containers", self._ctr("containers", "list", "--quiet")),
            ("images", self._nameless_images()),
        ):
            if leftover:
                self._ctr(kind, "remove", *leftover)
        self._remove_leases(self._leases())
        self._collect_garbage()

    def _import(self, images: Sequence[Image]) -> None:
        present = set(self._ctr("content", "list", "--quiet"))
        command = [*self.client, "images", "import", "-"]
        with _killed_if_interrupted(command) as ctr:
            assert ctr.stdin is not None
            write_archive(images, ctr.stdin, without=present)
            ctr.stdin.close()
            if ctr.wait() != 0:
                raise subprocess.CalledProcessError(ctr.returncode, command)

    def _leases(self) -> Sequence[str]:
        return self._ctr("leases", "list", "--quiet")

    def _remove_leases(self, names: Sequence[str] | set[str]) -> None:
        if names:
            self._ctr("leases", "delete", *sorted(names))

    def _collect_garbage(self) -> None:
        """Delete what neither an image nor a lease refers to.

        containerd offers this to clients only as the synchronous deletion of a lease.
        """
        if _GARBAGE_LEASE not in self._leases():
            self._ctr("leases", "create", f"--id={_GARBAGE_LEASE}")
        self._ctr("leases", "delete", "--sync", _GARBAGE_LEASE)

    def _nameless_images(self) -> Sequence[str]:
        """Return the images that were replaced by others of the same name, and pulled ones.

        containerd's Kubernetes side keeps every image by its digest too.
        """
        words = self._ctr("images", "list")
        ours = ("sha256:", OUR_IMAGES, REGISTRY)
        references = [word for word in words if word.startswith(ours)]
        # Each image is listed as its name and the digest of its manifest, among other words.
        manifests = dict(zip(references[::2], references[1::2], strict=True))
        named = {digest for name, digest in manifests.items() if name.startswith(OUR_IMAGES)}
        return [name for name, digest in manifests.items() if digest not in named]

    def _ctr(self, *arguments: str) -> Sequence[str]:
        """Run `ctr` and return the words of its output."""
        command = [*self.client, *arguments]
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        return output.split()


@contextlib.contextmanager
def _killed_if_interrupted(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that reads its standard input; kill it if the block raises."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
