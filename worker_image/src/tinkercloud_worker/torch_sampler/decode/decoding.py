"""Continuous batching: sequences join and leave a running batch between two steps.

A `DecodingBatch` owns the key-value slots of all sequences that share one module's weights: the
base with any mixture of adapters, or one fully fine-tuned model. Each step runs one pass over one
new position of every sequence. The module is independent of requests, queues and threads.

Shape legend: B running sequences, T new positions, L positions, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tinkercloud_protocol.requests.tensors import SampledSequence, TopLogprobs
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.sampling.growing_text import decoder_of
from tinkercloud_worker.engine.sampling.sampler_interface import (
    UNCHANGED,
    SampledToken,
    SamplingRequest,
)
from tinkercloud_worker.engine.sampling.stopping import StopStringSearch
from tinkercloud_worker.engine.sampling.token_grammar import TokenMatcher
from tinkercloud_worker.lora.segments import ActiveWeights, WeightSegment
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_sampler.decode.captured_steps import CapturedSteps, GraphCapturer
from tinkercloud_worker.torch_sampler.decode.decoding_masks import rows_at
from tinkercloud_worker.torch_sampler.decode.kv_cache import (
    KeyValues,
    KvBudget,
    KvShape,
    PackCache,
    PrefillCache,
    SlotCache,
)
from tinkercloud_worker.torch_sampler.decode.logit_changes import ChangedLogits
from tinkercloud_worker.torch_sampler.decode.token_choice import (
    SamplingParams,
    sample_tokens,
    uniform,
)
from tinkercloud_worker.vision.prepared import PreparedPrompt
from tinkercloud_worker.vision.spans import Images

_NONE = KvBudget(sequences=0, tokens=0)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One sequence being sampled."""

    request: SamplingRequest
    index: int
    """Index among the request's samples."""
    weights: ActiveWeights | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stopped: bool = False
    error: Exception | None = None
    """Why it can't be continued."""
    search: StopStringSearch | None = None
    """The search for its stop strings, after its first token."""
    changed: ChangedLogits | None = None
    """Its penalties and biases, if it has any, after its first token."""
    matcher: TokenMatcher | None = None
    """What its grammar allows, if it has one, after its first token."""

    @property
    def sampling_params(self) -> SamplingParams:
        """How its tokens are sampled."""
        request = self.request
        return SamplingParams(request.temperature, request.top_k, request.top_p, request.min_p)

    @property
    def position(self) -> int:
        """Position of its newest token."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def longest(self) -> int:
        """Maximum number of positions it may occupy."""
        return self.request.num_positions

    @property
    def is_done(self) -> bool:
        """Whether a stop rule, the length limit or an error has ended it."""
        return self.stopped or self.error is not None or len(self.tokens) >= self.request.max_tokens

    def result(self) -> SampledSequence:
        """Return the sampled sequence."""
        top = None
        if self.request.top_logprobs:
            top = TopLogprobs(
                np.stack([ids.cpu().numpy().astype(np.int32) for ids, _ in self.top]),
                np.stack([values.cpu().numpy() for _, values in self.top]),
            )
        return SampledSequence(self.tokens, self.logprobs, self.stopped, top)


class TokenSampler:
    """Samples the next token of sequences from their logits, and detects their end."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampled_logprobs: Literal["model", "tempered"] = "model",
    ) -> None:
        """Create a token sampler.

        Args:
            tokenizer: the model's tokenizer.
            sampled_logprobs: the distribution of returned logprobs; see `SamplerConfig`.
        """
        self._decode = decoder_of(tokenizer)
        self._scored = _own if sampled_logprobs == "model" else _tempered

    def extend(self, sequences: Sequence[RunningSequence], logits_BV: Tensor) -> None:
        """Sample one token for each sequence from its row of logits.

        An exception leaves all sequences as they were. If the end of a single one can't be
        determined, that one ends with the error.
        """
        uniforms = [uniform(s.request.seed, s.index, s.position + 1) for s in sequences]
        params = [sequence.sampling_params for sequence in sequences]
        allowed_BV = allowed_logits(_changed(logits_BV, sequences), sequences)
        tokens_B = sample_tokens(allowed_BV, params, uniforms)
        # One formula for all, as clients compare a token's logprob with those of the likeliest.
        logprobs_BV = torch.log_softmax(self._scored(logits_BV, sequences), 1)
        logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        # Both in one transfer: float64 represents either exactly.
        tokens, logprobs = torch.stack([tokens_B.double(), logprobs_B.double()]).tolist()
        tops = [
            torch.topk(logprobs_BV[row], sequence.request.top_logprobs)
            if sequence.request.top_logprobs
            else None
            for row, sequence in enumerate(sequences)
        ]
        for row, (sequence, top) in enumerate(zip(sequences, tops, strict=True)):
            sequence.tokens.append(int(tokens[row]))
            sequence.logprobs.append(logprobs[row])
            if sequence.changed is not None:
                sequence.changed.add(sequence.tokens[-1])
            if top is not None:
                sequence.top.append((top.indices, top.values))
            try:
                sequence.stopped = self._has_stopped(sequence)
            except Exception as error:  # noqa: BLE001 - it fails its own request
                sequence.error = sequence.error or error
            if sequence.error is None:
                _report(sequence, top)

    def _has_stopped(self, sequence: RunningSequence) -> bool:
        request, token = sequence.request, sequence.tokens[-1]
        strings = request.stop.strings
        if token in request.stop.token_ids:
            return True
        if sequence.matcher is not None:
            sequence.matcher.add(token)
            if not request.stop.token_ids and sequence.matcher.is_complete:
                return True
        if not strings:
            return False
        if sequence.search is None:
            sequence.search = StopStringSearch(strings, self._decode, request.prompt.tolist())
        return sequence.search.completes(token)


