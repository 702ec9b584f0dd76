"""A simulated session with its surroundings, in memory, and the events that may happen to it.

`World` executes plans, or only their first writes, and simulates KubeRay, Kueue, the kubelet, the
head, owners and manual edits.
"""

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import CORDON, BaseModelSpec
from tinkercloud_crds.conditions import Reason, timestamp
from tinkercloud_crds.training_session import TrainerOverride, TrainingSessionStatus
from tinkercloud_operator.children.secret_marker import has_secret, secret_marker
from tinkercloud_operator.decide.session.actions import (
    Action,
    Apply,
    CreateSecret,
    CreateSecretMarker,
    Delete,
    DeleteSession,
    Plan,
    RemoveModel,
    SaveRequest,
    SetFinalizer,
)
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import (
    ChildKey,
    FailedSave,
    Observed,
    Pod,
    PodProblem,
    ProgramPod,
)
from tinkercloud_testing.resources.session_conditions import check_conditions
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    PROGRAM,
    PROGRAMS,
    SAMPLERS,
    TRAINERS,
    Json,
    a_base_model,
    a_pod,
    a_session,
    changed,
    observed,
)

SETTINGS = Settings(api_url="http://api.default.svc:80")
RAY_CLUSTER = ChildKey("RayCluster", "one")
JOB = ChildKey("Job", "one-program")
HEAD_CONFIG = ChildKey("ConfigMap", "one-config")
HEAD_SERVICE = ChildKey("Service", "one-head")
PROBLEM = PodProblem(Reason.IMAGE_PULL_BACK_OFF, "container head: no such image")
STORE_ERROR = "could not suspend one:train:0: the store s3://runs does not respond"
LOADING_ERROR = "the session head is loading its model; send the request again"
DENIED = "admission webhook denied it"
IDLE = {"timeoutSeconds": 1800}
SPOT_NOTICE = "aws-node-termination-handler/spot-itn"
NODES = frozenset({"node-0", "node-1"})
ENOUGH_ROUNDS = 200

OFFERS: Mapping[str, BaseModelSpec] = {
    "head alone": a_base_model(sessions={"idle": IDLE}),
    "workers": a_base_model(trainer=TRAINERS, sampler=SAMPLERS, sessions={"idle": IDLE}),
    "engines": a_base_model(trainer=TRAINERS, sampler=ENGINES, sessions={"idle": IDLE}),
    "colocated engines": a_base_model(trainer=TRAINERS, sampler=COLOCATED),
    "queue": a_base_model(trainer=TRAINERS, placement={"queueName": "research"}),
    "short life": a_base_model(sessions={"idle": IDLE, "maxLifetimeSeconds": 7200}),
    "deleted when idle": a_base_model(sessions={"idle": IDLE | {"action": "Delete"}}),
    "program": a_base_model(programs=PROGRAMS, sessions={"idle": IDLE}),
    "for a client": a_base_model(trainer=TRAINERS, placement={"queueName": "research"}),
    "for a client, short life": a_base_model(
        sessions={"idle": IDLE | {"action": "Delete"}, "maxLifetimeSeconds": 7200}
    ),
}


