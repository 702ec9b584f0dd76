"""Strings that two programs share: group, kinds, labels, annotations, field managers."""

GROUP = "tinkercloud.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

BASE_MODELS = "basemodels"
TRAINING_SESSIONS = "trainingsessions"

FINALIZER = f"{GROUP}/last-checkpoint"
"""Held by the operator until the session's head has been asked for a last checkpoint."""

SESSION_LABEL = f"{GROUP}/session"
"""On every child: the name of its TrainingSession."""
COMPONENT_LABEL = f"{GROUP}/component"
"""On pods: `head`, `trainer` or `sampler`."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "tinkercloud"
OWNER_LABEL = f"{GROUP}/owner"
"""On TrainingSessions that the API server made: their owner, or a hash where a label can't hold
it."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On RayClusters that Kueue admits."""

LAST_ACTIVITY = f"{GROUP}/last-activity"
"""Annotation on a TrainingSession, written by the API server at most once a minute: when a client
last used it (RFC 3339). The operator copies it into the status and culls by it."""
LAST_ACTIVITY_SECONDS = 60
"""Between two writes of it, at least."""
CREATED_FOR = f"{GROUP}/created-for"
"""Annotation on TrainingSessions that the API server made: the run or sampling session that asked
first."""
STARTED_WITH = f"{GROUP}/started-with"
"""Annotation on RayClusters: what they were made with, as spec of a BaseModel that offers it."""
HEAD_CONFIG = f"{GROUP}/head-config"
"""Annotation on RayClusters: what their head was told (`launch.HeadConfig`)."""

OPERATOR_FIELD_MANAGER = "tinkercloud-operator"
API_FIELD_MANAGER = "tinkercloud-api"

HEAD_PORT = 8000
"""Port a session head serves on, in its pod and on its Service."""
TOKEN_KEY = "token"  # noqa: S105
"""Key of a session's Secret that holds the token its head asks for."""
