"""SGLang's native API: `/generate` with token ids, adapters by name, memory and weights on demand.

Engines must be started with `--enable-lora --lora-target-modules all --max-lora-rank R` (to take
whole mixtures: with modules that are not of experts), with SGLANG_RETURN_ORIGINAL_LOGPROB=1
(otherwise logprobs are those of the temperature drawn at) and with
`--enable-deterministic-inference`, without which seeds mean nothing.
"""

from collections.abc import Sequence
from typing import Any

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.tensors import PromptScores, SampledSequence
from tinkercloud_worker.engine.sampler import SamplingRequest, SamplingResult, StopRules
from tinkercloud_worker.inference.client import InferenceClient, Json, NotThere, ServerError
from tinkercloud_worker.inference.dialect import (
    SEED_MASK,
    bounded_top_k,
    refuse_alternatives,
    top_logprobs,
)
from tinkercloud_worker.inference.sglang.adapters import SglangAdapters
from tinkercloud_worker.inference.sglang.scoring import PromptScoring, cached_tokens, ranked
from tinkercloud_worker.inference.weights_folder import SavedWeights

RELEASED = "+released"
"""Suffix of the weight version of an engine that was told to release its memory."""
_CALL_SECONDS = 60.0
_MISSING = (
    "never been loaded",
    "not loaded",
    # It looks for an evicted or unloaded adapter where its files would be.
    "Failed to implicitly load",
)
"""Parts of its messages about an adapter that it does not hold."""

_MOST_STOP_STRINGS = 32


class SglangDialect:
    """See `dialect.Dialect`."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self._adapters = SglangAdapters(client)
        self.weight_version: str | None = None
        """Weight version that the engine's answers should have; None to accept any."""

    async def check_health(self) -> None:
        """See `Dialect.check_health`. The engine draws a token for it, so it is called rarely.

        An engine that has released its memory draws none until it is told to resume it.
        """
        info = await self.model_info()
        if not str(info.get("weight_version")).endswith(RELEASED):
            await self.client.get("/health_generate", seconds=_CALL_SECONDS)

    async def check_model(self) -> None:
        """See `Dialect.check_model`. SGLang knows its model by its folder only: any will do."""
        info = await self.model_info()
        if not info.get("is_generation", True):
            raise ServerError(f"{self.client.url} serves {info['model_path']}, which draws no text")

    async def load_adapter(self, adapter: SavedWeights) -> None:
        """See `Dialect.load_adapter`."""
        await self._adapters.load(adapter)

    async def unload_adapter(self, name: str) -> None:
        """See `Dialect.unload_adapter`. SGLang waits for the adapter's requests to end."""
        await self._adapters.unload(name)

    async def draw(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """See `Dialect.draw`.

        A batch of one prompt many times, since the samples of SGLang's own `n` share one seed.
        """
        _check_stops(request.stop)
        seeds = [(request.seed + k) & SEED_MASK for k in range(request.num_samples)]
        body = {
            "input_ids": [request.prompt.tolist()] * request.num_samples,
            "sampling_params": [_sampling_params(request, seed) for seed in seeds],
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
        }
        items = await self._generate(body, adapter)
        return SamplingResult(
            [self._sequence(item, request.top_logprobs) for item in items],
            # Of the first to be computed: others may have found its keys and values in the cache.
            PromptScores(cached_tokens=min(cached_tokens(item["meta_info"]) for item in items)),
        )

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """See `Dialect.score`. A long prompt is asked about in parts: see `scoring`."""
        refuse_alternatives(request)
        scoring = PromptScoring(request)
        for part in scoring.parts:
            body: dict[str, Any] = {
                "input_ids": [request.prompt[: part.end].tolist()],
                "sampling_params": [{"max_new_tokens": 0, "temperature": 0.0}],
                "return_logprob": True,
                "logprob_start_len": part.start - 1,
                "top_logprobs_num": request.prompt_logprobs.top_k,
            }
            if part.named:
                body["token_ids_logprob"] = [part.named]
            [item] = await self._generate(body, adapter)
            scoring.add(part, item["meta_info"])
        return scoring.scores()

    async def model_info(self) -> Json:
        """Return the engine's description of its model, with `model_path` and `weight_version`."""
        return await self.client.get("/model_info", seconds=_CALL_SECONDS)

    async def _generate(self, body: dict[str, Any], adapter: str | None) -> Sequence[Json]:
        if adapter is not None:
            body["lora_path"] = adapter
        try:
            answer = await self.client.generate("/generate", body)
        except InvalidRequest as error:
            missing = any(words in error.message for words in _MISSING)
            if adapter is None or not missing:
                raise
            raise NotThere(error.message) from None
        items: Sequence[Json] = answer["items"]
        for item in items:
            version = item["meta_info"].get("weight_version")
            if self.weight_version is not None and version != self.weight_version:
                raise NotThere(
                    f"the inference server {self.client.url} has weights {version!r}, not"
                    f" {self.weight_version!r}"
                )
        return items

    def _sequence(self, item: Json, top_k: int) -> SampledSequence:
        meta = item["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise ServerError(
                f"the inference server {self.client.url} gave a request up:"
                f" {meta['finish_reason'].get('message', 'no reason given')}"
            )
        drawn = meta["output_token_logprobs"]
        return SampledSequence(
            tokens=[int(token) for _, token, *_ in drawn],
            logprobs=[float(logprob) for logprob, *_ in drawn],
            stopped=meta["finish_reason"]["type"] == "stop",
            top=top_logprobs(ranked(meta["output_top_logprobs"]), top_k) if top_k else None,
        )


def _check_stops(stop: StopRules) -> None:
    if len(stop.strings) > _MOST_STOP_STRINGS:
        raise InvalidRequest(
            f"sampling_params.stop has {len(stop.strings)} strings: this model's sampler is SGLang,"
            f" which looks for at most {_MOST_STOP_STRINGS}; leave some out, give those that are"
            " one token by its id, or ask a sampler with backend torch"
        )


def lookback_patterns(strings: Sequence[str]) -> list[str]:
    """Return patterns that match nothing, and make SGLang look far enough back for stop strings.

    SGLang looks for them in the last tokens that it drew, as many as its tokenizer makes of the
    longest string; a model may draw a string as more tokens than that. For a pattern it decodes a
    token for each character that may match. No string is more tokens than it has bytes.
    """
    longest = max((len(string.encode()) for string in strings), default=0)
    return [rf"[^\s\S].{{0,{longest}}}"] if longest else []


def _sampling_params(request: SamplingRequest, seed: int) -> dict[str, Any]:
    # Every default is stated: a model's own generation configuration may have others.
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_k": bounded_top_k(request.top_k) or -1,
        "top_p": request.top_p,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": seed,
        "stop": list(request.stop.strings),
        "stop_regex": lookback_patterns(request.stop.strings),
        "stop_token_ids": sorted(request.stop.token_ids),
        # It would switch our stop tokens off too. Where there are any, the model's own are among
        # them.
        "ignore_eos": not request.stop.token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
