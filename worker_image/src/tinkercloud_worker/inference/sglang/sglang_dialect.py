"""SGLang's native API: `/generate` with token ids, adapters by name, memory and weights on demand.

Engines must be started with `--enable-lora --lora-target-modules all --max-lora-rank R` (for fully
fine-tuned mixture models: without modules of experts), with SGLANG_RETURN_ORIGINAL_LOGPROB=1
(otherwise logprobs are those at the sampling temperature) and with
`--enable-deterministic-inference` (otherwise seeds have no effect).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinkercloud_protocol.requests.tensors import PromptScores, SampledSequence, TopLogprobs
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.sampling.sampler_interface import (
    UNCHANGED,
    PromptLogprobParams,
    SamplingRequest,
    SamplingResult,
    StopRules,
)
from tinkercloud_worker.inference.client import InferenceClient, Json, NotThere, ServerError
from tinkercloud_worker.inference.dialect import (
    SEED_MASK,
    bounded_top_k,
    reject_alternatives,
    top_logprobs,
)
from tinkercloud_worker.inference.sglang.engine_adapters import SglangAdapters
from tinkercloud_worker.inference.sglang.scoring_requests import (
    PromptScoring,
    cached_tokens,
    ranked,
)
from tinkercloud_worker.inference.sglang.sglang_images import (
    check_prompt,
    prompt_fields,
    reject_scoring,
)
from tinkercloud_worker.inference.weights_folder import SavedWeights

RELEASED = "+released"
"""Suffix of the weight version of an engine that has released its memory, or is about to."""
_CALL_SECONDS = 60.0
_MISSING = (
    "never been loaded",
    "not loaded",
    # SGLang looks for the files of an evicted or unloaded adapter.
    "Failed to implicitly load",
)
"""Parts of SGLang's messages about an adapter that it does not have."""

_MAX_STOP_STRINGS = 32


class SglangDialect:
    """See `dialect.Dialect`."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client
        self._adapters = SglangAdapters(client)
        self.weight_version: str | None = None
        """Expected weight version of the engine's responses; None to accept any."""

    async def check_health(self) -> None:
        """See `Dialect.check_health`. The engine generates a token, so call it rarely.

        An engine that has released its memory generates none until it resumes.
        """
        info = await self.model_info()
        if not str(info.get("weight_version")).endswith(RELEASED):
            await self.client.get("/health_generate", seconds=_CALL_SECONDS)

    async def check_model(self) -> None:
        """See `Dialect.check_model`. SGLang only reports a folder, so any name is accepted."""
        info = await self.model_info()
        if not info.get("is_generation", True):
            raise ServerError(
                f"{self.client.url} serves {info['model_path']}, which generates no text"
            )

    async def load_adapter(self, adapter: SavedWeights) -> None:
        """See `Dialect.load_adapter`."""
        await self._adapters.load(adapter)

    async def unload_adapter(self, name: str) -> None:
        """See `Dialect.unload_adapter`. SGLang waits for the adapter's requests to end."""
        await self._adapters.unload(name)

    async def sample(self, request: SamplingRequest, adapter: str | None) -> SamplingResult:
        """See `Dialect.sample`.

        The prompt is repeated in a batch, since the samples of SGLang's own `n` share one seed.
        """
        _check_stops(request.stop)
        if request.images and request.grammar is not None and not request.grammar.is_needed:
            request = replace(request, grammar=None)
        _check_changes(request)
        seeds = [(request.seed + k) & SEED_MASK for k in range(request.num_samples)]
        body = {
            **prompt_fields(request),
            "sampling_params": [_sampling_params(request, seed) for seed in seeds],
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs,
        }
        items = await self._generate(body, adapter)
        for item in items:
            check_prompt(request, item["meta_info"], self.client.url)
        sequences = [self._sequence(item, request.top_logprobs) for item in items]
        if request.changes != UNCHANGED or request.grammar is not None:
            scoring = [self._unchanged(each, request, adapter) for each in sequences]
            sequences = await asyncio.gather(*scoring)
        return SamplingResult(
            sequences,
            # The minimum is that of the first one computed; the others may reuse its cache entries.
            PromptScores(cached_tokens=min(cached_tokens(item["meta_info"]) for item in items)),
        )

    async def _unchanged(
        self, sequence: SampledSequence, request: SamplingRequest, adapter: str | None
    ) -> SampledSequence:
        """Return a sample with the model's own logprobs.

        SGLang changes the logits in place, also by grammars, before it computes any logprobs.
        """
        length = len(request.prompt)
        asked = PromptLogprobParams(logprobs_from=length, top_k=request.top_logprobs)
        tokens = np.asarray(sequence.tokens, np.int32)
        whole = np.concatenate([request.prompt, tokens])
        scores = await self.score(replace(request, prompt=whole, prompt_logprobs=asked), adapter)
        assert scores.logprobs is not None  # noqa: S101 - asked for
        top = scores.top
        if top is not None:
            top = TopLogprobs(top.token_ids[length:], top.logprobs[length:])
        return replace(sequence, logprobs=scores.logprobs[length:].tolist(), top=top)

    async def score(self, request: SamplingRequest, adapter: str | None) -> PromptScores:
        """See `Dialect.score`. A long prompt is scored in parts: see `scoring_requests`."""
        reject_alternatives(request)
        reject_scoring(request)
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
                f"the inference server {self.client.url} aborted a request:"
                f" {meta['finish_reason'].get('message', 'no reason given')}"
            )
        sampled = meta["output_token_logprobs"]
        return SampledSequence(
            tokens=[int(token) for _, token, *_ in sampled],
            logprobs=[float(logprob) for logprob, *_ in sampled],
            stopped=meta["finish_reason"]["type"] == "stop",
            top=top_logprobs(ranked(meta["output_top_logprobs"]), top_k) if top_k else None,
        )


