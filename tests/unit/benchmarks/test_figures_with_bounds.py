"""A figure with a bound fails for values that are not finite, or were transferred another way."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.trainer import TrainingState, WeightsCopy
from tinkercloud_worker.metrics import Way

pytestmark = pytest.mark.timeout(300)

URL = "http://an-engine-of-these-tests"
CLOSE = 1e-6
FAR = 0.2
NOT_A_NUMBER = math.nan

Modules = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    "errors", [(NOT_A_NUMBER, 1.0), (1.0, NOT_A_NUMBER), (1.0, math.inf), (1.0, -math.inf)]
)
def test_the_largest_error_is_infinite_if_any_is_not_finite(
    benchmarks: Modules, errors: tuple[float, ...]
) -> None:
    largest_error = benchmarks("shared.measuring").largest_error

    assert largest_error(errors) == math.inf
    assert largest_error(np.array(errors, np.float32)) == math.inf
    assert largest_error([0.5, 2, 1]) == 2


@pytest.mark.parametrize("spoilt", ["first", "middle", "last"])
@pytest.mark.parametrize("value", [NOT_A_NUMBER, math.inf])
def test_a_gradient_with_a_nan_is_infinitely_far(
    benchmarks: Modules, spoilt: str, value: float
) -> None:
    worst = benchmarks("gpu.numerics").worst
    theirs = {name: torch.ones(2, 3) for name in ("first", "middle", "last")}
    ours = {name: tensor.clone() for name, tensor in theirs.items()}
    ours[spoilt][1, 2] = value

    assert worst(theirs, theirs) == 0
    assert worst(ours, theirs) == worst(theirs, ours) == math.inf


def test_the_distance_of_a_gradient_is_that_of_its_worst_tensor_and_only_zeros_equal_zeros(
    benchmarks: Modules,
) -> None:
    worst = benchmarks("gpu.numerics").worst
    theirs = {"some": torch.full((4,), 2.0), "none": torch.zeros(4)}

    assert worst({**theirs, "some": torch.full((4,), 2.5)}, theirs) == pytest.approx(0.25)
    assert worst({**theirs, "none": torch.full((4,), 1e-9)}, theirs) == math.inf
    assert worst({**theirs, "none": torch.full((4,), NOT_A_NUMBER)}, theirs) == math.inf


def a_state(step: int = 5) -> TrainingState:
    weights = {name: torch.randn(3, 2) for name in ("a.lora_A", "a.lora_B")}
    moments = {
        f"{name}.{moment}": torch.rand(3, 2)
        for name in weights
        for moment in ("exp_avg", "exp_avg_sq")
    }
    return TrainingState(WeightsCopy(LoraConfig(rank=2), weights), moments, step)


@pytest.mark.slow
def test_a_transferred_state_arrives_with_all_tensors_and_steps(
    benchmarks: Modules,
) -> None:
    handed_over = benchmarks("gpu.megatron").handed_over
    sent = a_state()
    assert sent.moments is not None
    another = dict(sent.moments) | {"a.lora_B.exp_avg": torch.zeros(3, 2)}
    one_less = {name: sent.moments[name] for name in list(sent.moments)[1:]}
    lost = replace(sent, moments=None)

    whole = handed_over(sent, sent, CLOSE)

    assert (whole.value, whole.verdict) == (CLOSE, "strong")
    assert whole.note == "6 of 6 tensors equal, 5 of 5 steps"
    for one, other in [
        (sent, lost),
        (lost, lost),
        (lost, sent),
        (sent, replace(sent, moments=another)),
        (sent, replace(sent, moments=one_less)),
        (sent, replace(sent, step=0)),
        (replace(sent, step=0), replace(sent, step=0)),
    ]:
        assert handed_over(one, other, CLOSE).verdict == "below"


class Sender:
    """A fake sampler of a head that transfers weights in one way."""

    def __init__(self, way: Way) -> None:
        self.way = way

    async def publish(self, version: str, weights: object) -> None:
        if weights is not None:
            with metrics.loading(URL, "model" if version == "whole" else "adapter", self.way):
                pass


@pytest.fixture
def a_proof(benchmarks: Modules, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a factory of proofs without a server, with the given gaps by version."""
    made = benchmarks("gpu.sglang_checks.sglang_proof").Proof
    results = [SimpleNamespace(prompt=SimpleNamespace(logprobs=np.array([np.nan, -1.0])))]

    def proof(gaps: Mapping[str, float], **samplers: Sender) -> Any:
        def gap(
            _: object, *versions: str, against: str | None = None, sampler: object = None
        ) -> np.ndarray:
            return np.array([CLOSE, FAR if against else gaps.get(versions[0], CLOSE), CLOSE])

        monkeypatch.setattr(made, "gap", gap)
        monkeypatch.setattr(made, "sample", lambda *_, **__: results)
        absent = dict.fromkeys(field.name for field in fields(made))
        given = {
            "dialect": SimpleNamespace(client=SimpleNamespace(url=URL)),
            "trainer": SimpleNamespace(copy_weights=lambda model: model),
            "runner": runner,
            "versions": ("base", "one", "two"),
        }
        return made(**{**absent, **given, **samplers})

    with asyncio.Runner() as runner:
        yield proof


@pytest.mark.parametrize("version", ["whole", "base", "one"])
@pytest.mark.parametrize("value", [FAR, NOT_A_NUMBER])
def test_a_server_passes_if_whole_model_base_and_adapter_are_correct(
    benchmarks: Modules, a_proof: Callable[..., Any], version: str, value: float
) -> None:
    whole = benchmarks("gpu.sglang").whole
    sender = Sender("request")

    right = whole(a_proof({}), "S8", "in requests", sender, "request")
    wrong = whole(a_proof({version: value}), "S8", "in requests", sender, "request")

    assert (right.value, right.verdict) == (CLOSE, "strong")
    assert wrong.value == (math.inf if value is NOT_A_NUMBER else FAR)
    assert wrong.verdict == "below"


@pytest.mark.parametrize("asked", ["request", "file", "group"])
def test_a_whole_model_transferred_another_way_fails_the_measurement(
    benchmarks: Modules, a_proof: Callable[..., Any], asked: Way
) -> None:
    carried = benchmarks("gpu.sglang").carried
    another: Way = "request" if asked == "file" else "file"

    there = carried(a_proof({}), "S13", "so", Sender(asked), asked)
    elsewhere = carried(a_proof({}), "S13", "so", Sender(another), asked)

    assert there.verdict == "strong"
    assert elsewhere.value == math.inf
    assert elsewhere.note == f"used another path than {asked}: {another}"


def test_an_adapter_transferred_another_way_fails_the_measurement(
    benchmarks: Modules, a_proof: Callable[..., Any]
) -> None:
    sglang = benchmarks("gpu.sglang")
    sent, read = Sender("request"), Sender("file")

    def verdicts(sampler: Sender, reader: Sender) -> list[str]:
        proof = a_proof({}, sampler=sampler, reader=reader)
        proof.loads = proof.publish("base", "one", "two")
        return [sglang.alone(proof).verdict, sglang.from_files(proof).verdict]

    assert verdicts(sent, read) == ["strong", "pass"]
    assert verdicts(read, sent) == ["below", "below"]
