"""All calls that name an object, for tests that another owner's are not found."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

Names = Mapping[str, str]
"""Names of an owner's objects, and of a session of the caller, by kind."""

TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
UPLOAD = {"base_model": CHAT_MODEL, "adapter_config": ADAPTER, "size_bytes": 1}
LOSS = {
    "name": "loss",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_method", "name": "loss", "target": "sum", "args": [{"ref": "logprobs"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}],
            },
        ]
    },
}


@dataclass(frozen=True)
class Call:
    """A call that names objects of an owner."""

    route: str
    """Method and path, as in the OpenAPI document; the path may have a query."""
    body: Mapping[str, Any] | None = None
    other: Names = field(default_factory=dict)
    """Names in the path, if they are not those of the owner's first objects."""

    def send(self, server: Server, names: Names, key: str) -> Answer:
        method, _, path = self.route.partition(" ")
        return server.request(method, path.format(**{**names, **self.other}), self.body, key=key)


def reads(of: Names) -> list[Call]:
    """Return the calls that change nothing."""
    futures = "/api/v1/retrieve_future"
    run, checkpoint = "/api/v1/training_runs/{run_id}", "/checkpoints/{checkpoint_id}"
    storage, projects = "/api/v1/billing/usage/checkpoints/current", [of["project_id"]]
    chat, recorded = {"model": of["sampled_path"], **CHAT}, {"session_id": of["recorded"]}
    return [
        Call("GET /api/v1/sessions/{session_id}"),
        Call("GET /api/v1/sessions/{session_id}/trace_export"),
        Call("GET /api/v1/session_usage/{session_id}"),
        Call("GET /api/v1/samplers/{sampler_id}"),
        Call(f"GET {futures}/{{request_id}}"),
        Call(f"POST {futures}/{{request_id}}"),
        *(Call(f"POST {futures}", {"request_id": of[name]}) for name in ("request_id", "sample")),
        Call(f"POST {futures}", {"request_id": of["loss"]}),
        Call("POST /api/v1/get_info", {"model_id": of["run_id"]}),
        Call("POST /api/v1/weights_info", {"tinker_path": of["path"]}),
        Call(f"GET {run}"),
        Call(f"GET {run}/checkpoints"),
        Call("GET /api/v1/runs/{run_id}"),
        Call("GET /api/v1/runs/{run_id}/curve"),
        Call("GET /api/v1/runs/{run_id}/samples"),
        Call("GET /api/v1/runs/{run_id}/surplus_checkpoints?keep=1"),
        Call("GET /api/v1/runs/{run_id}/timeline"),
        Call(f"GET {run}{checkpoint}/archive"),
        Call(
            f"GET {run}{checkpoint}/external_weights_urls",
            other={"checkpoint_id": "external_weights/whole"},
        ),
        Call("GET /api/v1/training_runs?project_id={project_id}"),
        Call("POST /api/v1/sessions/search", {"project_ids": projects}),
        Call("POST /api/v1/checkpoints/search", {"project_ids": projects}),
        Call(f"GET {storage}?project_id={{project_id}}"),
        Call("GET /api/v1/projects/{project_id}"),
        Call("GET /api/v1/programs/{program_id}"),
        Call("GET /api/v1/programs/{program_id}/logs"),
        Call("GET /oai/api/v1/models/{model}", other={"model": of["sampled_path"]}),
        Call("GET /anthropic/api/v1/models/{model}", other={"model": of["sampled_path"]}),
        Call("POST /oai/api/v1/chat/completions", chat),
        Call("POST /oai/api/v1/completions", {**chat, "prompt": "x"}),
        Call("POST /anthropic/api/v1/messages", chat),
        Call("POST /anthropic/api/v1/messages/count_tokens", chat),
        Call("GET /oai/sessions/{session_id}/datums", other=recorded),
        Call("GET /oai/sessions/{session_id}/v1/models", other=recorded),
        Call("GET /oai/sessions/{session_id}", other=recorded),
    ]