def _changed(logits_BV: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """Return the logits with the penalties and biases of those sequences that have any."""
    rows = [row for row, each in enumerate(sequences) if each.request.changes != UNCHANGED]
    if not rows:
        return logits_BV
    changed_BV = logits_BV.clone()
    for row in rows:
        sequence, request = sequences[row], sequences[row].request
        if sequence.changed is None:
            sequence.changed = ChangedLogits(
                request.changes, request.prompt.tolist(), logits_BV[row]
            )
        changed_BV[row] = sequence.changed.of(logits_BV[row])
    return changed_BV


def allowed_logits(logits_BV: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """Return the logits without the tokens that grammars exclude, at minus infinity.

    Rows of sequences without a grammar are unchanged. A sequence whose grammar fails ends with the
    error.
    """
    num_logits, rows, masks = logits_BV.shape[1], [], []
    for row, sequence in enumerate(sequences):
        grammar = sequence.request.grammar
        if grammar is None:
            continue
        try:
            sequence.matcher = sequence.matcher or grammar.matcher()
            # A tokenizer may have fewer tokens than the model has logits, or more.
            allowed = sequence.matcher.allowed(sequence.request.stop.token_ids)[:num_logits]
        except Exception as error:  # noqa: BLE001 - it fails its own request
            sequence.error = error
            continue
        rows.append(row)
        masks.append(np.pad(allowed, (0, num_logits - len(allowed))))
    if not rows:
        return logits_BV
    rows_R = torch.tensor(rows, device=logits_BV.device)
    excluded_RV = torch.from_numpy(~np.stack(masks)).to(logits_BV.device)
    masked_BV = logits_BV.clone()
    masked_BV[rows_R] = masked_BV[rows_R].masked_fill(excluded_RV, -torch.inf)
    return masked_BV


def _report(sequence: RunningSequence, top: "torch.return_types.topk | None") -> None:
    """Report the newest token of a sequence to a request that wants tokens as they are sampled."""
    if sequence.request.on_token is not None:
        alternatives = None if top is None else (top.indices.tolist(), top.values.tolist())
        newest = sequence.tokens[-1], sequence.logprobs[-1]
        sequence.request.on_token(SampledToken(sequence.index, *newest, alternatives))


def _own(logits_BV: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """Return the logits of the model's own distribution."""
    del sequences
    return logits_BV


def _tempered(logits_BV: Tensor, sequences: Sequence[RunningSequence]) -> Tensor:
    """Return the logits at each sequence's temperature; unscaled where the temperature is 0."""
    temperatures = [each.request.temperature or 1.0 for each in sequences]
    return logits_BV / torch.tensor(temperatures, device=logits_BV.device).unsqueeze(1)


class DecodingBatch:
    """The running sequences that share one module's weights."""

    def __init__(
        self,
        base: TorchBaseModel,
        token_sampler: TokenSampler,
        *,
        graph_capturer: GraphCapturer | None = None,
        kept: KvBudget = _NONE,
    ) -> None:
        """Create a batch without sequences.

        Args:
            base: the model.
            token_sampler: samples the tokens.
            graph_capturer: captures decoding steps; None: steps run eagerly.
            kept: the part of the KV cache that stays allocated without sequences.
        """
        self._base = base
        self._token_sampler = token_sampler
        self._num_layers = int(base.config.num_hidden_layers)
        self._cache = SlotCache(self._num_layers)
        self._graphs = (
            CapturedSteps(base, self._cache, graph_capturer, kept) if graph_capturer else None
        )
        self._kept = kept
        self.sequences: list[RunningSequence] = []
        """One for each slot, without gaps."""

    def prefill(
        self,
        cache: PrefillCache,
        tokens: Sequence[int],
        start: int,
        weights: ActiveWeights | None,
        images: Images = (),
    ) -> Tensor:
        """Prefill tokens at positions start, start + 1, ...; return their hidden states [T, D].

        Args:
            cache: the cache of the prompt.
            tokens: the tokens, with all of an image or none.
            start: the position of the first.
            weights: the weights of the prompt.
            images: all images of the prompt.
        """
        ids_T = torch.tensor(list(tokens), dtype=torch.int64, device=self._base.device)
        with torch.no_grad():
            return self._base.hidden_of_rest(
                ids_T, start, images, [WeightSegment(slice(None), weights)], cache
            )

    def prefill_batch(
        self, prompts: Sequence[PreparedPrompt], weights: Sequence[ActiveWeights | None]
    ) -> list[tuple[Tensor, KeyValues]]:
        """Prefill several full prompts in one pass; return the hidden states [T, D] of each.

        The base must support packs.
        """
        lengths = tuple(len(prompt.tokens) for prompt in prompts)
        ids = np.concatenate([prompt.tokens for prompt in prompts]).astype(np.int64)
        ids_R = torch.from_numpy(ids).to(self._base.device)
        images = tuple(prompt.images for prompt in prompts)
        cache = PackCache(self._num_layers)
        with torch.no_grad():
            hidden_RD = self._base.hidden_of(
                PackedSequences(ids_R, lengths, images),
                segments_of(weights, lengths),
                cache=cache,
            )
        bounds = pairwise(accumulate(lengths, initial=0))
        rows = [slice(start, stop) for start, stop in bounds]
        return [(hidden_RD[each], cache.key_values(each)) for each in rows]

    def new_prefill_cache(self, capacity: int, prefix: KeyValues) -> PrefillCache:
        """Return a cache for one prompt, optionally starting with a cached prefix."""
        return PrefillCache(self._num_layers, capacity, prefix)

    def add(self, sequence: RunningSequence, prompt: KeyValues) -> None:
        """Add a sequence after its first token: copy its prompt to a slot."""
        members = [*self.sequences, sequence]
        self._bound_cache(members)
        next_length = max(each.position for each in members) + 1
        self._cache.insert(len(self.sequences), prompt, next_length)
        self.sequences = members
        if self._graphs is not None:
            self._graphs.make_room(len(members), max(each.longest for each in members))

    def cache_tokens_with(self, joining: Sequence[RunningSequence]) -> int:
        """Return the positions that all slots will occupy if more sequences join."""
        needed = self._shape_for([*self.sequences, *joining])
        kept = max(needed.tokens, self._kept.tokens)
        has = self._cache.shape
        # Slots are added when needed; a sufficient allocation stays unchanged.
        return kept if needed.slots > has.slots else max(kept, has.tokens)

    def _shape_for(self, sequences: Sequence[RunningSequence]) -> KvShape:
        """Return the shape that fits sequences until their end."""
        if not sequences:
            return KvShape(0, 0)
        longest = max(each.longest for each in sequences)
        if self._graphs is not None:
            return self._graphs.shape_for(len(sequences), longest)
        return KvShape(len(sequences), longest)

    def _bound_cache(self, members: Sequence[RunningSequence]) -> None:
        needed = self._shape_for(members)
        self._cache.max_tokens = max(needed.tokens, self._kept.tokens)

    def step(self) -> list[RunningSequence]:
        """Sample one token for every sequence; remove and return the finished ones."""
        segments = segments_of([sequence.weights for sequence in self.sequences])
        logits_BV = self._base.logits(self.hidden(), segments)
        self._token_sampler.extend(self.sequences, logits_BV)
        return self._remove([sequence for sequence in self.sequences if sequence.is_done])

    def step_each(self) -> None:
        """Do what `step` does, one sequence after another; those that fail end with the error.

        A step that has failed can be repeated: it would write the same positions again.
        """
        for slot, sequence in enumerate(self.sequences):
            if sequence.is_done:
                continue
            try:
                hidden_1D = self._computed_hidden(slot, [sequence])
                logits_1V = self._base.logits(hidden_1D, segments_of([sequence.weights]))
                self._token_sampler.extend([sequence], logits_1V)
            except Exception as error:  # noqa: BLE001 - it fails its own request
                sequence.error = error
        self._remove([sequence for sequence in self.sequences if sequence.is_done])

    def hidden(self) -> Tensor:
        """Return the hidden states [B, D] of every sequence's newest token."""
        if self._graphs is not None:
            tokens = [sequence.tokens[-1] for sequence in self.sequences]
            positions = [sequence.position for sequence in self.sequences]
            weights = [sequence.weights for sequence in self.sequences]
            hidden_BD = self._graphs.hidden(
                tokens, positions, self._rotary(self.sequences), weights
            )
            if hidden_BD is not None:
                return hidden_BD
        return self._computed_hidden(0, self.sequences)

    def _computed_hidden(self, first: int, sequences: Sequence[RunningSequence]) -> Tensor:
        """Return the hidden states [B, D] of the sequences from a slot on, without a graph."""
        tokens = [sequence.tokens[-1] for sequence in sequences]
        positions = [sequence.position for sequence in sequences]
        segments = segments_of([sequence.weights for sequence in sequences])
        device = self._base.device
        positions_B = torch.tensor(positions, device=device)
        longest = max(sequence.position for sequence in self.sequences)
        self._cache.make_room(len(self.sequences), longest + 1)
        self._cache.begin_step(positions_B, max(positions) + 1, first)
        with torch.no_grad(), rows_at(positions_B, added_in=self._base.dtype):
            hidden_BTD = self._base.hidden(
                torch.tensor(tokens, device=device).unsqueeze(1),
                segments,
                position_ids_BT=torch.tensor(self._rotary(sequences), device=device).unsqueeze(1),
                cache=self._cache,
            )
        return hidden_BTD[:, 0]

    def _rotary(self, sequences: Sequence[RunningSequence]) -> list[int]:
        """Return the rotary position of each sequence's newest token."""
        return [
            each.position + self._base.images.rope_shift(each.request.images) for each in sequences
        ]

    def abort(self, sequences: Sequence[RunningSequence]) -> None:
        """Remove sequences whose requests are done or cancelled."""
        self._remove([sequence for sequence in sequences if sequence in self.sequences])

    def _remove(self, leaving: list[RunningSequence]) -> list[RunningSequence]:
        for sequence in leaving:
            slot, last = self.sequences.index(sequence), len(self.sequences) - 1
            if slot != last:
                self._cache.move(last, slot, self.sequences[last].position + 1)
                self.sequences[slot] = self.sequences[last]
            self.sequences.pop()
        self._bound_cache(self.sequences)
        if not self.sequences and self._cache.shape.tokens > self._kept.tokens:
            self._cache.clear()
        return leaving


def segments_of(
    weights: Sequence[ActiveWeights | None], lengths: Sequence[int] | None = None
) -> list[WeightSegment]:
    """Return the segments of sequences with these weights, one position or a length each."""
    segments, start = [], 0
    each = zip(weights, lengths or [1] * len(weights), strict=True)
    for _, group in groupby(each, key=lambda member: id(member[0])):
        members = list(group)
        stop = start + sum(length for _, length in members)
        segments.append(WeightSegment(slice(start, stop), members[0][0]))
        start = stop
    return segments