class World:
    """A session and everything around the operator that reconciles it."""

    def __init__(self, base_model: BaseModelSpec, *, is_declared: bool = True) -> None:
        self.offered = base_model
        program = PROGRAM if base_model.programs is not None else None
        spec = a_session(program=program)
        self.known = observed(base_model=base_model, is_declared=is_declared, spec=spec)
        self.children: dict[ChildKey, Json] = {}
        self.pods: dict[str, Pod] = {}
        self.program_pods: list[ProgramPod] = []
        self.has_secret = False
        self.is_gone = False
        self.ignores_saves = False
        self.store_error: str | None = None
        """What the head answers to save requests while its checkpoint store is away."""
        self.refuses = False
        self.unknown_fields: frozenset[str] = frozenset()
        """Status fields that outdated CRDs do not store."""
        self.head_config: Json | None = None
        """Configuration that the head's process read at startup; None if there was none."""
        self.stopping: set[str] = set()
        """Incarnations of heads that received a `suspend` request and no longer serve."""
        self._uids = itertools.count()

    @property
    def status(self) -> TrainingSessionStatus:
        return self.known.session.status

    def observe(self) -> Observed:
        children = copy.deepcopy(self.children)
        return changed(
            self.known,
            children=children,
            has_secret=has_secret("one", children),
            pods=tuple(self.pods.values()),
            program_pods=tuple(self.program_pods),
        )

    def change(self, **fields: Any) -> None:
        self.known = changed(self.known, **fields)

    def pass_time(self, seconds: float) -> None:
        self.change(now=self.known.now + timedelta(seconds=seconds))

    # The operator.

    def operate(self, writes: int | None = None) -> Plan:
        """Reconcile once; with a number of writes, the operator crashes after that many."""
        before, snapshot = self.status, self.observe()
        plan = reconcile(snapshot, SETTINGS)
        assert plan == reconcile(snapshot, SETTINGS)
        for action in plan.actions[:writes]:
            if self.refuses and isinstance(action, Apply):
                break
            self._do(action)
        refusal = DENIED if self.refuses and any_apply(plan) else None
        if refusal is not None and self.known.answers.apply_error is None:
            self.change(apply_error=refusal)
            return plan
        self.change(apply_error=refusal)
        if plan.status is not None and (writes is None or writes > len(plan.actions)):
            self._write(plan.status)
        if writes is not None:
            self.change(completed_saves={}, failed_saves={}, pending_saves=frozenset())
            self.change(apply_error=None)
        check_conditions(before, self.status)
        return plan

    def _write(self, status: TrainingSessionStatus) -> None:
        stored = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        kept = {name: value for name, value in stored.items() if name not in self.unknown_fields}
        self.change(status=TrainingSessionStatus.model_validate(kept))

    def _do(self, action: Action) -> None:
        match action:
            case Apply(manifest):
                self._apply(manifest)
            case CreateSecret():
                self.has_secret = True
            case CreateSecretMarker(secret):
                assert self.has_secret, "there is nothing to be a secret_marker of"
                self._apply(secret_marker(secret, "uid-of-the-secret"))
            case Delete(key):
                if key == RAY_CLUSTER:
                    self.children[key]["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
                else:
                    del self.children[key]
            case SaveRequest():
                self._ask(action)
            case SetFinalizer(present):
                self.change(has_finalizer=present)
                self.is_gone = not present and self.known.session.deleted is not None
            case DeleteSession():
                self.delete()
            case RemoveModel():
                raise AssertionError("a session with its own pods has no pool cluster")

    def _apply(self, manifest: Mapping[str, Any]) -> None:
        key = ChildKey(manifest["kind"], manifest["metadata"]["name"])
        assert "suspend" not in manifest.get("spec", {}), "Kueue owns spec.suspend"
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == self.known.session.uid
        is_queued = labels.QUEUE_LABEL in manifest["metadata"].get("labels", {})
        start: Json = {"spec": {"suspend": True}} if is_queued else {}
        if key == RAY_CLUSTER and key not in self.children:
            assert not self._ending_heads(), (
                "a new head must not start before the old one has ended"
            )
        self.children[key] = merged(self.children.get(key, start), manifest)

    def _ending_heads(self) -> list[Pod]:
        pods = self.pods.values()
        return [pod for pod in pods if pod.component == "head" and pod.is_started]

    def _ask(self, request: SaveRequest) -> None:
        head = self.observe().head
        assert head is not None
        assert head.incarnation == request.incarnation
        assert request.timeout_seconds > 0
        key = (request.kind, request.incarnation)
        if request.kind == "suspend" and head.is_started:
            self.stopping.add(request.incarnation)
            self.pods[head.name] = replace(head, is_ready=False)
        error = self._unreachable()
        if error is None:
            error = self.store_error if head.is_started else LOADING_ERROR
        if error is not None:
            before = self.known.answers.failed_saves.get(key)
            attempts = before.attempts + 1 if before is not None else 1
            failure = FailedSave(error, attempts, self.known.now)
            self.change(failed_saves={**self.known.answers.failed_saves, key: failure})
        elif self.ignores_saves:
            self.change(pending_saves=self.known.answers.pending_saves | {key})
        else:
            saved = "tinker://one:train:0/weights/last" if request.kind == "checkpoint" else None
            self.change(completed_saves={**self.known.answers.completed_saves, key: saved})
            self.change(pending_saves=self.known.answers.pending_saves - {key})
            failed = {
                other: it for other, it in self.known.answers.failed_saves.items() if other != key
            }
            self.change(failed_saves=failed)

    def _unreachable(self) -> str | None:
        """Return why a request does not get to the head, if it does not."""
        if not self.has_secret:
            return "KeyError: 'token'"
        service = self.children.get(HEAD_SERVICE, {})
        if not service.get("spec"):
            return "ClientConnectionError: one-head does not resolve"
        return None

    # KubeRay, Kueue, the kubelet.

    def kuberay(self) -> None:
        """Create one missing pod, or terminate surplus ones.

        Like KubeRay 1.6, which ignores pods of a group that its spec no longer has.
        """
        cluster = self.children.get(RAY_CLUSTER)
        if cluster is not None and "deletionTimestamp" in cluster["metadata"]:
            del self.children[RAY_CLUSTER]
            cluster = None
        if cluster is None or cluster["spec"].get("suspend"):
            ends: Json = {"is_terminating": True, "disrupted": None}
            self.pods = {name: replace(pod, **ends) for name, pod in self.pods.items()}
            return
        wanted = wanted_pods(cluster)
        groups = {name.rpartition("-")[0] for name in wanted}
        for name, pod in self.pods.items():
            if name not in wanted and name.rpartition("-")[0] in groups:
                self.pods[name] = replace(pod, is_terminating=True)
                return
        for name in wanted:
            if name not in self.pods:
                self._make_pod(name)
                return

    def _make_pod(self, name: str) -> None:
        pending = {"is_scheduled": False, "is_started": False, "is_ready": False}
        uid = f"uid-{next(self._uids)}"
        self.pods[name] = a_pod(name.split("-", maxsplit=1)[0], name=name, uid=uid, **pending)
        if name == "head-0":
            self._start_head()

    def _start_head(self) -> None:
        """Let the head's process read its configuration, as mounted in the pod."""
        config = self.children.get(HEAD_CONFIG, {"data": {}})
        self.head_config = json.loads(config["data"].get("head.json", "null"))

    def kubelet(self) -> None:
        """Advance one pod by one stage."""
        for name, pod in self.pods.items():
            if pod.is_terminating:
                del self.pods[name]
                return
            stages = (pod.is_scheduled, pod.is_started, pod.is_ready)
            is_stopping = pod.is_started and pod.incarnation in self.stopping
            if pod.problem is None and not all(stages) and not is_stopping:
                stage = ("is_scheduled", "is_started", "is_ready")[stages.index(False)]
                further: Json = {stage: True}
                if stage == "is_scheduled":
                    further["node"] = min(NODES - self.known.platform.node_taints.keys())
                self.pods[name] = replace(pod, **further)
                return

    def kueue(self, *, admits: bool = True) -> None:
        """Admit or evict the RayCluster; admit an evicted one only once its pods are gone."""
        cluster = self.children.get(RAY_CLUSTER)
        if cluster is None or labels.QUEUE_LABEL not in cluster["metadata"]["labels"]:
            return
        if not (admits and cluster["spec"].get("suspend") and self.pods):
            cluster["spec"]["suspend"] = not admits

    # Kubernetes' controller of Jobs.

    def work_on_job(self) -> None:
        """Start a pod of the Job, or remove the pods of a deleted one."""
        job = self.children.get(JOB)
        if job is None:
            self.program_pods = []
        elif "conditions" not in job.get("status", {}) and not self._running_program():
            made = timestamp(self.known.now)
            self.program_pods.append(ProgramPod(made, True, False, None, None, None))

    def _running_program(self) -> list[ProgramPod]:
        return [pod for pod in self.program_pods if pod.is_running]

    def end_program(self, exit_code: int) -> None:
        """Let the program's process exit; the Job has failed after three failures."""
        job = self.children.get(JOB)
        if job is None or not self._running_program():
            return
        failure = f"exit code {exit_code}: it broke" if exit_code else None
        ended: Json = {"is_running": False, "is_ended": True, "failure": failure}
        ended["exit_code"] = exit_code or None
        self.program_pods[-1] = replace(self.program_pods[-1], **ended)
        status = job.setdefault("status", {})
        status["failed"] = status.get("failed", 0) + bool(exit_code)
        if exit_code == 0 or status["failed"] > PROGRAMS["backoffLimit"]:
            kind = "Failed" if exit_code else "Complete"
            now = timestamp(self.known.now)
            status["conditions"] = [{"type": kind, "status": "True", "lastTransitionTime": now}]

    def stop_program(self, *, asked: bool) -> None:
        if self.known.session.spec.program is not None:
            program = self.known.session.spec.program.model_copy(update={"stop": asked})
            self.change(spec=self.known.session.spec.model_copy(update={"program": program}))

    # Owners, clients and failures.

    def fail_probes_of_head(self) -> None:
        """Let the readiness probes of the head fail until the kubelet works again."""
        for name, pod in self.pods.items():
            if pod.component == "head":
                self.pods[name] = replace(pod, is_ready=False)

    def lose_pods(self, component: str) -> None:
        for name, pod in self.pods.items():
            is_lost = pod.component == component
            self.pods[name] = replace(pod, is_terminating=pod.is_terminating or is_lost)

    def restart_containers(self) -> None:
        for name, pod in self.pods.items():
            down: Json = {"is_started": False, "is_ready": False, "restarts": pod.restarts + 1}
            self.pods[name] = replace(pod, **down) if pod.is_started else pod
        self._start_head()

    def break_pods(self, problem: PodProblem | None) -> None:
        self.pods = {name: replace(pod, problem=problem) for name, pod in self.pods.items()}

    def lose_cluster(self) -> None:
        """Delete the RayCluster; the garbage collector then deletes its pods."""
        self.lose_child("RayCluster")
        ends: Json = {"is_terminating": True, "disrupted": None}
        self.pods = {name: replace(pod, **ends) for name, pod in self.pods.items()}

    def lose_child(self, kind: str) -> None:
        self.children = {key: item for key, item in self.children.items() if key.kind != kind}

    def lose_secret(self) -> None:
        """Delete the Secret; the garbage collector removes its owner references."""
        self.has_secret = False
        for child in self.children.values():
            owners = child["metadata"].get("ownerReferences", [])
            left = [owner for owner in owners if owner["kind"] != "Secret"]
            child["metadata"]["ownerReferences"] = left

    def edit_children(self) -> None:
        for child in self.children.values():
            child["metadata"]["labels"] = {"edited": "by hand"}
            child.pop("ownerReferences", None)
            child["spec" if "spec" in child else "data"] = {}

    def suspend(self, *, asked: bool) -> None:
        self.change(spec=self.known.session.spec.model_copy(update={"suspend": asked}))

    def ask_for_trainers(self, replicas: int | None) -> None:
        """Let the owner request a number of trainers, or all (None), if there are several."""
        if self.offered.trainer.replicas > 1:
            asked = None if replicas is None else TrainerOverride(replicas=replicas)
            self.change(spec=self.known.session.spec.model_copy(update={"trainer": asked}))

    def shrink_base_model(self) -> None:
        """Reduce the BaseModel to one pod of each kind."""
        trainer, sampler = self.offered.trainer, self.offered.sampler
        trainers, samplers = min(1, trainer.replicas), min(1, sampler.replicas)
        shrunk = {
            "trainer": trainer.model_copy(update={"replicas": trainers}),
            "sampler": sampler.model_copy(update={"replicas": samplers}),
        }
        self.change(base_model=self.offered.model_copy(update=shrunk))

    def taint(self, key: str, *nodes: str) -> None:
        """Let only these nodes have a taint."""
        self.change(node_taints={node: frozenset({key}) for node in nodes})

    def evict(self, component: str) -> None:
        """Delete running pods, which end when the kubelet works again."""
        for name, pod in self.pods.items():
            if pod.component == component and pod.is_ready:
                since = pod.disrupted or self.known.now
                self.pods[name] = replace(pod, is_terminating=True, disrupted=since)

    def use(self) -> None:
        self.change(last_activity=self.known.now)

    def retry(self) -> None:
        self.change(retried=self.known.now)

    def delete(self) -> None:
        if not self.known.session.has_finalizer:
            self.is_gone = True
        self.change(deleted=self.known.session.deleted or self.known.now)

    def set_ignoring_saves(self, *, ignores_saves: bool) -> None:
        self.ignores_saves = ignores_saves

    def lose_store(self, error: str | None) -> None:
        """Let the checkpoint store fail with these words, or work again."""
        self.store_error = error

    def set_refusing(self, *, refuses: bool) -> None:
        self.refuses = refuses

    def happen(self, *events: str) -> None:
        for event in events:
            if self.is_gone:
                return
            EVENTS[event](self)
            self.pass_time(1)

    def settle(self) -> Plan:
        """End all problems from outside, and let all components work until nothing changes."""
        self.refuses = False
        self.ignores_saves = False
        self.store_error = None
        self.change(has_kuberay=True, has_device_claims=True, start_order_message=None)
        self.break_pods(None)
        plan = Plan()
        for _ in range(ENOUGH_ROUNDS):
            before = (copy.deepcopy(self.children), dict(self.pods), list(self.program_pods))
            stored = self.status
            self.kueue()
            self.kuberay()
            self.kubelet()
            self.work_on_job()
            plan = self.operate()
            if self.is_gone:
                return Plan()
            # A status without the fields that the CRD does not know may be written without effect.
            is_quiet = not plan.actions and self.status == stored
            if is_quiet and before == (self.children, self.pods, self.program_pods):
                return plan
            if plan.actions and plan.requeue_after_seconds is not None:
                self.pass_time(min(plan.requeue_after_seconds, 5))
        raise AssertionError(f"does not settle: {plan}")


EVENTS: Mapping[str, Callable[[World], object]] = {
    "the operator reconciles": World.operate,
    "the operator crashes before any write": lambda world: world.operate(writes=0),
    "the operator crashes after a write": lambda world: world.operate(writes=1),
    "the operator crashes after three writes": lambda world: world.operate(writes=3),
    "KubeRay works": World.kuberay,
    "a pod advances": World.kubelet,
    "Kueue admits": World.kueue,
    "Kueue evicts": lambda world: world.kueue(admits=False),
    "the head fails its probes": World.fail_probes_of_head,
    "the head is lost": lambda world: world.lose_pods("head"),
    "the trainers are lost": lambda world: world.lose_pods("trainer"),
    "containers restart": World.restart_containers,
    "images are missing": lambda world: world.break_pods(PROBLEM),
    "images are available": lambda world: world.break_pods(None),
    "the RayCluster is deleted": World.lose_cluster,
    "the Service is deleted": lambda world: world.lose_child("Service"),
    "the Secret is deleted": World.lose_secret,
    "children are edited": World.edit_children,
    "the program starts": World.work_on_job,
    "the program crashes": lambda world: world.end_program(1),
    "the program succeeds": lambda world: world.end_program(0),
    "the Job is deleted": lambda world: world.lose_child("Job"),
    "its owner stops the program": lambda world: world.stop_program(asked=True),
    "its owner starts the program": lambda world: world.stop_program(asked=False),
    "its owner suspends it": lambda world: world.suspend(asked=True),
    "its owner resumes it": lambda world: world.suspend(asked=False),
    "a client sends a request": World.use,
    "its owner retries it": World.retry,
    "a node is cordoned": lambda world: world.taint(CORDON, "node-0"),
    "another node is cordoned": lambda world: world.taint(CORDON, "node-1"),
    "no node is cordoned": lambda world: world.taint(CORDON),
    "a node gets a spot notice": lambda world: world.taint(SPOT_NOTICE, "node-0"),
    "the trainers are evicted": lambda world: world.evict("trainer"),
    "the engines are evicted": lambda world: world.evict("sampler"),
    "the head is evicted": lambda world: world.evict("head"),
    "it is asked to leave a node": lambda world: world.change(leave_node="node-0"),
    "the head stops responding": lambda world: world.set_ignoring_saves(ignores_saves=True),
    "the head responds again": lambda world: world.set_ignoring_saves(ignores_saves=False),
    "the store is away": lambda world: world.lose_store(STORE_ERROR),
    "the store is back": lambda world: world.lose_store(None),
    "its owner requests one trainer": lambda world: world.ask_for_trainers(1),
    "its owner requests all trainers": lambda world: world.ask_for_trainers(None),
    "the BaseModel shrinks": World.shrink_base_model,
    "the BaseModel is deleted": lambda world: world.change(base_model=None),
    "the BaseModel is recreated": lambda world: world.change(base_model=world.offered),
    "KubeRay is removed": lambda world: world.change(has_kuberay=False),
    "KubeRay is installed": lambda world: world.change(has_kuberay=True),
    "the claim API is removed": lambda world: world.change(has_device_claims=False),
    "an older session waits for nodes": lambda world: world.change(
        start_order_message="waiting for other sessions to be scheduled: 2 sessions are ahead"
    ),
    "the older session is scheduled": lambda world: world.change(start_order_message=None),
    "children are rejected": lambda world: world.set_refusing(refuses=True),
    "children are accepted": lambda world: world.set_refusing(refuses=False),
    "a minute passes": lambda world: world.pass_time(60),
    "half an hour passes": lambda world: world.pass_time(1800),
    "a day passes": lambda world: world.pass_time(86400),
    "it settles": World.settle,
    "it is deleted": World.delete,
}


def merged(live: Any, wanted: Any) -> Any:
    """Return an object after a server-side apply of the wanted fields."""
    if isinstance(wanted, Mapping):
        before = live if isinstance(live, Mapping) else {}
        return {**before, **{key: merged(before.get(key), value) for key, value in wanted.items()}}
    return copy.deepcopy(wanted)


def any_apply(plan: Plan) -> bool:
    return any(isinstance(action, Apply) for action in plan.actions)


def wanted_pods(cluster: Json) -> list[str]:
    groups = cluster["spec"].get("workerGroupSpecs", [])
    workers = [f"{group['groupName']}-{n}" for group in groups for n in range(group["replicas"])]
    return ["head-0", *workers]


def ranks_in_pods(world: World) -> int:
    """Return the number of ranks that the existing pods can hold."""
    groups = world.children[RAY_CLUSTER]["spec"]["workerGroupSpecs"]
    places = {group["groupName"]: int(group["rayStartParams"]["num-cpus"]) for group in groups}
    return sum(places.get(name.rpartition("-")[0], 0) for name in world.pods)


def a_world(offer: str = "workers", *events: str) -> World:
    world = World(OFFERS[offer], is_declared=not offer.startswith("for a client"))
    world.happen(*events)
    return world