def trains_and_samples(of: Names) -> list[Call]:
    """Return the calls that use models, weights and sampling sessions."""
    model = {"model_id": of["run_id"], "seq_id": 9}
    batch = {"data": [], "loss_fn": "cross_entropy"}
    load = {"path": of["path"], "optimizer": False}
    mine, theirs = {"session_id": of["caller"]}, {"session_id": of["session_id"]}
    lora = {"base_model": CHAT_MODEL, "lora_config": {"rank": 4}}
    sampler = {"sampling_session_id": of["sampler_id"]}
    numbered = {"sampling_session_seq_id": 40}
    sources: list[dict[str, Any]] = [
        sampler,
        {"model_id": of["run_id"]},
        {"model_path": of["sampled_path"]},
    ]
    sampled = {"prompt": TOKENS, "sampling_params": {"max_tokens": 1}, "seq_id": 99}
    chat, recorded = {"model": of["sampled_path"], **CHAT}, {"session_id": of["recorded"]}
    return [
        Call("POST /api/v1/forward_backward", {**model, **batch}),
        Call("POST /api/v1/forward", {**model, **batch}),
        Call("POST /api/v1/optim_step", {**model, "adam_params": {}}),
        Call("POST /api/v1/save_weights", {**model, "path": "x"}),
        Call("POST /api/v1/save_weights_for_sampler", {**model, "path": "x"}),
        Call("POST /api/v1/save_weights_external", {**model, "path": "x"}),
        Call("POST /api/v1/load_weights", {**model, **load}),
        Call("POST /api/v1/load_weights", {**theirs, "model_seq_id": 5, **load}),
        Call("POST /api/v1/load_weights", {**mine, "model_seq_id": 5, **load}),
        Call("POST /api/v1/attach_model", {"model_id": of["run_id"]}),
        Call("POST /api/v1/runs/{run_id}/metrics", {"step": 1, "metrics": {"reward": 1.0}}),
        Call("POST /api/v1/runs/{run_id}/save", {}),
        Call("PUT /api/v1/runs/{run_id}/samples", {"keep": True}),
        Call("POST /api/v1/create_model", {**theirs, "model_seq_id": 6, **lora}),
        Call("POST /api/v1/create_custom_loss", {**theirs, "custom_loss_seq_id": 1, **LOSS}),
        *(Call("POST /api/v1/asample", {**source, **sampled}) for source in sources),
        *(Call("POST /api/v1/sample", {**source, **sampled}) for source in sources),
        *(Call("POST /api/v1/create_sampling_client", source) for source in sources[1:]),
        Call("POST /api/v1/create_sampling_session", {**mine, **numbered, **sources[2]}),
        Call(
            "POST /api/v1/create_sampling_session",
            {**theirs, **numbered, "base_model": CHAT_MODEL},
        ),
        Call("POST /api/v1/join_sampling_session", sampler),
        Call("POST /api/v1/cancel_future", {"request_id": of["sample"]}),
        Call("POST /oai/sessions", chat),
        Call("POST /oai/sessions/{session_id}/v1/chat/completions", chat, recorded),
    ]


def changes(of: Names) -> list[Call]:
    """Return the calls that create, change and delete other objects; deletions are the last."""
    run, checkpoint = "/api/v1/training_runs/{run_id}", "/checkpoints/{checkpoint_id}"
    session, project = "/api/v1/sessions/{session_id}", {"project_id": of["project_id"]}
    into = {"destination_project_id": of["project_id"]}
    upload, member = "/api/v1/checkpoints/uploads", "/api/v1/projects/{project_id}/members/{owner}"
    external, program = "/api/v1/external_weights_upload", "/api/v1/programs/{program_id}"
    lora = {"base_model": CHAT_MODEL, "lora_config": {"rank": 4}}
    named = {"session_id": of["session_id"]}
    return [
        Call("POST /api/v1/create_session", {"sdk_version": "t", **project}),
        Call("POST /api/v1/session_heartbeat", named),
        Call(f"PUT {session}/project", project),
        Call(f"PUT {session}/project", project, {"session_id": of["caller"]}),
        Call("POST /api/v1/copy_weights", {"source_path": of["path"]}),
        Call("POST /api/v1/copy_weights", {"source_path": of["path"], **into}),
        Call(f"POST {upload}", {**UPLOAD, **project}),
        # A file that is refused ends its upload.
        Call(
            f"PUT {upload}/{{upload_id}}/adapter_model.safetensors",
            {},
            other={"upload_id": of["refused_upload_id"]},
        ),
        Call(f"POST {upload}/{{upload_id}}/finish"),
        Call(f"POST {external}_start", {**lora, **into}),
        Call(f"POST {external}_finish", {"upload_id": of["upload_id"]}),
        Call("POST /api/v1/programs", {"model_id": of["run_id"], "module": "this"}),
        Call(f"POST {program}/progress", {}),
        Call("PATCH /api/v1/projects/{project_id}", {"name": "renamed"}),
        Call(f"PUT {member}", {"role": "viewer"}),
        Call(f"POST {run}{checkpoint}/publish"),
        Call(f"PUT {run}{checkpoint}/ttl", {"ttl_seconds": 3600}),
        Call(f"DELETE {run}{checkpoint}/publish"),
        Call("DELETE /api/v1/runs/{run_id}/samples"),
        Call("DELETE /api/v1/runs/{run_id}/surplus_checkpoints?keep=1"),
        Call(f"DELETE {run}{checkpoint}"),
        Call(f"DELETE {member}"),
        Call(f"POST {program}/stop"),
        Call(f"DELETE {upload}/{{upload_id}}"),
        Call("DELETE /oai/sessions/{session_id}", other={"session_id": of["recorded"]}),
        Call("POST /api/v1/runs/{run_id}/stop", {}),
        Call("POST /api/v1/unload_model", {"model_id": of["run_id"]}),
        Call("POST /api/v1/delete_model", {"model_id": of["run_id"]}),
        Call(f"POST {session}/finish", {"reason": {"type": "success"}}),
        Call(f"DELETE {session}"),
        Call("DELETE /api/v1/projects/{project_id}"),
    ]


