"""Assembles a session head and serves it.

`build_trainer` and `build_sampler` choose the trainer and the sampler.
"""

import asyncio
import os
import secrets
import socket
import sys
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import orjson
import structlog
import torch
import uvicorn
from pydantic import ValidationError
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tinkercloud_protocol.heads import descriptors
from tinkercloud_protocol.heads.journal_files import run_ids
from tinkercloud_protocol.heads.launch import HeadConfig, Listen
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_protocol.wire.json_model import describe
from tinkercloud_worker import logs
from tinkercloud_worker.build_images import build_images
from tinkercloud_worker.build_sampler import build_sampler, check_model
from tinkercloud_worker.build_trainer import build_trainer, build_weight_host
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.custom_losses.nursery import Nursery
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.engine.turns.usage_counts import UsageMeter
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.head_app import HeadApp
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.wire.head_token import HeadToken
from tinkercloud_worker.head.wire.image_work import ImageWork
from tinkercloud_worker.head.wire.request_times import SpanRecorder
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.weight_host import HeadWeightHost
from tinkercloud_worker.metrics import count_engine_wait
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.fingerprint import fingerprint_of

if TYPE_CHECKING:
    from tinkercloud_protocol.wire.span_sender import SpanSender

log = structlog.get_logger(__name__)


def build_backend(
    config: HeadConfig, nursery: Nursery | None = None, spans: SpanRecorder | None = None
) -> Backend:
    """Assemble the engine according to the configuration.

    The head loads the base model only if it trains or samples in its own process.

    Args:
        config: the configuration.
        nursery: starts the processes of custom losses; None: the first loss starts it.
        spans: records when requests were executed; None: one that sends spans nowhere.
    """
    log.info("loading", progress="reading the configuration and the tokenizer")
    check_model(config)
    base = cache(partial(load_base, config))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    weight_host = build_weight_host(config)
    if config.trainer.ranks:
        ranks = f"waiting for the trainer's {config.trainer.ranks} ranks, which load the model"
        log.info("loading", progress=ranks)
    trainer = build_trainer(config, base, weight_host)
    wanted, taken = config.limits.max_context_length, trainer.limits.max_context_length
    if wanted is not None and wanted > taken:
        log.warning(
            "limits.max_context_length exceeds the model's limit, which applies instead",
            wanted=wanted,
            taken=taken,
        )
    usage = UsageMeter(on_wait=count_engine_wait)
    log.info("loading", progress="starting the sampler")
    sampler, thread = build_sampler(
        config,
        base,
        tokenizer,
        trainer,
        weight_host=weight_host or HeadWeightHost(),
        usage=usage,
        on_crash=_end_process,
    )
    return Backend(
        config=config,
        trainer=trainer,
        sampler=sampler,
        thread=thread,
        store=CheckpointStore(open_store(config.checkpoint_root)),
        end_tokens=end_tokens(config.model.path, tokenizer),
        base_fingerprint=_served_fingerprint(config, trainer),
        usage=usage,
        text=ChatText(tokenizer, taken, trainer.limits.vocab_size),
        images=build_images(config, base, trainer),
        image_work=ImageWork(config.limits.max_request_pixels),
        losses=LossProcesses(config.limits, nursery),
        spans=spans or SpanRecorder(),
        engine_scaler=sampler.scaler if isinstance(sampler, InferenceSampler) else None,
    )


def _served_fingerprint(config: HeadConfig, trainer: Trainer) -> str | None:
    """Return the fingerprint of the served model; None if neither head nor trainer has its files.

    Raises:
        UnsupportedModelError: the head and the trainer's ranks have different models.
    """
    trained = trainer.base_fingerprint
    here = fingerprint_of(config.model.path) if trained is None or config.trainer.ranks else trained
    if None not in {trained, here} and trained != here:
        raise UnsupportedModelError(
            f"{config.model.path}: the files differ between the head (fingerprint {here}) and the"
            f" trainer's ranks ({trained}); put the same files in both places"
        )
    return trained or here


def load_base(config: HeadConfig) -> TorchBaseModel:
    """Load the head's copy of the base model.

    Raises:
        UnsupportedModelError: its architecture is not supported, or it needs a GPU that this head
            does not have.
    """
    device = "cpu" if config.trainer.ranks else config.trainer.device
    if device != "cpu" and not accelerator.is_available():
        raise UnsupportedModelError(
            f"trainer.device is {device!r}, but this head has no GPU; give the head a GPU that"
            " torch can use, or set trainer.device to 'cpu'"
        )
    return TorchBaseModel.load(
        config.model.path, getattr(torch, config.trainer.dtype), device=device
    )


