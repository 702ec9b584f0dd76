"""RLVE on Kubernetes: create_model adds a program to the TrainingSession of the model."""

import base64
from typing import Any

import pytest

from tinkercloud_testing.cluster.provider_world import MODEL, World
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow

RLVE = {"enabled": True, "environment_list": ["Division"], "rollout_max_response_len": 64}


def test_rlve_config_adds_a_program_whose_state_is_the_one_in_the_session(
    world: World, server: Server
) -> None:
    session_id = server.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}

    answer = server.post("create_model", create | {"lora_config": {"rank": 4}, "rlve_config": RLVE})

    assert answer.status == 200, answer.body
    name = world.session_of(f"{session_id}:train:0")
    made = world.session(name)
    program = made["spec"]["program"]
    assert program["module"] == "tinkercloud_programs.rlve"
    assert "Division" in program["args"][0]
    assert "sourceSecret" not in program
    secret = world.cluster.get("secret", program["apiKeySecret"]["name"], world.namespace)
    assert base64.b64decode(secret["data"]["apiKey"]).startswith(b"tml-")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]

    def shown() -> dict[str, Any]:
        return server.request("GET", f"/api/v1/programs/{program['id']}").json()

    state = {"id": program["id"], "phase": "Running", "restarts": 2, "message": "exit code 1"}
    world.cluster.patch_status("trainingsession", name, {"program": state}, world.namespace)
    wait_until(lambda: shown()["phase"] == "Running", "the state to be recorded")
    assert shown()["restarts"] == 2
    server.post(f"programs/{program['id']}/stop", {})
    assert world.session(name)["spec"]["program"]["stop"] is True
    assert server.request("GET", f"/api/v1/programs/{program['id']}/logs").json()["text"] == ""
