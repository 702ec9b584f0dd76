"""vLLM's OpenAI-compatible server: completions by token ids, adapters loaded at runtime.

The server must be started with `--enable-lora`, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and with a
sufficient adapter rank and number of logprobs (`--max-lora-rank`, `--max-logprobs`).
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinkercloud_protocol.requests.tensors import PromptScores, SampledSequence
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, SamplingResult
from tinkercloud_worker.inference.client import (
    AdaptersDisabled,
    InferenceClient,
    Json,
    NotThere,
    ServerError,
)
from tinkercloud_worker.inference.dialect import (
    SEED_MASK,
    Ranked,
    bounded_top_k,
    reject_alternatives,
    reject_grammars,
    reject_images,
    top_logprobs,
)
from tinkercloud_worker.inference.weights_folder import SavedWeights

_COMPLETIONS = "/v1/completions"
_LOAD_SECONDS = 600.0
_CALL_SECONDS = 30.0
_MAX_CONCURRENT = 32
"""Positions of one prompt that are scored concurrently."""
_MAX_POSITIONS = 4096
"""Maximum number of scored positions of one prompt; each takes a request."""
Scores = Mapping[int, float]
"""Token id to logprob."""

# The server's defaults may come from the model's generation configuration.
_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    # End tokens are among the stop tokens, unless the request disables them.
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


class VllmDialect:
    """See `dialect.Dialect`."""

    def __init__(self, client: InferenceClient, model: str) -> None:
        """Create a dialect.

        Args:
            client: client of the server.
            model: the server's name of the base model (`--served-model-name`).
        """
        self.client = client
        self._model = model

    async def check_health(self) -> None:
        """See `Dialect.check_health`."""
        await self.client.get("/health", seconds=_CALL_SECONDS)

    async def check_model(self) -> None:
        """See `Dialect.check_model`."""
        listed = (await self.client.get("/v1/models", seconds=_CALL_SECONDS))["data"]
        served = [entry["id"] for entry in listed if entry.get("parent") is None]
        if self._model not in served:
            raise ServerError(
                f"the inference server {self.client.url} serves {', '.join(served)}, not"
                f" {self._model!r}; set sampler.inference.model to the server's name of the model"
            )

    async def load_adapter(self, adapter: SavedWeights) -> None:
        """See `Dialect.load_adapter`."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.server_dir)}
        try:
            with metrics.loading(self.client.url, "adapter", "file"):
                await self.client.post("/v1/load_lora_adapter", body, seconds=_LOAD_SECONDS)
        except (InvalidRequest, ServerError) as error:
            if "already been loaded" not in error.message:
                raise _load_error(error) from None

    async def unload_adapter(self, name: str) -> None:
        """See `Dialect.unload_adapter`."""
        try:
            await self.client.post(
                "/v1/unload_lora_adapter", {"lora_name": name}, seconds=_CALL_SECONDS
            )
        except NotThere:
            return

    async def sample(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """See `Dialect.sample`. vLLM itself samples sequence k with seed + k.

        At temperature 0 all samples are equal, and vLLM only generates one. It reports cached
        tokens if it runs with `--enable-prompt-tokens-details`.
        """
        reject_images(request, "vLLM")
        reject_grammars(request, "vLLM")
        is_greedy = request.temperature == 0
        body = self._body(request, adapter) | {
            "n": 1 if is_greedy else request.num_samples,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_k": bounded_top_k(request.top_k),
            "top_p": request.top_p,
            "seed": request.seed & SEED_MASK,
            "stop": list(request.stop.strings),
            "stop_token_ids": sorted(request.stop.token_ids),
            "include_stop_str_in_output": True,
            "logprobs": request.top_logprobs,
        }
        body |= _changes(request)
        answer = await self.client.generate(_COMPLETIONS, body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        sequences = [self._sequence(choice, request.top_logprobs) for choice in choices]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return SamplingResult(
            sequences * request.num_samples if is_greedy else sequences,
            PromptScores(cached_tokens=details.get("cached_tokens") or 0),
        )

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """See `Dialect.score`. Each position takes a request for one token after its prefix.

        vLLM's own prompt logprobs omit, mix up or fail on what adapters add to the output
        embedding, for all requests that share a batch with one (vllm-project/vllm#51594). Common
        prefixes are computed once, so the cost is mostly the number of requests.
        """
        asked, length = request.prompt_logprobs, len(request.prompt)
        reject_alternatives(request)
        reject_images(request, "vLLM")
        first = asked.first_position or length
        if length - first > _MAX_POSITIONS:
            raise InvalidRequest(
                f"prompt logprobs: at most {_MAX_POSITIONS} positions of a prompt can be scored,"
                f" because this model's sampler is a vLLM server; got {length - first}. Set"
                " prompt_logprobs_last_n, or use a forward pass of a training client"
            )
        positions = range(first, length)
        found: list[tuple[Scores, Ranked]] = []
        for start in range(0, len(positions), _MAX_CONCURRENT):
            group = positions[start : start + _MAX_CONCURRENT]
            scoring = [self._score_one(request, adapter, position) for position in group]
            found += await asyncio.gather(*scoring)
        return _scores(request, dict(zip(positions, found, strict=True)))

    async def _score_one(
        self, request: SamplingRequest, adapter: str | None, position: int
    ) -> tuple[Scores, Ranked]:
        """Return the logprobs of the requested tokens at a position, and the top logprobs.

        Sampling is restricted to the requested token; its logprob is still that of the whole
        distribution. (`logprob_token_ids` would corrupt the top logprobs of others in the batch.)
        """
        asked, own = request.prompt_logprobs, int(request.prompt[position])
        others = set() if asked.targets is None else set(asked.targets[position - 1].tolist())
        body = self._body(request, adapter) | {
            "prompt": request.prompt[:position].tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
        }

        async def force(token: int, top_k: int) -> tuple[float, Ranked]:
            forced = body | {"allowed_token_ids": [token], "logprobs": top_k}
            [choice] = (await self.client.generate(_COMPLETIONS, forced))["choices"]
            logprobs = choice["logprobs"]
            best = _ranked(logprobs["top_logprobs"][0], top_k) if top_k else ()
            return logprobs["token_logprobs"][0], best

        logprob, best = await force(own, asked.top_k)
        scores = {own: logprob}
        for token in sorted(others - {own, -1}):
            scores[token], _ = await force(token, 0)
        return scores, best

    def _body(self, request: SamplingRequest, adapter: str | None) -> dict[str, Any]:
        return {
            "model": adapter or self._model,
            "prompt": request.prompt.tolist(),
            **_NEUTRAL,
        }

    def _sequence(self, choice: Json, top_k: int) -> SampledSequence:
        if choice["finish_reason"] not in {"stop", "length"}:
            raise ServerError(
                f"the inference server {self.client.url} aborted a request:"
                f" {choice['finish_reason']}"
            )
        logprobs = choice["logprobs"]
        return SampledSequence(
            tokens=choice["token_ids"],
            logprobs=logprobs["token_logprobs"],
            stopped=choice["finish_reason"] == "stop",
            top=top_logprobs([_ranked(p, top_k) for p in logprobs["top_logprobs"]], top_k)
            if top_k
            else None,
        )


def _changes(request: SamplingRequest) -> dict[str, Any]:
    """Return penalties and biases, whose meaning and order here are vLLM's.

    The logprobs of vLLM's default (`--logprobs-mode raw_logprobs`) are those before them.
    """
    changes = request.changes
    return {
        "min_p": request.min_p,
        "repetition_penalty": changes.repetition_penalty,
        "presence_penalty": changes.presence_penalty,
        "frequency_penalty": changes.frequency_penalty,
        "logit_bias": {str(token): value for token, value in changes.bias},
    }


def _load_error(refused: InvalidRequest | ServerError) -> Exception:
    """Translate the error of loading an adapter."""
    message = refused.message
    no_route = isinstance(refused, NotThere) and "Not Found" in message
    if no_route or "LoRA is not enabled" in message:
        return AdaptersDisabled(
            f"{message}. To use adapters, start vLLM with --enable-lora and"
            " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if isinstance(refused, NotThere):
        return ServerError(
            f"{message}. vLLM reads adapters from sampler.inference.adapters_dir, which must be"
            " mounted there; if it is mounted at another path, set adapters_dir_there"
        )
    # vLLM reports an invalid adapter, such as one with an unsupported rank, as an internal error.
    return InvalidRequest(message) if "add_lora" in message else refused


def _ranked(position: Mapping[str, float], k: int) -> Ranked:
    """Parse `{"token_id:7": -0.5, ...}`, which includes the sampled token; best first."""
    entries = [(int(name.removeprefix("token_id:")), value) for name, value in position.items()]
    return sorted(entries, key=lambda entry: -entry[1])[:k]


def _scores(request: SamplingRequest, found: Mapping[int, tuple[Scores, Ranked]]) -> PromptScores:
    """Combine the scores of each position."""
    asked, length = request.prompt_logprobs, len(request.prompt)
    logprobs = np.full(length, np.nan, np.float32)
    shape = (0, 0) if asked.targets is None else asked.targets.shape
    targets = np.zeros(shape, np.float32)
    best: list[Ranked] = [()] * length
    for position, (of_named, ranked) in found.items():
        if asked.targets is not None:
            wanted = asked.targets[position - 1]
            targets[position - 1] = [
                of_named[int(token)] if token >= 0 else 0.0 for token in wanted
            ]
        if position >= (asked.logprobs_from or 1):
            logprobs[position] = of_named[int(request.prompt[position])]
            best[position] = ranked
    return PromptScores(
        logprobs=logprobs if asked.logprobs_from is not None else None,
        top=top_logprobs(best, asked.top_k) if asked.top_k else None,
        targets=targets if asked.targets is not None else None,
    )
