"""Sampling requests, as the SDK sends them in JSON."""

import secrets
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from tinkercloud_protocol.requests.image_files import (
    ASSET_POINTER,
    IMAGE,
    TEXT,
    ImagePart,
    read_json_image,
    why_refused,
)
from tinkercloud_protocol.wire.bounds import MAX_TOKENS_AT_A_POSITION
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Items, Name, Uri, WireModel, describe, parse_json

MAX_TOP_LOGPROBS = MAX_TOKENS_AT_A_POSITION
MAX_SAMPLES = 1024
"""Maximum number of samples of one request."""
MAX_CHUNKS = 1 << 16
MAX_VALUES = 1 << 22
"""Maximum number of prompt tokens and tensor values per request. Parsing JSON blocks all other
work, and this many values take half a second."""
_OTHER_OBJECTS = 64
"""JSON objects of a request that are not chunks, with a margin for braces in stop strings."""
TokenId = int
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Chunk(WireModel):
    """One piece of a prompt: text, or an image. Other types are rejected by name."""

    type: Name = TEXT
    tokens: Items[TokenId] | None = None
    """Token ids of a text."""
    data: str | None = None
    """The file of an image, in base64."""
    location: str | None = None
    """The file of an image, as a `data:` URL."""
    format: str | None = None
    """Format of an image, "png" or "jpeg"."""
    expected_tokens: int | None = None
    """Number of tokens that the client counts for an image."""
    override_dimensions: JsonValue = None
    """Rejected: images have the size of their file."""

    @model_validator(mode="after")
    def _is_served(self) -> "Chunk":
        if self.type not in {TEXT, IMAGE, ASSET_POINTER}:
            raise ValueError(why_refused(self.type))
        if self.type == TEXT and self.tokens is None:
            raise ValueError("tokens: required in an 'encoded_text' chunk")
        return self

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields that it has, so that digests of texts do not depend on new ones."""
        return {name: value for name, value in serialize(self).items() if value is not None}

    @property
    def token_ids(self) -> list[TokenId]:
        """Its text tokens; none if it is an image."""
        return self.tokens or [] if self.type == TEXT else []


_SHORT_FORMS = ("tokens", "input_ids")
"""Names of a prompt's token ids in objects without chunks."""


class ModelInput(WireModel):
    """A prompt: the concatenation of its chunks.

    Also accepted, with the same meaning: `{"tokens": [...]}`, `{"input_ids": [...]}`, and a list.
    """

    chunks: Annotated[Items[Chunk], Field(max_length=MAX_CHUNKS)]

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, value: object) -> object:
        if isinstance(value, list):
            return {"chunks": [{"tokens": value}]}
        if not isinstance(value, dict) or value.get("chunks") is not None:
            return value
        given = [name for name in _SHORT_FORMS if value.get(name) is not None]
        if len(given) != 1:
            raise ValueError("set one of chunks, tokens and input_ids")
        return {"chunks": [{"tokens": value[given[0]]}]}

    def token_ids(self) -> list[TokenId]:
        """Return the token ids of the prompt's text."""
        if len(self.chunks) == 1:
            return self.chunks[0].token_ids
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt's text."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_images(self) -> int:
        """Number of its images."""
        return sum(chunk.type != TEXT for chunk in self.chunks)

    def images(self) -> tuple[ImagePart, ...]:
        """Return the prompt's images. Decodes base64, so call it in a thread if there are any.

        Raises:
            InvalidRequest: one of them is invalid.
        """
        found, offset = [], 0
        for index, chunk in enumerate(self.chunks):
            if chunk.type != TEXT:
                fields = chunk.model_dump(exclude={"tokens"})
                found.append(read_json_image(fields, offset, f"prompt.chunks[{index}]"))
            offset += len(chunk.token_ids)
        return tuple(found)


_BIAS_ENTRIES = 1024
_Penalty = Annotated[float, Field(ge=-2, le=2)]


