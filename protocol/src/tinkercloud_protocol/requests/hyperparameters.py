"""Adapter and optimizer hyperparameters, which requests contain and engines use.

Engines run in environments with only torch and transformers, so these are plain dataclasses.
Requests and manifests use them as fields nevertheless: the annotations tell pydantic what to
validate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Pydantic validation of an external value: its exact type and its bounds."""

    ge: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the schema of the type, made strict, with the bounds there are."""
        bounds = {"ge": self.ge, "lt": self.lt}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return {**handler(source), **given, "strict": True}


Flag = Annotated[bool, Checked()]

_LIKE_WIRE_MODELS = {
    "extra": "ignore",
    "use_attribute_docstrings": True,
    "allow_inf_nan": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The adapter to train. Alpha is not on the wire: it is always 32, as in the hosted service.

    Raises:
        ValueError: The adapter has no trainable layers.
    """

    __pydantic_config__: ClassVar = _LIKE_WIRE_MODELS

    rank: Annotated[int, Checked(ge=1)]
    """At most what the server allows for the base model: `limits.max_lora_rank`, by default 256."""
    seed: Annotated[int, Checked(ge=0, lt=2**63)] | None = None
    """Seed of the initial weights; absent means a random seed."""
    train_unembed: Flag = True
    train_mlp: Flag = True
    train_attn: Flag = True

    def __post_init__(self) -> None:
        """Check constraints between fields."""
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Hyperparameters of one optimizer step: the SDK's defaults, the semantics of torch AdamW."""

    __pydantic_config__: ClassVar = _LIKE_WIRE_MODELS

    learning_rate: Annotated[float, Checked(ge=0)] = 1e-4
    beta1: Annotated[float, Checked(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Checked(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Checked(ge=1e-38)] = 1e-12
    """Much smaller values do not exist in float32, and 0 would produce NaN for weights without a
    gradient, such as all A matrices of a new adapter."""
    weight_decay: Annotated[float, Checked(ge=0)] = 0.0
    """Decoupled weight decay, as in AdamW."""
    grad_clip_norm: Annotated[float, Checked(ge=0)] = 0.0
    """Maximum global L2 norm of the accumulated gradient; 0 disables clipping."""