def _check_stops(stop: StopRules) -> None:
    if len(stop.strings) > _MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"sampling_params.stop: must have at most {_MAX_STOP_STRINGS} strings, because this"
            f" model's sampler is SGLang; got {len(stop.strings)}. Leave some out, replace strings"
            " of one token by its id, or use a sampler with backend torch"
        )


def _check_changes(request: SamplingRequest) -> None:
    """Check that SGLang changes logits as the other samplers do.

    Its repetition penalty ignores the prompt, and its min_p comes after top_p.
    """
    is_scored_again = request.changes != UNCHANGED or request.grammar is not None
    if is_scored_again and request.images:
        raise InvalidRequest(
            "sampling_params.frequency_penalty, presence_penalty, logit_bias, and fields that"
            " constrain the answer (response_format, tool_choice, parallel_tool_calls, strict): not"
            " supported for prompts with images, because this model's sampler is SGLang; leave them"
            " out, or use a sampler with backend torch"
        )
    for name, is_used in (
        ("repetition_penalty", request.changes.repetition_penalty != 1.0),
        ("min_p", request.min_p > 0 and request.top_p < 1),
    ):
        if is_used:
            with_top_p = " together with top_p" if name == "min_p" else ""
            raise InvalidRequest(
                f"sampling_params.{name}: not supported{with_top_p}, because this model's sampler"
                " is SGLang, where it means something else; leave it out, or use a sampler with"
                " backend torch"
            )


def lookback_patterns(strings: Sequence[str]) -> list[str]:
    """Return patterns that match nothing, and make SGLang search far enough back for stop strings.

    SGLang searches the last generated tokens, as many as its tokenizer needs for the longest
    string; a model may generate a string as more tokens than that. For a pattern, SGLang decodes
    one token per character that may match. No string has more tokens than bytes.
    """
    longest = max((len(string.encode()) for string in strings), default=0)
    return [rf"[^\s\S].{{0,{longest}}}"] if longest else []


def _sampling_params(request: SamplingRequest, seed: int) -> dict[str, Any]:
    # Every default is explicit: the model's generation configuration may have others.
    return {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_k": bounded_top_k(request.top_k) or -1,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "frequency_penalty": request.changes.frequency_penalty,
        "presence_penalty": request.changes.presence_penalty,
        "repetition_penalty": 1.0,
        "logit_bias": {str(token): value for token, value in request.changes.bias} or None,
        "sampling_seed": seed,
        # Engines compile this grammar with the library of the head: --grammar-backend llguidance.
        "ebnf": request.grammar.source if request.grammar is not None else None,
        "stop": list(request.stop.strings),
        "stop_regex": lookback_patterns(request.stop.strings),
        "stop_token_ids": sorted(request.stop.token_ids),
        # ignore_eos would disable the stop tokens too. If there are any, they include the model's
        # own end tokens.
        "ignore_eos": not request.stop.token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
