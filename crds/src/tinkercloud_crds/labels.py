"""Strings that several programs share: group, kinds, labels, annotations, field managers."""

GROUP = "tinkercloud.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

BASE_MODELS = "basemodels"
TRAINING_SESSIONS = "trainingsessions"
TENANTS = "tenants"

FINALIZER = f"{GROUP}/last-checkpoint"
"""Held by the operator until the session's head has been asked for a last checkpoint."""

SESSION_LABEL = f"{GROUP}/session"
"""Label on every child: the name of its TrainingSession."""
COMPONENT_LABEL = f"{GROUP}/component"
"""Label on pods: `head`, `trainer`, `sampler` or `program`."""
SCALED_LABEL = f"{GROUP}/scaled"
"""Label on pods of engines beyond the minimum, which are started and removed with the load. The
session is Ready without them, and its disruption budget does not apply to them."""
PROGRAM_LABEL = f"{GROUP}/program"
"""Label on the pod of a program: the name of its TrainingSession. The pod has no `SESSION_LABEL`,
so that neither the policies nor the disruption budget of the session's own pods apply to it."""
PROGRAM_ID = f"{GROUP}/program-id"
"""Annotation on the Job of a program: its `spec.program.id`; empty if it has none."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "tinkercloud"
OWNER_LABEL = f"{GROUP}/owner"
"""Label on TrainingSessions that the API server created: their owner, or its hash if the owner is
not a valid label value."""
POOL_OWNER = "tinkercloud-pool"
"""`spec.owner` of the sessions of role Pool, which belong to no user."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label on RayClusters that Kueue admits."""

LAST_ACTIVITY = f"{GROUP}/last-activity"
"""Annotation on a TrainingSession, written by the API server at most once a minute: when a client
last used it (RFC 3339). The operator copies it into the status and uses it to detect idle
sessions."""
LAST_ACTIVITY_SECONDS = 60
"""Minimum interval, in seconds, between two updates of `LAST_ACTIVITY`."""
DEGRADED = f"{GROUP}/durability-degraded"
"""Annotation on a TrainingSession, written by the API server: why the head that serves its run
can't keep what `durability.level` of the BaseModel promises. The operator shows it as a
condition."""
POOL_CLOSED_UNTIL = f"{GROUP}/pool-closed-until"
"""Annotation on a BaseModel: the time (RFC 3339) until which its pool gets no new cluster. Set when
the operator is uninstalled, so that it does not replace the clusters that are deleted then."""
MOVING_TO = f"{GROUP}/moving-to"
"""Annotation on a TrainingSession that shares a pool cluster: the cluster that it is being moved
to. Set by the operator before it asks the head of `spec.poolCluster` to give the run away, and
removed when `spec.poolCluster` changes. API servers hold the run's requests meanwhile."""
DRAIN = f"{GROUP}/drain"
"""Annotation on the TrainingSession of a pool cluster, set by an administrator: if it is `true`,
the sessions on the cluster are moved to others, and the cluster is deleted."""
RETRY = f"{GROUP}/retry-requested"
"""Annotation on a TrainingSession, set by its owner or an administrator: when they asked to start
it again (RFC 3339). Failures until then no longer count towards `sessions.startDeadlineSeconds` and
`sessions.maxRestarts` of the BaseModel."""
LEAVE_NODE = f"{GROUP}/leave-node"
"""Annotation on a TrainingSession, set by `tinkercloud drain`: the node that its pods are to leave.
It has an effect while the node is cordoned."""
CREATED_FOR = f"{GROUP}/created-for"
"""Annotation on TrainingSessions that the API server created: the run or sampling session that
first requested them."""
STARTED_WITH = f"{GROUP}/started-with"
"""Annotation on RayClusters: the spec they were created with, as that of a BaseModel."""
HEAD_CONFIG = f"{GROUP}/head-config"
"""Annotation on RayClusters: the configuration of their head (`launch.HeadConfig`)."""

OPERATOR_FIELD_MANAGER = "tinkercloud-operator"
API_FIELD_MANAGER = "tinkercloud-api"

HEAD_PORT = 8000
"""Port a session head serves on, in its pod and on its Service."""
TOKEN_KEY = "token"  # noqa: S105
"""Key of a session's Secret that holds the token its head requires."""
