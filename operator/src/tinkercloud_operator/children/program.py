"""The Job of a session's program, and the NetworkPolicy of its pod.

A program is code of a user. Its pod meets the Restricted Pod Security Standard, has bounded
resources and no service account token, and reaches the API server only. It carries neither the
labels of the session's own pods, to which policies and budgets apply, nor the service account and
labels of session pods, to which a cloud provider may give credentials of the checkpoint store.
"""

from dataclasses import dataclass

from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_crds.pods.program_fields import Program, Programs
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.children.pods import CA_FOLDER, Json, ca_variables, pod_security
from tinkercloud_operator.children.support_objects import DNS_PORTS
from tinkercloud_operator.settings import Settings
from tinkercloud_protocol.programs import program_messages

CONTAINER = "program"
_FOLDER = "/program"
_SOURCE_FOLDER = "/source"
_SOURCE_FILE = "program.py"


@dataclass(frozen=True, slots=True)
class ProgramBuild:
    """The input from which a program's children are built."""

    names: Names
    session: TrainingSessionSpec
    program: Program
    """The session's `program`."""
    offer: Programs
    """The `programs` of the session's BaseModel."""
    settings: Settings
    api_url: str


def program_job(build: ProgramBuild) -> Json:
    """Return the Job, which restarts the program in another pod when it fails.

    An eviction is not a failure of the program, and one that exits with `EXIT_FINAL` would fail
    again.
    """
    deadline = build.offer.active_deadline_seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": build.names.program,
            "annotations": {labels.PROGRAM_ID: build.program.id or ""},
        },
        "spec": {
            "backoffLimit": build.offer.backoff_limit,
            **({} if deadline is None else {"activeDeadlineSeconds": deadline}),
            # Two pods would train the same model at once.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "In",
                            "values": [program_messages.EXIT_FINAL],
                        },
                    },
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": _pod_template(build),
        },
    }


def program_policy(build: ProgramBuild) -> Json:
    """Return the NetworkPolicy of the pod: DNS and the API server, and no connections to it."""
    settings = build.settings
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": build.names.program},
        "spec": {
            "podSelector": {"matchLabels": {labels.PROGRAM_LABEL: build.names.session}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [
                {"ports": DNS_PORTS},
                {
                    "to": [{"podSelector": {"matchLabels": settings.api_labels}}],
                    "ports": [{"protocol": "TCP", "port": settings.api_port}],
                },
            ],
        },
    }


def _pod_template(build: ProgramBuild) -> Json:
    settings = build.settings
    spec: Json = {
        "restartPolicy": "Never",
        "serviceAccountName": "default",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # A process that is the first of its container ignores SIGTERM unless it has a handler.
        "shareProcessNamespace": True,
        "securityContext": pod_security(settings),
        "containers": [_container(build)],
        "volumes": _volumes(build),
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return {
        "metadata": {
            "labels": {
                labels.PROGRAM_LABEL: build.names.session,
                labels.COMPONENT_LABEL: CONTAINER,
                labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
            },
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        },
        "spec": spec,
    }


def _container(build: ProgramBuild) -> Json:
    program, needs = build.program, build.offer.resources
    policy = build.settings.image_pull_policy
    bounds = {"cpu": needs.cpu, "memory": needs.memory}
    what = ["-m", program.module] if program.module else [f"{_SOURCE_FOLDER}/{_SOURCE_FILE}"]
    return {
        "name": CONTAINER,
        "image": build.offer.image_of(program),
        **({} if policy is None else {"imagePullPolicy": policy}),
        "command": ["python", *what],
        "args": [_literal(arg) for arg in program.args],
        "workingDir": _FOLDER,
        "env": _variables(build),
        "resources": {"requests": bounds, "limits": bounds},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "program", "mountPath": _FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
            *(
                [{"name": "source", "mountPath": _SOURCE_FOLDER, "readOnly": True}]
                if program.source_secret is not None
                else []
            ),
            *(
                [{"name": "ca-bundle", "mountPath": CA_FOLDER, "readOnly": True}]
                if build.settings.ca_config_map is not None
                else []
            ),
        ],
        # The status then shows the last line of the log of a failed program.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _volumes(build: ProgramBuild) -> list[Json]:
    size = build.offer.resources.scratch
    volumes: list[Json] = [
        {"name": "program", "emptyDir": {"sizeLimit": size}},
        {"name": "tmp", "emptyDir": {"sizeLimit": size}},
    ]
    source, authorities = build.program.source_secret, build.settings.ca_config_map
    if source is not None:
        items = [{"key": source.key, "path": _SOURCE_FILE}]
        content = {"secretName": source.name, "items": items, "defaultMode": 0o440}
        volumes.append({"name": "source", "secret": content})
    if authorities is not None:
        volumes.append({"name": "ca-bundle", "configMap": {"name": authorities}})
    return volumes


def _variables(build: ProgramBuild) -> list[Json]:
    """Return the environment. The definition of a session refuses to name what must be ours."""
    program, session, key = build.program, build.session, build.program.api_key_secret
    values = {
        **{each["name"]: each["value"] for each in ca_variables(build.settings)},
        "HOME": _FOLDER,
        "PYTHONUNBUFFERED": "1",
        program_messages.BASE_URL: build.api_url,
        program_messages.HF_ENDPOINT: f"{build.api_url}/hf",
        program_messages.BASE_MODEL: session.base_model,
        program_messages.STATE_DIR: _FOLDER,
    }
    if program.id is not None:
        values[program_messages.PROGRAM_ID] = program.id
    if session.model_id is not None:
        values[program_messages.MODEL_ID] = session.model_id
    else:
        # Models that the program creates are then served by this session.
        values["TINKER_TAGS"] = f"{labels.GROUP}/session={build.names.session}"
    values |= {variable.name: variable.value for variable in program.env}
    reference = {"secretKeyRef": {"name": key.name, "key": key.key}}
    return [
        {"name": program_messages.API_KEY, "valueFrom": reference},
        *({"name": name, "value": _literal(value)} for name, value in values.items()),
    ]


def _literal(text: str) -> str:
    """Return a text in which Kubernetes replaces no variables."""
    return text.replace("$", "$$")
