"""vLLM's OpenAI-compatible server: completions by token ids, adapters loaded while it runs.

The server must be started with `--enable-lora`, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and with
an adapter rank and a number of logprobs (`--max-lora-rank`, `--max-logprobs`) that suffice.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import PromptScores, SampledSequence
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.sampler import SamplingRequest, SamplingResult
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
    refuse_alternatives,
    top_logprobs,
)
from tinkercloud_worker.inference.weights_folder import SavedWeights

_COMPLETIONS = "/v1/completions"
_LOAD_SECONDS = 600.0
_CALL_SECONDS = 30.0
_AT_ONCE = 32
"""Positions of one prompt that are scored at the same time."""
_MOST_POSITIONS = 4096
"""Positions of one prompt that are scored at all: each is a request."""
Scores = Mapping[int, float]
"""Token id to logprob."""

# A server may have other defaults, from the model's generation configuration.
_NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    # End tokens are among our stop tokens, unless the request wants to go on after them.
    "ignore_eos": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


class VllmDialect:
    """See `dialect.Dialect`."""

    def __init__(self, client: InferenceClient, model: str) -> None:
        """Make a dialect.

        Args:
            client: of the server.
            model: what the server calls the base model (its `--served-model-name`).
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
                f" {self._model!r}; set sampler.inference.model to its name for this model"
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

    async def draw(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """See `Dialect.draw`. vLLM itself draws sample k with seed + k.

        At temperature 0 it draws one sample and no more, which all are equal to. It reports
        cached tokens if it runs with `--enable-prompt-tokens-details`.
        """
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
        answer = await self.client.generate(_COMPLETIONS, body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        drawn = [self._sequence(choice, request.top_logprobs) for choice in choices]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return SamplingResult(
            drawn * request.num_samples if is_greedy else drawn,
            PromptScores(cached_tokens=details.get("cached_tokens") or 0),
        )

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """See `Dialect.score`. Each position is a completion of one token after the tokens before.

        vLLM's own prompt logprobs leave out, mix up or fail on what adapters add to the output
        embedding, in whatever requests share a batch with one (vllm-project/vllm#51594). Prompts
        that begin alike are read once, so the price is mostly the number of requests.
        """
        asked, length = request.prompt_logprobs, len(request.prompt)
        refuse_alternatives(request)
        first = asked.first_position or length
        if length - first > _MOST_POSITIONS:
            raise InvalidRequest(
                f"prompt logprobs: this model's sampler is a vLLM server, which scores at most"
                f" {_MOST_POSITIONS} positions of a prompt, and {length - first} are asked for; set"
                " prompt_logprobs_last_n, or train with forward only, which scores all"
            )
        positions = range(first, length)
        found: list[tuple[Scores, Ranked]] = []
        for start in range(0, len(positions), _AT_ONCE):
            some = positions[start : start + _AT_ONCE]
            asking = [self._score_one(request, adapter, position) for position in some]
            found += await asyncio.gather(*asking)
        return _scores(request, dict(zip(positions, found, strict=True)))

    async def _score_one(
        self, request: SamplingRequest, adapter: str | None, position: int
    ) -> tuple[Scores, Ranked]:
        """Return the logprobs of the tokens that are named at a position, and the best ones.

        Drawing is restricted to the named token; logprobs are of the whole distribution all the
        same. (`logprob_token_ids` would spoil the top logprobs of others in the batch.)
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
                f"the inference server {self.client.url} gave a request up:"
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


def _load_error(refused: InvalidRequest | ServerError) -> Exception:
    """Translate the error with which an adapter was not loaded."""
    words = refused.message
    no_route = isinstance(refused, NotThere) and "Not Found" in words
    if no_route or "LoRA is not enabled" in words:
        return AdaptersDisabled(
            f"{words}. vLLM takes adapters when it is started with --enable-lora and with"
            " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if isinstance(refused, NotThere):
        return ServerError(
            f"{words}. vLLM reads adapters from sampler.inference.adapters_dir, which it must see;"
            " if it does under another path, set adapters_dir_there"
        )
    # What is wrong with an adapter, such as its rank, is an internal error to vLLM.
    return InvalidRequest(words) if "add_lora" in words else refused


def _ranked(position: Mapping[str, float], k: int) -> Ranked:
    """Read `{"token_id:7": -0.5, ...}`, which names the drawn token too, the best first."""
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
