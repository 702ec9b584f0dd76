"""The environment of an API server on Kubernetes: a namespace, a base model, heads, a catalog.

Tests take the role of the operator: they write the status and the Secret of a session.
"""

import contextlib
import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tinker

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig, DurabilityLevel
from tinkercloud_protocol.heads.launch import BaseModelSource, HeadConfig, HeadStatus, Listen
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.cluster.image_build.programs import ROOT
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.serving.warm_processes import WarmProcess
from tinkercloud_testing.small_models.models import save, tiny_llama
from tinkercloud_testing.storage.postgresql import a_postgresql

MODEL = "tiny/llama"
OWNER = "bootstrap"
ACCOUNT = "tinkercloud-api"
RULES = [
    {
        "apiGroups": ["tinkercloud.dev"],
        "resources": ["trainingsessions"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
    {
        "apiGroups": ["tinkercloud.dev"],
        "resources": ["basemodels", "tenants"],
        "verbs": ["list", "watch"],
    },
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Head:
    """A head process like that of a pod: it restarts with the same name and port."""

    folder: Path
    model: Path
    store: Path
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=secrets.token_hex)
    model_name: str = MODEL
    process: subprocess.Popen[bytes] | WarmProcess | None = None
    durability_level: DurabilityLevel = "none"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "token").write_text(self.token)
        level = self.durability_level
        config = HeadConfig(
            head="head",
            model=BaseModelSource(name=self.model_name, path=str(self.model)),
            token_file=str(self.folder / "token"),
            checkpoint_root=self.store.as_uri(),
            scratch_dir=str(self.folder / "scratch"),
            listen=Listen(port=self.port),
            journal_dir=None if level == "none" else str(self.folder / "journals"),
            durability=DurabilityConfig(level=level),
        )
        (self.folder / "head.json").write_text(config.model_dump_json(exclude_defaults=True))
        with (self.folder / "head.log").open("ab") as log:
            self.process = Server.launched(
                "tinkercloud_worker",
                [str(self.folder / "head.json")],
                {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
                log.fileno(),
            )
        wait_until(self.is_ready, "head")

    def is_ready(self) -> bool:
        headers = {routes.HEAD_TOKEN_HEADER: self.token}
        request = urllib.request.Request(self.url + routes.HEAD_READY, headers=headers)
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def durability(self) -> str:
        headers = {routes.HEAD_TOKEN_HEADER: self.token}
        request = urllib.request.Request(self.url + routes.HEAD_STATUS, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return HeadStatus.model_validate_json(answer.read()).durability

    def give_away(self, model_id: str) -> None:
        """Ask the head to write a model for another head."""
        self._move("POST", model_id)

    def take_back(self, model_id: str) -> None:
        """Ask the head to continue a model that it has given away."""
        self._move("DELETE", model_id)

    def _move(self, method: str, model_id: str) -> None:
        url = f"{self.url}{routes.HEAD_MOVE_MODEL}/{model_id}"
        headers = {routes.HEAD_TOKEN_HEADER: self.token}
        request = urllib.request.Request(url, data=b"", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class World:
    """A namespace with a base model, and API servers that share a PostgreSQL catalog."""

    cluster: Cluster
    namespace: str
    folder: Path
    model: Path
    kubeconfig: Path
    database_url: str
    heads: list[Head] = field(default_factory=list)

    def server(self, name: str, **others: str) -> Server:
        """Return an API server that is not started yet, with other settings by variable."""
        settings = {
            "KUBECONFIG": str(self.kubeconfig),
            "TINKERCLOUD_PROVIDER": "kubernetes",
            "TINKERCLOUD_NAMESPACE": self.namespace,
            "TINKERCLOUD_DATABASE_URL": self.database_url,
            "TINKERCLOUD_CHECKPOINT_ROOT": (self.folder / "store").as_uri(),
            "TINKERCLOUD_TIMINGS__LONG_POLL_SECONDS": "2",
            **others,
        }
        return Server({}, self.folder / name, settings)

    @cached_property
    def head(self) -> Head:
        """The head that sessions share unless a test stops it, because starting one takes long."""
        return self.a_head()

    def a_head(
        self,
        model_name: str = MODEL,
        level: DurabilityLevel = "none",
        model: Path | None = None,
    ) -> Head:
        """Return a running head that a test may stop and kill."""
        folder = self.folder / f"head-{len(self.heads)}"
        head = Head(
            folder,
            model or self.model,
            self.folder / "store",
            model_name=model_name,
            durability_level=level,
        )
        self.heads.append(head)
        head.start()
        return head

    def session(self, name: str) -> dict[str, Any]:
        return self.cluster.get("trainingsession", name, self.namespace)

    def sessions(self) -> list[str]:
        found = self.cluster.objects("trainingsessions", self.namespace)
        return [item["metadata"]["name"] for item in found]

    def wait_for_model(self, server: Server, name: str) -> None:
        """Wait until a server offers a model: servers learn of BaseModels by a watch."""

        def is_offered() -> bool:
            offered = server.request("GET", "/api/v1/get_server_capabilities").json()[
                "supported_models"
            ]
            return name in [model["model_name"] for model in offered]

        wait_until(is_offered, f"{name} among the models of the server")

    def new_session(self, known: list[str]) -> str:
        """Wait for a new session and return its name."""
        wait_until(lambda: bool(set(self.sessions()) - set(known)), "a TrainingSession")
        made = [self.session(name) for name in set(self.sessions()) - set(known)]
        assert len(made) == 1, [each["spec"] for each in made]
        return str(made[0]["metadata"]["name"])

    def session_of(self, model_id: str) -> str:
        """Wait for the session of a run and return its name."""

        def found() -> list[str]:
            listed = self.cluster.objects("trainingsessions", self.namespace)
            mine = [each for each in listed if each["spec"].get("modelId") == model_id]
            return [each["metadata"]["name"] for each in mine]

        wait_until(lambda: bool(found()), f"the TrainingSession of {model_id}")
        return found()[0]

    def say(
        self, name: str, *conditions: tuple[ConditionType, str, Reason, str], **status: Any
    ) -> None:
        """Write the status of a session for its current spec."""
        generation = self.session(name)["metadata"]["generation"]
        written = [
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": now(),
            }
            for kind, value, reason, message in conditions
        ]
        status |= {"conditions": written, "observedGeneration": generation}
        self.cluster.patch_status("trainingsession", name, status, self.namespace)

    def make_ready(self, name: str, head: Head, incarnation: str = "pod-a.0") -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"{name}-token", "namespace": self.namespace},
            "stringData": {"token": head.token},
        }
        self.cluster.apply(secret)
        ready = (ConditionType.READY, "True", Reason.READY, "")
        self.say(name, ready, endpoint=head.url, incarnation=incarnation)

    def a_pool_cluster(self, name: str, head: Head) -> str:
        """Make a pool cluster that is ready; return its name."""
        spec = {"baseModel": head.model_name, "role": "Pool", "owner": labels.POOL_OWNER}
        cluster = a_declared_session(name, self.namespace)
        self.cluster.apply({**cluster, "spec": spec})
        self.make_ready(name, head)
        return name

    def place(self, session: str, pool_cluster: str) -> None:
        """Give a session a place on a pool cluster."""
        self._merge(session, {"spec": {"poolCluster": pool_cluster}})

    def _merge(self, session: str, patch: dict[str, Any]) -> None:
        where = (f"--namespace={self.namespace}", "--type=merge", f"--patch={json.dumps(patch)}")
        self.cluster.kubectl("patch", "trainingsession", session, *where)

    def move(self, session: str, model_id: str, source: Head, target: str) -> None:
        """Move a run to another pool cluster, as the operator does."""
        self.annotate_moving(session, target)
        source.give_away(model_id)
        self.finish_move(session, target)

    def drain(self, pool_cluster: str) -> None:
        """Ask the operator to move all runs from a cluster."""
        self._merge(pool_cluster, {"metadata": {"annotations": {labels.DRAIN: "true"}}})

    def annotate_moving(self, session: str, target: str) -> None:
        """Announce a move."""
        self._merge(session, {"metadata": {"annotations": {labels.MOVING_TO: target}}})

    def finish_move(self, session: str, target: str) -> None:
        """Place a run that its head has given away."""
        patch: dict[str, Any] = {"metadata": {"annotations": {labels.MOVING_TO: None}}}
        self._merge(session, patch | {"spec": {"poolCluster": target}})

    def a_training_client(self, server: Server, head: Head | None = None) -> tinker.TrainingClient:
        """Return a client of a run at a head, by default the shared one."""
        known = self.sessions()
        client = server.client()
        waiting = client.create_lora_training_client(MODEL, rank=4, seed=1)
        self.make_ready(self.new_session(known), head or self.head)
        return waiting.result()


@contextlib.contextmanager
def a_world(cluster: Cluster, folder: Path) -> Iterator[World]:
    """Make a namespace with a base model and a catalog; kill all heads afterwards."""
    for file in sorted((ROOT / "crds").glob("tinkercloud.dev_*.yaml")):
        cluster.apply_text(file.read_text())
    cluster.wait_for("crd/trainingsessions.tinkercloud.dev", "condition=Established")
    with cluster.a_namespace("provider") as namespace:
        cluster.apply(*access(namespace), a_base_model("tiny", namespace))
        kubeconfig = cluster.kubeconfig_of(ACCOUNT, namespace, folder)
        model = save(tiny_llama(), folder / "llama")
        with a_postgresql() as postgresql:
            catalog = postgresql.new_database()
            made = World(cluster, namespace, folder, model, kubeconfig, catalog)
            try:
                yield made
            finally:
                for head in made.heads:
                    head.kill()


def access(namespace: str) -> list[dict[str, Any]]:
    metadata = {"name": ACCOUNT, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", **metadata}
    role = {"kind": "Role", "name": ACCOUNT, "apiGroup": rbac}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": RULES},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [subject],
            "roleRef": role,
        },
    ]


def a_base_model(name: str, namespace: str, model_name: str = MODEL) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "BaseModel",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "modelName": model_name,
            "source": {"volume": {"claimName": "models", "path": "llama"}},
            "maxContextLength": 512,
            "head": {"image": "head"},
            "sessions": {"queueNames": ["research"], "maxIdleTimeoutSeconds": 7200},
            "programs": {"images": ["programs:1"]},
        },
    }


def a_declared_session(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"baseModel": MODEL, "owner": OWNER, "lora": {"rank": 4}, **spec},
    }
