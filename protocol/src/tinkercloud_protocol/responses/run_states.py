"""Responses about runs as their clients left them: how each is doing, and how it continues.

None of these is an SDK call.
"""

from datetime import datetime
from typing import Literal

from tinkercloud_protocol.responses.listings import Answer

RunState = Literal[
    "live", "suspended", "on disk", "dedicated", "waiting", "ending", "lost", "ended", "unknown"
]
"""Where a run's model is.

`live`: in the memory of a session head. `suspended`: in the checkpoint store, and `on disk`: in its
journal, until its next request. `dedicated`: in a Kubernetes session of its own. `waiting`: not
created yet. `ending`: its Kubernetes session is being deleted, and its head saves a last
checkpoint. `lost`: its head stopped without saving it. `ended`: deleted by its owner or client.
`unknown`: the store or disk that would have it does not respond.
"""

RunStatus = Literal["open", RunState, "running", "idle"]
"""What runs are searched by: where their models are, or what their requests wait for.

`open`: not ended. `running` and `idle`: the model is in the memory of a session head, with or
without a running request. `waiting`: the model is not created yet, or the next request waits. For
the other values, see `RunState`.
"""


class CurveMetric(Answer):
    """A metric in some successive optimizer steps."""

    mean: float | None
    """Mean of its finite values; None if there is none."""
    low: float | None
    high: float | None
    not_finite: int
    """Number of steps with NaN or an infinite value."""


class RunInfo(Answer):
    """A run."""

    run_id: str
    owner: str
    project_id: str | None = None
    name: str | None = None
    """Display name of its session."""
    base_model: str
    lora_rank: int | None = None
    """None: all weights are trained."""
    state: RunState
    reason: str | None = None
    """Why it is in this state, and which saved state is left; None if the state says enough."""
    remedy: str | None = None
    """What to do if its model is lost or its request waits for a limit; None otherwise."""
    step: int | None = None
    """Number of optimizer steps taken, of an ended run as last reported; None if no running head,
    saved state or report has it."""
    loss: CurveMetric | None = None
    """The loss at the end of its curve; None before it has reported one."""
    unsaved_steps: int | None = 0
    """Number of changes, mostly optimizer steps, that are in no checkpoint; None if a run is
    on a disk, whose journal is not counted, or has ended, in a list."""
    tokens_per_minute: float = 0.0
    """Trained and sampled tokens of the last minute."""
    queue_state: str = "idle"
    """What its next request waits for: idle, running, waiting, paused_rate_limit or
    paused_capacity."""
    queue_reason: str | None = None
    """Why it waits."""
    cluster: str | None = None
    """The pool cluster on which it has a slot (Kubernetes); None if it has none."""
    memory_bytes: int | None = None
    """None if it is not known."""
    created_at: datetime
    last_request_at: datetime
    """Time of its last request, as stored in the catalog, which is updated every 30 seconds."""
    last_seen_at: datetime
    """Time of its client's last sign of life: a heartbeat of the session or a request."""
    is_connected: bool = False
    """Whether the client of its session has sent a heartbeat within two minutes."""


class RunList(Answer):
    """GET runs."""

    runs: list[RunInfo]
    total_count: int


class RunCheckpoint(Answer):
    """A training checkpoint from which a run can continue."""

    tinker_path: str
    step: int
    """Number of optimizer steps that it has."""
    time: datetime
    size_bytes: int
    is_automatic: bool
    """Whether the head wrote it by itself; while the run lives, the head also deletes it."""


class RunDetails(RunInfo):
    """GET runs/{id}."""

    checkpoints: list[RunCheckpoint]
    """The newest training checkpoints, newest first."""
    user_metadata: dict[str, str]
    """What its client gave it when it created it, by name."""
    session_metadata: dict[str, str]
    """What its client gave its session, likewise."""
    tags: list[str]
    """Tags of its session."""


class RunCurvePoint(Answer):
    """Some successive optimizer steps."""

    step: int
    """The optimizer's number of the last of them."""
    steps: int
    """Number of steps."""
    time: datetime
    """Time of the last of them."""
    metrics: dict[str, CurveMetric]
    """By name: `loss`, of a step's tokens, data or targets, `grad_norm`, `learning_rate`, `tokens`,
    `tokens_per_second` since the point before, and `kl` with losses that compare policies."""


class LoggedPoint(Answer):
    """A value that the client has logged."""

    step: int
    value: float
    time: datetime


class RunCurve(Answer):
    """GET runs/{id}/curve."""

    run_id: str
    points: list[RunCurvePoint]
    """The earliest first. Steps are in the order in which they were taken; their number becomes
    smaller where the run loaded an earlier checkpoint."""
    logged: dict[str, list[LoggedPoint]]
    """What the client has logged with POST runs/{id}/metrics, by name, in the order of steps."""


class RunSample(Answer):
    """A prompt and the answer to it, of which the text was kept."""

    step: int
    """Number of optimizer steps that the sampled weights had taken."""
    time: datetime
    """When its request started."""
    prompt: str
    """The end of the prompt, with special tokens."""
    prompt_tokens_left_out: int
    """Number of tokens before it that were not kept."""
    answer: str
    """The start of the answer, with special tokens."""
    answer_tokens_left_out: int
    """Number of tokens after it that were not kept."""


class RunSamples(Answer):
    """GET runs/{id}/samples."""

    run_id: str
    keep: bool
    """Whether the text of further samples is kept."""
    samples: list[RunSample]
    """The newest first."""


class RunRequest(Answer):
    """A request of a run that has finished."""

    target: str
    """The run, or a sampling session of its weights."""
    name: str
    """What was requested, such as `forward_backward` or `sample`."""
    request_id: str | None = None
    """The HTTP request; None for one that an earlier head had accepted."""
    accepted_at: datetime
    wait_seconds: float
    """From its acceptance until its turn."""
    run_seconds: float
    """From then until its result was there; of a save, until the state was captured."""
    paused_seconds: float
    """The part of `wait_seconds` in which its owner had to retrieve results, or had used the tokens
    of the minute (`tokensPerMinute`)."""
    tokens: int
    """Tokens that were computed for it."""


class RunTimeline(Answer):
    """GET runs/{id}/timeline."""

    run_id: str
    requests: list[RunRequest]
    """Those that finished last, the latest first."""
    reason: str | None = None
    """Why they are not known; None if they are."""


class RunSaved(Answer):
    """POST runs/{id}/save."""

    tinker_path: str
    step: int


class RunStopped(Answer):
    """POST runs/{id}/stop."""

    state: Literal["suspended", "ended"]
    tinker_path: str | None = None
    """The checkpoint with its last state; None if it was suspended, or had no state to save."""
