"""What to do about the conditions that need somebody's attention.

The page about operations has the same texts, with links.
"""

from collections.abc import Mapping

from tinkercloud_crds.conditions import Reason

REMEDIES: Mapping[str, str] = {
    Reason.BASE_MODEL_NOT_FOUND: "create one, or correct spec.baseModel in a new session",
    Reason.NOT_ALLOWED: "create another session, or change the BaseModel",
    Reason.DUPLICATE: "delete one of them",
    Reason.NEVER_FITS: (
        "larger nodes or GPUs, a smaller shape, or other placement. If larger nodes may be"
        " created on demand, set the chart's operator.readNodes: false"
    ),
    Reason.QUOTA_TOO_SMALL: "raise the quota or shrink the session",
    Reason.NAMESPACE_QUOTA_EXCEEDED: "wait, end other sessions, or raise the quota",
    Reason.QUOTA_EXCEEDED: "wait, or end other sessions",
    Reason.QUEUED: (
        "wait; kubectl get workloads shows why; or take care of the sessions that are Unschedulable"
    ),
    Reason.POOL_FULL: "wait, end other sessions, or raise pool.maxClusters",
    Reason.POOL_CLUSTER_NOT_READY: "as for that reason, on the TrainingSession of the cluster",
    Reason.UNSCHEDULABLE: "wait, add nodes, suspend idle sessions, or correct placement",
    Reason.KUBERAY_MISSING: "install KubeRay; the operator notices within seconds",
    Reason.KUBERAY_TOO_OLD: (
        "upgrade KubeRay to 1.6 or newer, including its CRDs, which helm upgrade does not"
        " change; the operator notices within a minute"
    ),
    Reason.KUBERAY_SILENT: (
        "check that KubeRay's operator runs and watches the namespace, and read its log"
    ),
    Reason.DEFINITIONS_OUTDATED: "helm upgrade tinkercloud-crds",
    Reason.SCHEDULING_GATED: "wait, or find out who set them: Kueue removes its own at admission",
    Reason.NODE_NOT_READY: (
        "wait: Kubernetes moves its pods after five minutes. Delete a node that is gone for good"
    ),
    Reason.DELETION_STUCK: (
        "remove the finalizer, or have its owner do it; if the node is gone for good, delete"
        " the Node, or the pod with --force"
    ),
    Reason.IMAGE_PULL_BACK_OFF: (
        "check its name in the BaseModel (then suspend and resume the session),"
        " image.pullSecrets, and the registry"
    ),
    Reason.CONFIGURATION_ERROR: (
        "the message names it. A missing mounted Secret (external.keySecretName) is different:"
        " pods wait for it as Provisioning or Loading, and kubectl describe pod names it"
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
        "wait; the message quotes the node. If it keeps happening, repair that node"
    ),
    Reason.CRASH_LOOP: "kubectl logs of the pod, --previous",
    Reason.APPLY_FAILED: (
        "read the message; often an admission policy, or a feature that the cluster lacks. A"
        " session whose pods are all ready stays Ready; ClusterProvisioned then has the message"
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
        "a session that never ran is over: its client was notified and may create another. If"
        " it ran before or was declared, it is kept: fix the cause, then retry it"
    ),
    Reason.RESTART_LIMIT: "fix the cause, then retry it",
}
"""By reason, in the order of the page. Conditions with other reasons need no attention."""
