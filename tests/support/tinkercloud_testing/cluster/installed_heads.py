"""The heads of an installation: their pods, their processes and their state."""

import contextlib
import os
import signal
from base64 import b64decode
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.cluster.installation import START_SECONDS, Installation
from tinkercloud_testing.cluster.kube_api.client import KubectlFailed
from tinkercloud_testing.cluster.nodes.node import head_process
from tinkercloud_testing.harness.waiting import wait_until


@dataclass(frozen=True)
class InstalledHead:
    """The head of a TrainingSession, whose pods follow one another."""

    installation: Installation
    session: str

    @property
    def pod(self) -> dict[str, Any] | None:
        """Its pod; None while there is none, or while one replaces another."""
        selector = f"{labels.COMPONENT_LABEL}=head,{labels.SESSION_LABEL}={self.session}"
        where = (self.installation.namespace, selector)
        found = self.installation.cluster.objects("pods", *where)
        return found[0] if len(found) == 1 else None

    def generation(self) -> str:
        """Return the generation of the head that is ready; empty if none is."""
        pod = self.pod
        if pod is None or "podIP" not in pod["status"] or "deletionTimestamp" in pod["metadata"]:
            return ""
        with contextlib.suppress(OSError, KubectlFailed):
            status = self._status(pod)
            return status.generation if status.ready else ""
        return ""

    def models(self) -> list[str]:
        """Return the runs that it has in memory."""
        pod = self.pod
        assert pod is not None
        return self._status(pod).models

    def _status(self, pod: dict[str, Any]) -> HeadStatus:
        where = ("secret", Names(self.session).token_secret, self.installation.namespace)
        token = b64decode(self.installation.cluster.get(*where)["data"][labels.TOKEN_KEY])
        url = f"http://{pod['status']['podIP']}:{labels.HEAD_PORT}{routes.HEAD_STATUS}"
        request = Request(url, headers={routes.HEAD_TOKEN_HEADER: token.decode()})
        with urlopen(request, timeout=5) as response:
            return HeadStatus.model_validate_json(response.read())

    def kill_container(self) -> None:
        """End the head's container, which the kubelet restarts on the same disk."""
        pod = self.pod
        assert pod is not None
        os.kill(head_process(pod), signal.SIGKILL)

    def delete_pod(self) -> None:
        """Delete its pod without notice, and its disk with it."""
        pod = self.pod
        assert pod is not None
        force = ("--grace-period=0", "--force")
        self.installation.kubectl("delete", "pod", pod["metadata"]["name"], *force)

    def wait_until_replaced(self, generation: str) -> None:
        """Wait until a head of another generation than this is ready."""
        wait_until(lambda: self.generation() not in ("", generation), "another head", START_SECONDS)