def _few_biases(biases: object) -> object:
    # Checked before the entries, because each error would be kept in memory.
    if isinstance(biases, dict) and len(biases) > _BIAS_ENTRIES:
        raise ValueError(f"has {len(biases)} entries; at most {_BIAS_ENTRIES} are accepted")
    return biases


class LogitParams(WireModel):
    """How a sequence's logits are changed before a token is sampled.

    The changes come in this order, before the temperature: biases, repetition penalty, the other
    penalties. The logprobs that are returned are those of the unchanged logits.
    """

    frequency_penalty: _Penalty = 0.0
    """Subtracted from a token's logit for each time that it was sampled in this sequence."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens that were sampled in this sequence."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the positive logits of tokens that are in the prompt or were sampled, and multiplies
    the negative ones."""
    logit_bias: Annotated[
        dict[
            Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ],
        BeforeValidator(_few_biases),
    ] = {}  # noqa: RUF012 - pydantic copies it
    """Added to the logits of these token ids, which JSON writes in quotes."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only tokens that are at least this likely, relative to the likeliest; after the
    temperature, and before top_k and top_p."""


class SamplingParams(LogitParams):
    """How to sample a sequence."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens to sample. If absent, up to the model's context length, but at least
    one; the last one may lie just beyond it, because it is not read again."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Equal seeds produce equal samples. If absent, a random seed is used. Inference servers
    produce the k-th sample of a request as the first one of seed + k."""
    stop: str | Items[str] | Items[TokenId] | None = None
    """None stops at the model's end tokens; strings or token ids stop there too; [] never stops."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 takes the most likely token. The server's configuration says of which distribution the
    returned logprobs are: the model's own, or that of this temperature."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample from the k most likely tokens; -1 and 0 mean all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability."""

    @model_serializer(mode="wrap")
    def _without_unused_changes(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without unused changes: digests must not depend on new ones."""
        unused = {
            name
            for name, field in LogitParams.model_fields.items()
            if getattr(self, name) == field.default
        }
        return {name: value for name, value in serialize(self).items() if name not in unused}


class WireTensor(WireModel):
    """A tensor in JSON, dense or CSR (rows x columns)."""

    data: Items[Int64] | Items[float]
    dtype: Literal["int64", "float32"]
    shape: Items[Annotated[int, Field(ge=0, lt=2**63)]] | None = None
    sparse_crow_indices: Items[Int64] | None = None
    sparse_col_indices: Items[Int64] | None = None


def free_sample_number(number: int) -> int:
    """Return a number for a sampling request that has none, made from any integer.

    It is at least 2**62. The SDK counts from 0, and its k-th unpickled client from k * 10**9.
    """
    return 2**62 + number % 2**62


def _random_sample_number() -> int:
    return free_sample_number(secrets.randbits(62))


class SampleRequest(WireModel):
    """POST asample: sample continuations of a prompt, and optionally score the prompt."""

    sampling_session_id: Name = ""
    """Absent if the request names weights (`NamedWeights`): the API server then says which sampling
    session has them."""
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] = Field(default_factory=_random_sample_number)
    """Number of the request in its sampling session. If absent, a random one."""
    prompt: ModelInput
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    """Score only this many of the prompt's last tokens."""
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """Number of most likely tokens to return at each prompt position, together with the logprobs of
    the prompt itself."""
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    target_prompt_logprobs: WireTensor | None = None
    """Token ids to score, int64 [len(prompt) - 1, K]; row i is scored at position i + 1. -1 means
    no token, and its score is 0.0."""
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """Number of tokens to sample at every prompt position after the first."""
    record_stability_info: bool | None = None
    """Accepted without effect: only the loss stable_reinforce, which has no public definition, uses
    what the SDK asks for. Sequence ids are returned in any case."""

    @model_validator(mode="after")
    def _check_supported(self) -> "SampleRequest":
        if self.prompt_logprobs_last_n is not None and not self.scores_prompt:
            raise ValueError(
                "prompt_logprobs_last_n needs prompt_logprobs to be true, or topk_prompt_logprobs"
            )
        return self

    @property
    def is_numbered(self) -> bool:
        """Whether the client has numbered it."""
        return "seq_id" in self.model_fields_set

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own logprobs are returned."""
        return bool(self.prompt_logprobs) or self.topk_prompt_logprobs > 0


class NamedWeights(WireModel):
    """Weights to sample from, as requests without a sampling session name them."""

    model_id: Name | None = None
    """The current weights of a model in training."""
    model_path: Uri | None = None
    """A saved checkpoint."""
    base_model: Name | None = None
    """A served base model. With `model_path`, the one that the checkpoint must be of."""

    @model_validator(mode="after")
    def _is_one(self) -> "NamedWeights":
        others = [self.model_path, self.base_model]
        if (self.model_id is None) == (others == [None, None]):
            raise ValueError(
                "set one of sampling_session_id, model_id (a model's current weights), model_path"
                " (a checkpoint) and base_model (a served model)"
            )
        return self

    @classmethod
    def named_in(cls, body: bytes) -> "NamedWeights":
        """Return the weights that the body of a request names.

        Raises:
            InvalidRequest: it names none, or too many.
        """
        return parse_json(cls, body)

    @classmethod
    def read(cls, fields: dict[str, str]) -> "NamedWeights":
        """Return the weights of these fields.

        Raises:
            InvalidRequest: they name none, or too many.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InvalidRequest(describe(error)) from None

    def as_header(self) -> str:
        """Return them as a header: the weights that the API server has found for a request."""
        return quote(self.model_dump_json(exclude_none=True))


class CreateSamplingClientRequest(NamedWeights):
    """POST create_sampling_client: a sampling session of some weights, as asample names them."""

    session_id: Name | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _has_whole_number(self) -> "CreateSamplingClientRequest":
        if self.sampling_session_seq_id is not None and self.session_id is None:
            raise ValueError("session_id: required with sampling_session_seq_id")
        return self


class CreateSamplingSessionRequest(WireModel):
    """POST create_sampling_session: sample from a base model or from a saved checkpoint."""

    session_id: Name
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**31)]
    base_model: Name | None = None
    model_path: Uri | None = None

    @model_validator(mode="after")
    def _has_weights(self) -> "CreateSamplingSessionRequest":
        if self.base_model is None and self.model_path is None:
            raise ValueError("set base_model (a served model) or model_path (a checkpoint)")
        return self


