"""Requests that the SDK never sends."""

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.serving.servers import Answer, Server

MODEL = "tiny/llama"
VOCAB_SIZE, CONTEXT = 264, 512


class Run:
    """A training run without the SDK, whose requests may be invalid."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.session = str(server.post("create_session", {"sdk_version": "t"}).json()["session_id"])
        created = server.post("create_model", self.create(0)).json()
        self.model_id = str(server.result(str(created["request_id"])).json()["model_id"])
        self.next_seq_id = 1

    def create(self, index: int, **changes: object) -> dict[str, object]:
        request = {
            "session_id": self.session,
            "model_seq_id": index,
            "base_model": MODEL,
            "lora_config": {"rank": 4},
        }
        return {**request, **changes}

    def take_seq_id(self) -> int:
        self.next_seq_id += 1
        return self.next_seq_id - 1

    def send(self, path: str, /, **fields: object) -> Answer:
        body = {"model_id": self.model_id, "seq_id": self.take_seq_id(), **fields}
        return self.server.post(path, body)

    def train(self, body: bytes, **headers: str) -> Answer:
        fields = {"Content-Type": "application/x-protobuf", **headers}
        return self.server.request("POST", "/api/v1/forward_backward", body, headers=fields)

    def outcome(self, answer: Answer) -> dict[str, object]:
        """Return the result of the future of an accepted request."""
        assert answer.status == 200, answer.body
        return self.server.result(str(answer.json()["request_id"])).json()

    def step(self) -> float:
        """Train one valid step and return its loss."""
        answer = self.train(self.batch().SerializeToString())
        request_id = str(answer.json()["request_id"])
        output = pb.ForwardBackwardOutput.FromString(self.server.result(request_id).body)
        applied = self.outcome(self.send("optim_step", adam_params={"learning_rate": 0.01}))
        assert "error" not in applied
        return output.metrics["loss:sum"]

    def batch(
        self,
        tokens: list[int] | None = None,
        *,
        loss_fn: str = "cross_entropy",
        config: dict[str, float | str] | None = None,
        **inputs: np.ndarray,
    ) -> pb.ForwardBackwardRequest:
        ids = tokens if tokens is not None else [1, 2, 3]
        message = pb.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=self.take_seq_id(), loss_fn=loss_fn
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(ids, "<i4").tobytes()
        defaults = {"target_tokens": np.asarray(ids, "<i8")}
        for name, array in {**defaults, **inputs}.items():
            datum.loss_fn_inputs[name].CopyFrom(a_tensor(array))
        for key, value in (config or {}).items():
            if isinstance(value, str):
                message.loss_fn_config_v2[key].text = value
            else:
                message.loss_fn_config_v2[key].number = value
        return message


def a_tensor(array: np.ndarray) -> pb.Tensor:
    dtype = pb.DTYPE_FLOAT32 if array.dtype == np.float32 else pb.DTYPE_INT64
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)
