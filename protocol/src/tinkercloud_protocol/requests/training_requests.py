"""Requests about models under training, as the SDK sends them in JSON.

`forward_backward` is defined in `payloads`, because its body is protobuf.
"""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    StringConstraints,
    model_validator,
)

from tinkercloud_protocol.programs.rlve import RlveConfig
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Name, TtlSeconds, Uri, UserMetadata, WireModel
from tinkercloud_protocol.wire.paths import is_reserved

SeqId = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Position in the model's order of requests; the SDK counts from 1 without gaps. A request without
one comes after all that have arrived."""
Recipients = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=8192)]],
    Field(min_length=1, max_length=10),
]
"""Public keys of age (https://age-encryption.org): `age1...`, or an SSH key. An empty list is
rejected, because it could be a mistake whose result would be unencrypted."""


def _not_reserved(name: str) -> str:
    if is_reserved(name):
        raise ValueError(
            f"the name {name[:160]!r} is reserved for automatic checkpoints; choose one that"
            " does not start like this"
        )
    return name


TrainingName = Annotated[Name, AfterValidator(_not_reserved)]
"""Name of a training checkpoint that is not an automatic one."""


class OptimizerConfig(WireModel):
    """The type of optimizer, which is fixed when the model is created."""

    type: Name = "adamw"


def _without_rank_0(config: object) -> object:
    """Return None for an adapter of rank 0, by which clients of the SDK ask for full fine-tuning.

    Raises:
        ValueError: It excludes layers, which full fine-tuning cannot do.
    """
    if not isinstance(config, dict) or config.get("rank") != 0 or config["rank"] is False:
        return config
    excluded = [name for name in _LAYERS if config.get(name, True) is not True]
    if excluded:
        raise ValueError(
            f"rank 0 means full fine-tuning, which trains all layers; remove {', '.join(excluded)},"
            " or set a rank of at least 1"
        )
    return None


_LAYERS = ("train_attn", "train_mlp", "train_unembed")


class CreateModelRequest(WireModel):
    """POST create_model: start a training run."""

    session_id: Name | None = None
    """Absent means a new session."""
    model_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Absent means the lowest number that the session has not used."""
    base_model: Annotated[Name, Field(validation_alias=AliasChoices("base_model", "model_name"))]
    user_metadata: UserMetadata | None = None
    lora_config: Annotated[LoraConfig | None, BeforeValidator(_without_rank_0)] = None
    """Absent, or with a rank of 0, means full fine-tuning."""
    optimizer_config: OptimizerConfig = OptimizerConfig()
    rlve_config: RlveConfig | None = None
    """If enabled, a program on the server trains the model."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Number of datums that the client will send in one request. The server rejects a number that
    it would not accept; a lower one does not limit the client."""
    max_seq_len: Annotated[int, Field(ge=1)] | None = None
    """Length of the sequences, in tokens, that the client will send; as `max_batch_size`."""


class LoadWeightsRequest(WireModel):
    """POST load_weights, in both of its forms.

    In place: `model_id` names an existing model, and `seq_id` the request's position in its order,
    if it has one. Create-via-load: `session_id` and `model_seq_id` start a new run from a
    checkpoint.
    """

    path: Uri
    optimizer: bool = False
    """Whether the optimizer state is restored too."""
    model_id: Name | None = None
    seq_id: SeqId | None = None
    session_id: Name | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    base_model: Name | None = None
    user_metadata: UserMetadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Name | None = None
    """Key of an owner who may read the checkpoint; absent means that the caller may."""

    @model_validator(mode="after")
    def _has_one_form(self) -> "LoadWeightsRequest":
        in_place = self.model_id is not None
        create = self.session_id is not None and self.model_seq_id is not None
        if in_place == create:
            raise ValueError(
                "set either model_id (load into an existing model) or session_id and model_seq_id"
                " (create a model from the checkpoint)"
            )
        return self


class OtherOptimizerParams(WireModel):
    """Parameters of an optimizer family other than Adam; only the family's name is read."""

    type: Name


class OptimStepRequest(WireModel):
    """POST optim_step: apply the accumulated gradient."""

    model_id: Name
    seq_id: SeqId | None = None
    adam_params: AdamParams | None = None
    optimizer_params: OtherOptimizerParams | None = None

    def adam(self) -> AdamParams:
        """Return the step's Adam hyperparameters.

        Raises:
            InvalidRequest: The request has no Adam hyperparameters.
        """
        if self.adam_params is not None:
            return self.adam_params
        family = self.optimizer_params.type if self.optimizer_params else None
        raise InvalidRequest(
            f"optimizer {family!r} is not supported, because it has no public definition; send"
            " adam_params (AdamW)"
        )


def default_name(seq_id: int) -> str:
    """Return the name of the checkpoint that a request of this number without a name writes."""
    return f"step-{seq_id:06d}"


class SaveWeightsRequest(WireModel):
    """POST save_weights: write a training checkpoint."""

    model_id: Name
    seq_id: SeqId | None = None
    path: TrainingName | None = None
    """Name of the checkpoint; absent means a name derived from the seq_id."""
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: UserMetadata | None = None

    def name(self) -> str:
        """Return the checkpoint's name; a request without `path` must have a number."""
        return self.path if self.path is not None else default_name(self.seq_id or 0)


class SaveWeightsForSamplerRequest(WireModel):
    """POST save_weights_for_sampler: publish the current weights for sampling.

    With `sampling_session_seq_id`, they serve one new sampling session and are kept while it can be
    used; otherwise they become a checkpoint.
    """

    model_id: Name
    seq_id: SeqId | None = None
    path: Name | None = None
    """Name of the checkpoint; absent means a name derived from the seq_id."""
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: UserMetadata | None = None

    @model_validator(mode="after")
    def _has_one_target(self) -> "SaveWeightsForSamplerRequest":
        if self.path is not None and self.sampling_session_seq_id is not None:
            raise ValueError(
                "set path (a named checkpoint), sampling_session_seq_id (a sampler of this session)"
                " or neither (a checkpoint named by the number of the request), not both"
            )
        return self

    def name(self) -> str | None:
        """Return the checkpoint's name; None if there is none, but a sampling session.

        A request without `path` must have a number.
        """
        if self.sampling_session_seq_id is not None:
            return None
        return self.path if self.path is not None else default_name(self.seq_id or 0)


class SaveWeightsExternalRequest(WireModel):
    """POST save_weights_external: write the current weights as files for other programs."""

    model_id: Name
    seq_id: SeqId | None = None
    path: Name
    """Name of the checkpoint."""
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Recipients | None = None
    """Public keys that every file is encrypted to. Absent means unencrypted."""


class AttachModelRequest(WireModel):
    """POST attach_model: continue the order of a model that another client created or trained.

    Requests that are waiting fail, a running one is awaited, and the accumulated gradient is
    dropped: what remains is the model after its last optim_step. Numbers continue beyond all that
    the other client can send, so that its later requests are refused.
    """

    model_id: Name


class AttachModelAnswer(WireModel):
    """The position from which the order of the model continues."""

    model_id: str
    next_seq_id: int
    """Number of the next request."""
    step: int | None = None
    """Number of optimizer steps that the model has taken; absent from heads before 0.1.0."""


class GetInfoRequest(WireModel):
    """POST get_info: describe a model."""

    model_id: Name
