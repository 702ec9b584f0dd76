"""The last samples of the runs whose owners keep the text of some, until they are reported.

Tokens become text only in a report, in a thread. Samples are chosen by when their requests started:
by when they ended, long answers would be preferred.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tinkercloud_protocol.heads.reports.kept_samples import (
    MAX_CHARACTERS,
    SAMPLES_PER_STEP,
    KeptSample,
)
from tinkercloud_protocol.requests.tensors import Int32Array
from tinkercloud_worker.engine.sampling.growing_text import Decode
from tinkercloud_worker.engine.turns.usage_counts import Payer

_MAX_TOKENS = MAX_CHARACTERS
"""Tokens of a prompt, and of an answer, of which the text may be kept."""
_NUL, _SHOWN_NUL = "\0", "\N{SYMBOL FOR NULL}"
"""PostgreSQL can't store the former."""


@dataclass(frozen=True, slots=True)
class StartedSample:
    """A request whose sample will be kept."""

    payer: Payer
    step: int
    """Number of optimizer steps that the sampled weights have taken."""
    number: int
    """Its number among those of the run, from 0."""
    at: datetime


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """The tokens of a sample that was kept, as many as can be needed."""

    started: StartedSample
    prompt: Sequence[int]
    """The last of the prompt."""
    num_prompt: int
    """Number of all tokens of the prompt."""
    answer: Sequence[int]
    """The first of the answer."""
    num_answer: int
    """Number of all tokens of the answer."""
    revision: int
    """Its number among the samples that have ended, from 1."""

    def text(self, decode: Decode) -> KeptSample:
        """Return its text."""
        first = len(self.prompt)
        prompt, num_prompt = _fitting(decode, lambda count: self.prompt[first - count :], first)
        answer, num_answer = _fitting(decode, lambda count: self.answer[:count], len(self.answer))
        started = self.started
        return KeptSample(
            step=started.step,
            place=started.number % SAMPLES_PER_STEP,
            at=started.at,
            owner=started.payer.owner,
            prompt=prompt,
            prompt_tokens_left_out=self.num_prompt - num_prompt,
            answer=answer,
            answer_tokens_left_out=self.num_answer - num_answer,
        )


@dataclass(slots=True)
class _Run:
    num_started: int = 0
    newest: list[TokenSample] = field(default_factory=list)
    """In the order in which their requests started."""


class KeptSamples:
    """The last samples of runs, for reports. Belongs to one event loop."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._num_ended = 0

    def keep(self, run_ids: Collection[str]) -> None:
        """Keep samples of these runs from now on, and drop those of others."""
        self._runs = {run_id: self._runs.get(run_id) or _Run() for run_id in run_ids}

    def start(self, payer: Payer, step: int | None) -> StartedSample | None:
        """Return what to pass to `end`; None if the sample is not to be kept.

        Args:
            payer: who samples, and from which run.
            step: number of optimizer steps that its weights have taken; None if it is not known.
        """
        run = self._runs.get(payer.model_id)
        if run is None or step is None:
            return None
        started = StartedSample(payer, step, run.num_started, datetime.now(UTC))
        run.num_started += 1
        return started

    def end(self, started: StartedSample, prompt: Int32Array, answer: Sequence[int]) -> None:
        """Keep a sample, unless its run's samples are not kept any more."""
        run = self._runs.get(started.payer.model_id)
        if run is None:
            return
        self._num_ended += 1
        # Not the array itself, which may be large.
        last, first = prompt[-_MAX_TOKENS:].tolist(), answer[:_MAX_TOKENS]
        ended = TokenSample(started, last, len(prompt), first, len(answer), self._num_ended)
        run.newest.append(ended)
        # Samples that start within a tick of the clock have the same time.
        run.newest.sort(key=lambda each: (each.started.at, each.started.number))
        del run.newest[:-SAMPLES_PER_STEP]

    def since(self, revision: int) -> tuple[int, dict[str, list[TokenSample]]]:
        """Return the samples by run that have ended since a revision, and the revision now."""
        found = {
            run_id: [each for each in run.newest if each.revision > revision]
            for run_id, run in self._runs.items()
        }
        return self._num_ended, {run_id: samples for run_id, samples in found.items() if samples}


def _fitting(decode: Decode, part: Callable[[int], Sequence[int]], count: int) -> tuple[str, int]:
    """Return the text of as many tokens as fit in `MAX_CHARACTERS`, and their number.

    Args:
        decode: decodes tokens.
        part: returns a number of the tokens.
        count: number of all of them.
    """
    text = decode(part(count))
    while len(text) > MAX_CHARACTERS:
        count = count * MAX_CHARACTERS // len(text)
        text = decode(part(count))
    return text.replace(_NUL, _SHOWN_NUL), count