def _build_backend_or_write_reason(
    config: HeadConfig, nursery: Nursery, spans: SpanRecorder
) -> Backend:
    try:
        return build_backend(config, nursery, spans)
    except Exception as error:
        if config.reason_file is not None:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            Path(config.reason_file).write_text(f"failed to load the engine: {line}\n")
        raise


def end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-text tokens of the tokenizer and the generation configuration."""
    found = {tokenizer.eos_token_id}
    if (Path(path) / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        found.update(configured if isinstance(configured, list) else [configured])
    return frozenset(token for token in found if isinstance(token, int))


def _end_process(error: BaseException) -> None:
    log.critical("the engine thread crashed; exiting", exc_info=error)
    os._exit(70)


class _Server(uvicorn.Server):
    """A server that starts draining on the first stop signal."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a stop signal (called by uvicorn's signal handler)."""
        self._loop.call_soon_threadsafe(self._lifecycle.begin_stop)
        if self._lifecycle.has_failed:
            # uvicorn would end the process by the signal, as if somebody had killed it.
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)


def listening_socket(listen: Listen) -> socket.socket:
    """Return the socket to accept connections on.

    uvicorn would treat an inherited socket as a Unix socket. Nagle's algorithm would then stay on,
    and every response would wait 40 ms for an acknowledgement.
    """
    if listen.fd is not None:
        return socket.socket(fileno=listen.fd)
    return socket.create_server((listen.host, listen.port), backlog=2048)


def _would_lose_journals(config: HeadConfig) -> bool:
    """Return whether an earlier head left journals on a disk that may not outlive this one."""
    if config.journal_dir is None or config.unsaved_dir is not None:
        return False
    try:
        return bool(run_ids(Path(config.journal_dir)))
    except OSError:
        return True


def _span_sender(config: HeadConfig) -> "SpanSender | None":
    """Return what sends spans of requests; None if no collector is configured for them."""
    if config.otlp_endpoint is None:
        return None
    try:
        from tinkercloud_protocol.wire.span_sender import SpanSender  # noqa: PLC0415 - an extra
    except ImportError:
        log.warning(
            "otlp_endpoint: no spans are sent, because OpenTelemetry is not installed; install"
            " tinkercloud-worker[telemetry]"
        )
        return None
    return SpanSender(config.otlp_endpoint, "tinkercloud-head", config.head)


async def serve(config: HeadConfig, nursery: Nursery) -> bool:
    """Serve until a stop signal, or until no API server holds a lease any more.

    Returns:
        Whether the engine was loaded, or could still be.
    """
    token = HeadToken(Path(config.token_file))
    sender = _span_sender(config)
    spans = SpanRecorder(sender=sender)
    lifecycle = Lifecycle(
        config.timings,
        lambda: _build_backend_or_write_reason(config, nursery, spans),
        lambda: _would_lose_journals(config),
    )
    app = HeadApp(lifecycle, config.limits, token, config.generation)
    settings = uvicorn.Config(
        app,
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(config.timings.stop_seconds) + 5,
    )
    await _Server(settings, lifecycle).serve(sockets=[listening_socket(config.listen)])
    if sender is not None:
        await asyncio.to_thread(sender.close)
    return not lifecycle.has_failed


def read_config(file: Path) -> HeadConfig:
    """Return the configuration of the head.

    Raises:
        SystemExit: this release does not understand it; the launcher can read why.
    """
    content = file.read_bytes()
    try:
        return HeadConfig.model_validate_json(content)
    except ValidationError as error:
        reason = (
            f"a head of release {this_release()} does not understand its configuration"
            f" ({describe(error)}); use an image of the release that wrote it, or of the one before"
            " without its new settings"
        )
        where = orjson.loads(content).get("reason_file")
        if where is not None:
            Path(where).write_text(f"{reason}\n")
        raise SystemExit(reason) from None


def main() -> None:
    """Run the head; its configuration file is the only argument.

    The exit status is 1 if the engine could not be loaded.
    """
    # While there are neither threads nor secrets here: what a loss does to its process must not
    # reach the head.
    nursery = Nursery.forked()
    logs.configure()
    # Its lines would push everything else out of the end of the log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    descriptors.raise_limit()
    config = read_config(Path(sys.argv[1]))
    if not config.generation:
        config = config.model_copy(update={"generation": secrets.token_hex(8)})
    structlog.contextvars.bind_contextvars(head=config.head, generation=config.generation)
    uvicorn_loop = uvicorn.Config(app="", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        if not runner.run(serve(config, nursery)):
            sys.exit(1)
