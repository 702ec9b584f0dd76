"""An existing cluster, for machines on which our own cannot run.

TINKERCLOUD_TEST_CLUSTER=existing selects the cluster of KUBECONFIG for all cluster tests, and
TINKERCLOUD_TEST_IMAGE_LOADER is the command that loads an image archive onto its nodes. Tests that
stop programs of the control plane or of the node are skipped.
"""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from tinkercloud_testing.cluster.image_build.images import Image, write_archive
from tinkercloud_testing.cluster.kube_api.client import Cluster

CHOICE = "TINKERCLOUD_TEST_CLUSTER"
LOADER = "TINKERCLOUD_TEST_IMAGE_LOADER"


def existing_cluster() -> Cluster | None:
    """Return the cluster of KUBECONFIG if TINKERCLOUD_TEST_CLUSTER selects it, else None.

    Raises:
        ValueError: TINKERCLOUD_TEST_CLUSTER is neither "own" nor "existing", or there is no
            KUBECONFIG to go with it.
    """
    choice = os.environ.get(CHOICE, "own")
    if choice == "own":
        return None
    if choice != "existing":
        raise ValueError(f"{CHOICE} is {choice!r}; use 'own' (the default) or 'existing'")
    if "KUBECONFIG" not in os.environ:
        raise ValueError(f"{CHOICE}=existing needs KUBECONFIG, the path of a kubeconfig file")
    return Cluster(Path(os.environ["KUBECONFIG"]))


class ExistingNodes:
    """The nodes of an existing cluster, which must run pods for real."""

    def load(self, *images: Image) -> None:
        """Load images onto the nodes with the configured command.

        Raises:
            ValueError: TINKERCLOUD_TEST_IMAGE_LOADER is not set.
        """
        loader = os.environ.get(LOADER)
        if loader is None:
            raise ValueError(f"{LOADER} is not set; use for example 'kind load image-archive'")
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            write_archive(images, archive)
            archive.flush()
            subprocess.run([*shlex.split(loader), archive.name], check=True)
