"""A cluster that somebody else runs, for machines on which ours cannot."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.images import Image, write_archive

CHOICE = "TINKERCLOUD_TEST_CLUSTER"
LOADER = "TINKERCLOUD_TEST_IMAGE_LOADER"


def existing_cluster() -> Cluster | None:
    """Return the cluster named by KUBECONFIG if the tests are told to use it, else None.

    Raises:
        ValueError: TINKERCLOUD_TEST_CLUSTER is neither "own" nor "existing", or there is no
            KUBECONFIG to go with it.
    """
    choice = os.environ.get(CHOICE, "own")
    if choice == "own":
        return None
    if choice != "existing":
        raise ValueError(f"{CHOICE} is {choice!r}; it is 'own' (the default) or 'existing'")
    if "KUBECONFIG" not in os.environ:
        raise ValueError(f"{CHOICE}=existing needs KUBECONFIG, the file that names the cluster")
    return Cluster(Path(os.environ["KUBECONFIG"]))


class ExistingNodes:
    """The nodes of an existing cluster, which must run pods for real."""

    def load(self, *images: Image) -> None:
        """Bring images onto the nodes, by the command that is named for it.

        Raises:
            ValueError: TINKERCLOUD_TEST_IMAGE_LOADER is not set.
        """
        loader = os.environ.get(LOADER)
        if loader is None:
            raise ValueError(f"{LOADER} must name a command, say 'kind load image-archive'")
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            write_archive(images, archive)
            archive.flush()
            subprocess.run([*shlex.split(loader), archive.name], check=True)
