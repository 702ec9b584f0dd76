"""A client of our own or an existing cluster: kubectl with an administrator's kubeconfig."""

import contextlib
import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkercloud_testing.cluster.image_build.programs import binary
from tinkercloud_testing.cluster.kube_api.certificates import write_kubeconfig
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until

Manifest = Mapping[str, Any]
FIELD_MANAGER = "tests"
ENDED = ("Succeeded", "Failed")
"""Final phases of a pod."""


class KubectlFailed(Exception):
    """kubectl failed; the message is its output."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, accessed as administrator."""

    kubeconfig: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output.

        Raises:
            KubectlFailed: It failed.
        """
        result = subprocess.run(
            [str(binary("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise KubectlFailed(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def is_healthy(self) -> bool:
        """Whether the API server reports that it is ready."""
        with contextlib.suppress(KubectlFailed):
            return self.kubectl("get", "--raw=/readyz", "--request-timeout=2s") == "ok"
        return False

    def apply(self, *objects: Manifest) -> None:
        """Apply objects server-side.

        Raises:
            KubectlFailed: The API server rejected one of them; the message says why.
        """
        self.apply_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def apply_text(self, manifests: str) -> None:
        """Apply YAML or JSON server-side.

        Raises:
            KubectlFailed: The API server rejected one of the objects; the message says why.
        """
        options = ("--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}")
        self.kubectl("apply", *options, "-f", "-", stdin=manifests)

    def patch_status(
        self, kind: str, name: str, status: Manifest, namespace: str = "default"
    ) -> None:
        """Merge into the status of an object, like the controller that owns it."""
        patch = json.dumps({"status": status})
        where = (f"--namespace={namespace}", "--subresource=status", "--type=merge")
        self.kubectl("patch", kind, name, *where, f"--patch={patch}")

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """Return an object.

        Raises:
            KubectlFailed: It does not exist.
        """
        found: dict[str, Any] = json.loads(
            self.kubectl("get", kind, name, f"--namespace={namespace}", "--output=json")
        )
        return found

    def objects(
        self, kind: str, namespace: str = "default", selector: str = ""
    ) -> Sequence[dict[str, Any]]:
        """Return the objects of a kind in a namespace, optionally by label selector."""
        where = (f"--namespace={namespace}", f"--selector={selector}")
        answer = json.loads(self.kubectl("get", kind, *where, "--output=json"))
        items: Sequence[dict[str, Any]] = answer["items"]
        return items

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        """Delete an object if it exists, without waiting for the deletion."""
        where = f"--namespace={namespace}"
        self.kubectl("delete", kind, name, where, "--wait=false", "--ignore-not-found")

    def wait_for(
        self,
        what: str,
        condition: str,
        namespace: str = "default",
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Wait with `kubectl wait`.

        Args:
            what: The object: "pod/head", "rayclusters.ray.io/one".
            condition: "create", "delete", "condition=Ready", "jsonpath={.status.state}=ready".
            namespace: The namespace of the object.
            seconds: The timeout.

        Raises:
            KubectlFailed: The condition was not met in time.
        """
        options = (f"--for={condition}", f"--namespace={namespace}", f"--timeout={seconds:.0f}s")
        self.kubectl("wait", what, *options)

    def wait_until_established(self, definition: str) -> None:
        """Wait until a custom resource definition is served: `rayclusters.ray.io`.

        `kubectl wait` cannot do this: it fails as long as there are no conditions.
        """

        def is_established() -> bool:
            status = self.get("crd", definition).get("status", {})
            conditions = status.get("conditions") or []
            return "Established" in [
                each["type"] for each in conditions if each["status"] == "True"
            ]

        wait_until(is_established, f"{definition} is served")

    def output_of(self, pod: str, namespace: str) -> str:
        """Wait for the end of a pod that is not restarted, and return its output.

        Raises:
            KubectlFailed: It failed; the message is its output.
            TimeoutError: It does not end.
        """
        wait_until(lambda: self._phase_of(pod, namespace) in ENDED, f"the end of the pod {pod}")
        printed = self.kubectl("logs", pod, f"--namespace={namespace}")
        if self._phase_of(pod, namespace) == "Failed":
            raise KubectlFailed(f"the pod {pod} failed: {printed}")
        return printed

    def _phase_of(self, pod: str, namespace: str) -> str:
        return str(self.get("pod", pod, namespace)["status"]["phase"])

    @contextlib.contextmanager
    def a_namespace(self, name: str = "test", **labels: str) -> Iterator[str]:
        """Create a namespace for a block; its objects are deleted with it."""
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        metadata = {"name": unique, "labels": labels}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.wait_for("serviceaccount/default", "create", unique)
        try:
            yield unique
        finally:
            self.delete("namespace", unique)

    def kubeconfig_of(self, service_account: str, namespace: str, folder: Path) -> Path:
        """Write the kubeconfig of a service account, with the rights of its roles."""
        account = (service_account, f"--namespace={namespace}")
        token = self.kubectl("create", "token", *account, "--duration=24h").strip()
        view = ("config", "view", "--raw", "--minify", "--flatten", "--output=json")
        own = json.loads(self.kubectl(*view))["clusters"][0]["cluster"]
        path = folder / f"{namespace}-{service_account}.kubeconfig"
        write_kubeconfig(path, own["server"], own["certificate-authority-data"], {"token": token})
        return path
