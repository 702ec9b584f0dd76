"""Heads without HTTP API, one after another in this process, with one store."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    HeldModel,
    Limits,
    ModelSpec,
    SamplerConfig,
    Timings,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.envelope import TrainingEnvelope, peek_training
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.device.memory import Available
from tinkercloud_worker.engine.turns.engine_thread import NoBackground
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.serve.service import HeadService
from tinkercloud_worker.inference.colocation import ColocatedThread, Turn
from tinkercloud_worker.training.paging import PagingPlace

MODEL = ModelId("s", 0)
SPEC = ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1))
WHOLE = ModelSpec(owner="me", lora=None)
"""A model that is trained by full fine-tuning."""
ADAM = {"learning_rate": 0.01}
PATIENCE_SECONDS = 60
"""Longest wait for a condition."""
_FIRST_TOKENS = 100
"""Number of different first tokens: there may be more steps than tokens."""


@dataclass
class Head:
    """A head without HTTP API."""

    service: HeadService
    backend: Backend
    model: ModelId = MODEL
    """The model that requests are for."""
    spec: ModelSpec = SPEC
    """Its specification."""

    async def begin(self) -> None:
        await self.service.create_model(self.model, self.spec)

    async def resume(self, generation: str) -> None:
        spec = self.spec.model_copy(update={"resume_generation": generation})
        await self.service.create_model(self.model, spec)

    def add(self, seq_id: int, first: int = 5) -> None:
        """Send data of a step."""
        self.add_all(seq_id, [[first, 6, 7, 8]])

    def add_all(
        self, seq_id: int, sequences: Sequence[Sequence[int]], weight: float | None = None
    ) -> None:
        """Send sequences as the data of a step; each token is the target of the one before.

        Args:
            seq_id: number of the request.
            sequences: the sequences.
            weight: of every target; None means that none is sent.
        """
        message = pb.ForwardBackwardRequest(
            model_id=str(self.model), seq_id=seq_id, loss_fn="cross_entropy"
        )
        for sequence in sequences:
            datum = message.data.add()
            tokens = np.array(sequence[:-1], dtype="<i4").tobytes()
            datum.model_input.add().encoded_text.tokens = tokens
            targets = datum.loss_fn_inputs["target_tokens"]
            targets.dense = np.array(sequence[1:], dtype="<i8").tobytes()
            targets.dtype = pb.DTYPE_INT64
            if weight is not None:
                weights = datum.loss_fn_inputs["weights"]
                weights.dense = np.full(len(sequence) - 1, weight, dtype="<f4").tobytes()
                weights.dtype = pb.DTYPE_FLOAT32
        self._send(routes.FORWARD_BACKWARD, message.SerializeToString())

    def apply(self, seq_id: int) -> None:
        self.send(routes.OPTIM_STEP, seq_id, adam_params=ADAM)

    def send(self, path: str, seq_id: int, /, **fields: object) -> None:
        self._send(path, orjson.dumps({"model_id": str(self.model), "seq_id": seq_id, **fields}))

    def _send(self, path: str, body: bytes) -> None:
        if path == routes.FORWARD_BACKWARD:
            received = requests.receive_batch(body, peek_training(body))
        else:
            received = requests.receive_json(path, body)
        self.service.submit(received)

    def apply_as_an_older_head_did(self, seq_id: int, **adam_params: object) -> None:
        """Send an optim_step with parameters that an earlier release accepted."""
        step = {"model_id": str(self.model), "seq_id": seq_id, "adam_params": ADAM}
        received = requests.receive_json(routes.OPTIM_STEP, orjson.dumps(step))
        sent = orjson.dumps(step | {"adam_params": {**ADAM, **adam_params}})
        self.service.submit(replace(received, body=sent))

    def send_broken(self, seq_id: int) -> None:
        place, error = TrainingEnvelope(str(self.model), seq_id), InvalidRequest("broken batch")
        refused = requests.receive_unread(routes.FORWARD_BACKWARD, b"broken", place, error)
        self.service.submit(refused)

    async def confirmed(self) -> None:
        """Return once the requests so far may be confirmed to the client."""
        await self.service.accepted(str(self.model))

    async def answer(self, seq_id: int) -> bytes:
        result = await self.service.retrieve(f"{self.model}:{seq_id}")
        assert result is not None
        return result.body

    async def loss(self, seq_id: int) -> float:
        output = pb.ForwardBackwardOutput.FromString(await self.answer(seq_id))
        return output.metrics["loss:sum"]

    def sample(self, session: int, seq_id: int, max_tokens: int = 12) -> str:
        """Send a small sampling request; return its id."""
        prepared = self.service.samples.prepare(a_sample(session, seq_id, max_tokens))
        return str(self.service.sample(prepared))

    async def drawn(self, session: int, seq_id: int) -> list[int]:
        """Sample a little; return the tokens."""
        result = await self.service.retrieve(self.sample(session, seq_id))
        assert result is not None
        assert result.content_type == future_responses.PROTOBUF, result.body
        (sequence,) = pb.SampleResponse.FromString(result.body).sequences
        return [int(token) for token in np.frombuffer(sequence.tokens, dtype="<i4")]

    async def manifest(self) -> SuspendedManifest:
        manifest = await self.backend.store.find_suspended(str(self.model))
        assert manifest is not None
        return manifest

    async def weights(self) -> dict[str, memoryview]:
        """Return the files of a checkpoint of the current state."""
        (path,) = await self.service.checkpoint()
        _, files = await self.backend.store.read(CheckpointPath.parse(path))
        return files


async def train(head: Head, first: int, last: int) -> list[float]:
    """Run steps of two requests each, each with other data; return their losses.

    Args:
        head: what runs them.
        first: seq_id of the first request.
        last: seq_id of the last one.
    """
    losses = []
    for seq_id in range(first, last + 1, 2):
        head.add(seq_id, first=5 + seq_id % _FIRST_TOKENS)
        head.apply(seq_id + 1)
        await head.confirmed()
        losses.append(await head.loss(seq_id))
        await head.answer(seq_id + 1)
    return losses


def described(head: Head) -> HeldModel:
    """Return what a head says of its only model."""
    (model,) = head.service.held()
    return model


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.05)


def a_sample(session: int, seq_id: int, max_tokens: int) -> SampleRequest:
    """Return a request for one sample from a session of `MODEL`."""
    body = {
        "sampling_session_id": f"s:sample:{session}",
        "seq_id": seq_id,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": max_tokens, "seed": 1, "stop": []},
    }
    return parse_json(SampleRequest, orjson.dumps(body))


@contextmanager
def a_head(
    root: str,
    scratch: Path,
    generation: str,
    *,
    limits: Limits | None = None,
    turn: Turn | None = None,
    sampler: SamplerConfig | None = None,
    drain_seconds: float = 5,
    autosave: AutosaveConfig | None = None,
    journals: Path | None = None,
    durability: DurabilityConfig | None = None,
    make: Callable[[], PreTrainedModel] = tiny_llama,
    available: Available = lambda: None,
    place: PagingPlace | None = None,
    spec: ModelSpec = SPEC,
) -> Iterator[Head]:
    """Run a head in this process; the end of the context is like killing it."""
    config = HeadConfig(
        head="h",
        generation=generation,
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=root,
        scratch_dir=str(scratch),
        sampler=sampler or SamplerConfig(),
        limits=limits or Limits(),
        timings=Timings(long_poll_seconds=20, drain_seconds=drain_seconds),
        autosave=autosave or AutosaveConfig(),
        journal_dir=str(journals) if journals is not None else None,
        durability=durability or DurabilityConfig(),
    )
    store = CheckpointStore(open_store(root))
    with an_engine(make(), scratch / generation, available=available, place=place) as engine:
        thread = engine.thread
        if turn is not None:
            thread = ColocatedThread(turn, lambda: None, lambda error: pytest.fail(repr(error)))
            thread.start(NoBackground())
        backend = Backend(config, engine.trainer, engine.sampler, thread, store, frozenset())
        service = HeadService(backend)
        yield Head(service, backend, spec=spec)
        service.close()
        thread.stop()


def samplers_of(head: Head) -> Samplers:
    """Return the sampler versions that a head keeps."""
    return head.service._samplers