def all_calls(of: Names) -> list[Call]:
    return [*reads(of), *trains_and_samples(of), *changes(of)]


def create(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    """Create an object of the first owner and return what describes it."""
    created = server.request("POST", path, body)
    assert created.status == 200, created.body
    return created.json()


def objects_of(
    training: tinker.TrainingClient, server: Server, program: Mapping[str, str]
) -> dict[str, str]:
    """Create one object of each kind for the owner of a run of CHAT_MODEL; return their names.

    Args:
        training: the run.
        server: the server.
        program: what describes a program that the server may run.
    """
    step(training)
    path = training.save_state("kept").result().path
    sampled_path = training.save_weights_for_sampler("sampled").result().path
    training.save_weights_external("whole").result()
    session, run = training.holder.get_session_id(), training.model_id
    session_of = {"session_id": session}
    weights = {**session_of, "sampling_session_seq_id": 0, "model_path": sampled_path}
    sampler = create(server, "/api/v1/create_sampling_session", weights)["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "seq_id": 1, "prompt": TOKENS}
    loss = {**session_of, "custom_loss_seq_id": 0, **LOSS}
    return {
        "session_id": session,
        "caller": session,
        "run_id": run,
        "request_id": f"{run}:1",
        "sampler_id": sampler,
        "sample": create(server, "/api/v1/asample", sample)["request_id"],
        "loss": create(server, "/api/v1/create_custom_loss", loss)["request_id"],
        "path": path,
        "sampled_path": sampled_path,
        "checkpoint_id": "weights/kept",
        "recorded": create(server, "/oai/sessions", {"model": sampled_path})["id"],
        "project_id": server.new_project("theirs"),
        "owner": "bootstrap",
        "upload_id": create(server, "/api/v1/checkpoints/uploads", UPLOAD)["upload_id"],
        "refused_upload_id": create(server, "/api/v1/checkpoints/uploads", UPLOAD)["upload_id"],
        "program_id": create(server, "/api/v1/programs", program)["program_id"],
    }


def of_nobody(text: str) -> str:
    """Return a text in which all ids are the same, so that the objects do not exist."""
    return re.sub("[0-9a-f]{8}", "00000000", text)


def check_none_is_found(
    server: Server, theirs: Names, own: tinker.TrainingClient, key: str
) -> None:
    """Check that calls about an owner's objects are answered as if these did not exist.

    Args:
        server: the server.
        theirs: names of the objects of the owner, whose key is API_KEY.
        own: a run of the caller.
        key: the key of the caller.
    """
    own_session = {"caller": own.holder.get_session_id()}
    missing = {kind: of_nobody(name) for kind, name in theirs.items()}

    def answers(names: Names) -> list[tuple[str, int, str]]:
        """Send all calls with the key of the other owner."""
        sent = [(call.route, call.send(server, names, key)) for call in all_calls(names)]
        return [(route, each.status, of_nobody(each.body.decode())) for route, each in sent]

    found = answers({**theirs, **own_session})

    assert [each for each in found if each[1] != 404] == []
    assert found == answers({**missing, **own_session})
    # Its owner finds everything, as none of the calls has changed it.
    for call in all_calls(theirs):
        assert call.send(server, theirs, API_KEY).status != 404, call.route
    assert step(own) > 0
