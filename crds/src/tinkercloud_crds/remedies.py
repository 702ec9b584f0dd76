"""What to do about the conditions that need somebody's attention.

The page about operations has the same texts, with links.
"""

from collections.abc import Mapping

from tinkercloud_crds.conditions import Reason

REMEDIES: Mapping[str, str] = {
    Reason.BASE_MODEL_NOT_FOUND: (
        "create a BaseModel with this modelName, or correct spec.baseModel in a new session"
    ),
    Reason.NOT_ALLOWED: "create another session, or change the BaseModel",
    Reason.DUPLICATE: "delete this BaseModel, or the older one with the same modelName",
    Reason.NEVER_FITS: (
        "add larger nodes or GPUs, request a smaller shape, or correct placement. If larger nodes"
        " may be created on demand, set the chart's operator.readNodes: false"
    ),
    Reason.QUOTA_TOO_SMALL: "raise the quota or shrink the session",
    Reason.NAMESPACE_QUOTA_EXCEEDED: "wait, end other sessions, or raise the quota",
    Reason.QUOTA_EXCEEDED: "wait, or end other sessions",
    Reason.QUEUED: (
        "wait, or take care of the sessions that are Unschedulable; kubectl get workloads shows why"
        " it waits"
    ),
    Reason.POOL_FULL: "wait, end other sessions, or raise pool.maxClusters",
    Reason.POOL_CLUSTER_NOT_READY: (
        "wait, or correct the pool cluster: its TrainingSession has the same reason, with details"
    ),
    Reason.UNSCHEDULABLE: "wait, add nodes, suspend idle sessions, or correct placement",
    Reason.KUBERAY_MISSING: "install KubeRay; the operator notices within seconds",
    Reason.KUBERAY_TOO_OLD: (
        "upgrade KubeRay to 1.6 or newer, including its CRDs, which helm upgrade does not"
        " change; the operator notices within a minute"
    ),
    Reason.KUBERAY_SILENT: (
        "check that KubeRay's operator runs and watches the namespace, and read its log"
    ),
    Reason.DEFINITIONS_OUTDATED: "upgrade the definitions: helm upgrade tinkercloud-crds",
    Reason.SCHEDULING_GATED: (
        "wait, or find out who set the scheduling gates: Kueue removes its own at admission"
    ),
    Reason.NODE_NOT_READY: (
        "wait: Kubernetes moves its pods after five minutes. Delete a node that is gone for good"
    ),
    Reason.DELETION_STUCK: (
        "remove the finalizer that the message names, or have its owner do it; if the node is"
        " gone for good, delete the Node, or the pod with --force"
    ),
    Reason.IMAGE_PULL_BACK_OFF: (
        "check the name of the image in the BaseModel (then suspend and resume the session),"
        " image.pullSecrets, and the registry"
    ),
    Reason.CONFIGURATION_ERROR: (
        "create or correct the object or setting that the message names. Pods wait for a missing"
        " mounted Secret (external.keySecretName) as Provisioning or Loading: kubectl describe pod"
        " names it"
    ),
    Reason.OUT_OF_MEMORY: (
        "raise resources.memory, then suspend and resume the session; sequence lengths and"
        " maxBatchTokens determine the need"
    ),
    Reason.OUT_OF_DISK: (
        "raise resources.scratch (or sharedMemory) in the BaseModel: a downloaded model must"
        " fit there. Then suspend and resume the session"
    ),
    Reason.POD_FAILED: (
        "wait: the pod is recreated. If that repeats, repair its node, which the message quotes"
    ),
    Reason.CRASH_LOOP: "read the last output of the pod: kubectl logs POD --previous",
    Reason.APPLY_FAILED: (
        "correct the cause in the message: often an admission policy, or a feature that the"
        " cluster lacks. A session whose pods are all ready stays Ready; ClusterProvisioned then"
        " has the message"
    ),
    Reason.SAVE_FAILED: (
        "repair the store (space, credentials, network). To release the pods without the latest"
        " state, delete the session"
    ),
    Reason.MOVE_FAILED: "repair the checkpoint store (space, credentials, network)",
    Reason.WRITES_FAIL: (
        "free or repair the disk or the checkpoint store, or raise head.resources.scratch if"
        " there is no room for a snapshot; the run is then durable again by itself"
    ),
    Reason.START_FAILED: (
        "fix the cause, then retry the session if it ran before or was declared. Otherwise create"
        " another one: it is over, and its client was notified"
    ),
    Reason.RESTART_LIMIT: "fix the cause, then retry the session",
}
"""By reason, in the order of the page. Conditions with other reasons need no attention."""
