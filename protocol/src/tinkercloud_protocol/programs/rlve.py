"""The settings of RLVE: reinforcement learning on environments that generate and verify problems.

`create_model` with an enabled `rlve_config` starts a program that trains the model. Field names and
defaults are those that clients of other servers send; the last three fields exist only here.
"""

import difflib
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from tinkercloud_protocol.wire.json_model import Items, Name, WireModel

MODULE = "tinkercloud_programs.rlve"
"""Module of the program; its only argument is an `RlveConfig` as JSON."""
ENVIRONMENTS = frozenset(
    resources.files(__package__).joinpath("rlve_environments.txt").read_text("utf-8").split()
)
"""The names of the environments in the package `rlve-gym` 0.0.1."""
_NEAR_MATCHES = 3


class RlveConfig(WireModel):
    """`rlve_config` in create_model. With `enabled: false`, all other fields are ignored."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = False
    environment_list: Annotated[Items[Name], Field(max_length=len(ENVIRONMENTS))] = Field(
        default_factory=list
    )
    """Names of environments of `rlve-gym`; each prompt is of a randomly chosen one."""
    custom_prompt_preprocessor: Literal["TinyZero", "ChatTemplate_NoSystemPrompt"] = "TinyZero"
    """Prompt format: a plain conversation that asks for reasoning, or the model's chat template."""
    answer_marker_type: Literal["<answer></answer>", "\\boxed{}"] = "<answer></answer>"
    """Markers around the answer in a response."""
    initial_difficulty: Annotated[int, Field(ge=0, le=1000)] = 0
    difficulty_sliding_window_size: Annotated[int, Field(ge=1, le=1000)] = 4
    """How many difficulties, up to the highest, are sampled."""
    min_metric_to_increase_difficulty: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Mean accuracy at the highest difficulty from which on that difficulty rises by one."""
    min_prompts_before_difficulty_check: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Number of prompts at the highest difficulty for one check of the accuracy."""
    rollout_batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Prompts per step."""
    n_samples_per_prompt: Annotated[int, Field(ge=2, le=256)] = 8
    """Responses per prompt; advantages are relative to the others of the same prompt."""
    rollout_max_response_len: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Maximum length of a response, in tokens."""
    rollout_temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    num_rollout: Annotated[int, Field(ge=1, le=1_000_000)] = 500
    """Number of steps."""
    use_dynamic_sampling_filter: bool = True
    """Whether prompts whose responses all have the same reward are replaced by others."""
    over_sampling_batch_size: Annotated[int, Field(ge=1, le=65536)] = 384
    """Maximum number of prompts that are sampled for one step, with those that are replaced."""
    balance_data: bool = True
    partial_rollout: bool = True
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    save_every_steps: Annotated[int, Field(ge=1)] = 10
    """Steps between two checkpoints, from which an interrupted program resumes."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the problems."""

    @model_validator(mode="before")
    @classmethod
    def _ignore_if_disabled(cls, fields: Any) -> Any:  # noqa: ANN401 - pydantic's interface
        if isinstance(fields, dict) and fields.get("enabled", False) is False:
            return {"enabled": False}
        return fields

    @field_validator("environment_list")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in ENVIRONMENTS]
        if unknown:
            raise ValueError("; ".join(map(_unknown, unknown[:_NEAR_MATCHES])))
        if len(set(names)) < len(names):
            raise ValueError("contains a name more than once; list each environment once")
        return names

    @field_validator("balance_data", "partial_rollout")
    @classmethod
    def _is_on(cls, value: bool) -> bool:  # noqa: FBT001 - pydantic's interface
        if not value:
            raise ValueError(
                "cannot be switched off: the session head always balances batches and continues"
                " unfinished samples; omit the field or set it to true"
            )
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> "RlveConfig":
        if self.enabled and not self.environment_list:
            raise ValueError(
                "environment_list: is empty; name at least one environment, such as 'Division'"
            )
        if self.enabled and self.over_sampling_batch_size < self.rollout_batch_size:
            raise ValueError(
                f"over_sampling_batch_size: is {self.over_sampling_batch_size}; must be at least"
                f" rollout_batch_size, which is {self.rollout_batch_size}"
            )
        return self


def _unknown(name: str) -> str:
    lowered = {known.lower(): known for known in ENVIRONMENTS}
    near = difflib.get_close_matches(name.lower(), sorted(lowered), _NEAR_MATCHES)
    matches = ", ".join(repr(lowered[match]) for match in near)
    advice = f"did you mean {matches}?" if matches else "rlve-gym lists its environments"
    return f"environment {name[:80]!r} is unknown; {advice}"