class RetrieveFutureRequest(WireModel):
    """POST retrieve_future: wait for a request's result."""

    request_id: Name
    allow_metadata_only: bool = False


class CancelFutureRequest(WireModel):
    """POST cancel_future: the client no longer waits for this sample."""

    request_id: Name


def parse_sample(body: bytes) -> SampleRequest:
    """Read a sampling request.

    Raises:
        InvalidRequest: The request is invalid, or has too many chunks or values. They are counted
            before parsing, because a parsed chunk needs a hundred times its size.
    """
    values = body.count(b",")
    if values > MAX_VALUES:
        raise InvalidRequest(
            f"prompt, target_prompt_logprobs: the request has {values} values; at most"
            f" {MAX_VALUES} are accepted. Score fewer tokens per request"
        )
    objects = body.count(b"{")
    if objects > MAX_CHUNKS + _OTHER_OBJECTS:
        raise InvalidRequest(
            f"prompt.chunks: the request has {objects} JSON objects, but a prompt may have at"
            f" most {MAX_CHUNKS} chunks. Send the tokens in fewer chunks"
        )
    return parse_json(SampleRequest, body)


class JoinSamplingSessionRequest(WireModel):
    """POST join_sampling_session: get the number of another client of a sampling session."""

    sampling_session_id: Name
