"""What old SDKs and other clients may leave out, or send, when they create a model."""

import json
from typing import Any

import pytest

from tinkercloud_protocol.requests.training_requests import CreateModelRequest, LoadWeightsRequest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import parse_json

CREATE = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"}


def create(lora_config: object) -> CreateModelRequest:
    body = json.dumps(CREATE | {"lora_config": lora_config}).encode()
    return parse_json(CreateModelRequest, body)


@pytest.mark.parametrize(
    "config", [None, {"rank": 0}, {"rank": 0, "seed": 3, "train_mlp": True, "train_attn": True}]
)
def test_rank_0_means_no_adapter(config: object) -> None:
    assert create(config).lora_config is None


@pytest.mark.parametrize("config", [{"rank": False}, {"rank": -1}, {"rank": "0"}, {}, [], "full"])
def test_other_values_are_not_taken_for_rank_0(config: object) -> None:
    with pytest.raises(InvalidRequest):
        create(config)


@pytest.mark.parametrize("excluded", ["train_attn", "train_mlp", "train_unembed"])
def test_rank_0_cannot_exclude_layers(excluded: str) -> None:
    with pytest.raises(InvalidRequest, match=f"remove {excluded}"):
        create({"rank": 0, excluded: False})


@pytest.mark.parametrize(
    "place", [{"model_id": "s:train:0", "seq_id": 1}, {"session_id": "s", "model_seq_id": 1}]
)
def test_weights_are_loaded_without_the_optimizer_unless_stated(place: dict[str, Any]) -> None:
    body = json.dumps(place | {"path": "tinker://s:train:0/weights/x"}).encode()

    assert parse_json(LoadWeightsRequest, body).optimizer is False
