"""Stop strings: where SGLang's own functions end a sequence, given the parameters we send."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tinkercloud_protocol.requests.tensors import SampledSequence
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.sglang.generation import ended
from tinkercloud_testing.sglang.sampling import PROMPTS, assert_same, publish
from tinkercloud_testing.sglang.source import File, definition
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_testing.training.engines import Engine, a_sampling_request
from tinkercloud_worker.engine.sampling.growing_text import decoder_of
from tinkercloud_worker.engine.sampling.sampler_interface import StopRules
from tinkercloud_worker.engine.sampling.stopping import cut_at_stop
from tinkercloud_worker.inference.sampler import InferenceSampler
from tinkercloud_worker.inference.sglang.sglang_dialect import _sampling_params

pytestmark = pytest.mark.slow

LONG = "".join(map(chr, range(161, 301)))


def a_merging_tokenizer(word: str) -> tuple[PreTrainedTokenizerFast, int, list[int]]:
    """Return a tokenizer with a token for a word, that token, and the word's byte tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitting = pre_tokenizers.ByteLevel(False, use_regex=False)
    [(characters, _)] = splitting.pre_tokenize_str(word)
    known = {character: index for index, character in enumerate(alphabet)}
    bytewise = [known[character] for character in characters]
    merges = []
    for end in range(2, len(characters) + 1):
        merges.append((characters[: end - 1], characters[end - 1]))
        known[characters[:end]] = len(known)
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges))
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), known[characters], bytewise


def sampling_params(*strings: str) -> Any:
    """Return SGLang's sampling parameters for these stop strings."""
    request = a_sampling_request([1], stop=StopRules(frozenset(), strings))
    return definition("SamplingParams", File.SAMPLING).model_validate(_sampling_params(request, 1))


@pytest.mark.parametrize("stop", ["###", "\n\nUser:", "a.b*[c]", "日本語", "né\n", LONG])
def test_a_stop_string_ends_a_sequence_regardless_of_its_tokens(stop: str) -> None:
    tokenizer, whole, bytewise = a_merging_tokenizer(stop)
    assert tokenizer.decode(bytewise) == tokenizer.decode(whole) == stop
    assert tokenizer.encode(stop) == [whole]
    other = 3

    for drawn in ([whole], bytewise):
        found = ended(sampling_params(stop), [other, other, *drawn, other], tokenizer)

        assert found is not None
        count, reason = found
        assert count == 2 + len(drawn)
        assert reason == {"type": "stop", "matched": stop}
    assert (
        ended(sampling_params(stop), [other, *bytewise[:-1], other, bytewise[-1]], tokenizer)
        is None
    )


def test_the_maximum_number_of_stop_strings_is_accepted_at_any_length() -> None:
    strings = [f"{'*' * 1000}{number}" for number in range(31)]
    tokenizer, word, _ = a_merging_tokenizer("ab")

    assert ended(sampling_params(*strings, "ab"), [word], tokenizer) == (
        1,
        {"type": "stop", "matched": "ab"},
    )


async def test_too_many_stop_strings_are_rejected_by_name(
    engine: Engine, sampler: InferenceSampler
) -> None:
    await publish(engine, sampler, "base", None)
    strings = tuple(f"<{number}>" for number in range(33))
    request = a_sampling_request(PROMPTS[0], stop=StopRules(frozenset(), strings))

    with pytest.raises(
        InvalidRequest, match=r"^sampling_params\.stop: must have at most 32 .*; got 33"
    ):
        await sampler.sample("base", request)

    fewer = a_sampling_request(PROMPTS[0], stop=StopRules(frozenset(), strings[1:]))
    assert_same(await sampler.sample("base", fewer), await engine.sampler.sample("base", fewer))


@pytest.mark.parametrize("stop", ["<|x|>user", "<|x|>", "i<|x|>", "x|>us"])
def test_special_tokens_are_part_of_the_text_that_sglang_searches(stop: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    tokens = tokenizer.encode("Hi<|x|>user again")
    request = a_sampling_request([1], stop=StopRules(frozenset(), (stop,)))
    drawn = SampledSequence(tokens, [-1.0] * len(tokens), stopped=False, top=None)

    found = ended(sampling_params(stop), tokens, tokenizer)

    assert found is not None
    assert found[0] == len(cut_at_stop(drawn, request, decoder_of(tokenizer)).tokens) < len(tokens)
