"""RLVE: configurations, difficulty, problems, prompts and training data."""

import random
import subprocess
import sys
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tinkercloud_programs.rlve.batches import Group, Response, advantages, data_of
from tinkercloud_programs.rlve.difficulty import Difficulty
from tinkercloud_programs.rlve.problems import Outcome, Problems
from tinkercloud_protocol.programs.rlve import ENVIRONMENTS, RlveConfig

REWARDS = st.lists(st.floats(-1, 1), min_size=2, max_size=16)


def config(**changes: object) -> RlveConfig:
    fields = {"enabled": True, "environment_list": ["Division"]}
    return RlveConfig.model_validate(fields | changes)


@pytest.fixture(scope="module")
def problems() -> Problems:
    return Problems(config())


def test_the_known_environments_are_those_of_the_package(problems: Problems) -> None:
    assert set(problems._environments) == ENVIRONMENTS
    assert set(problems._controllers) == ENVIRONMENTS


def test_problems_need_no_torch() -> None:
    script = """
import random, sys
sys.modules["torch"] = None
from tinkercloud_programs.rlve.problems import Problems
from tinkercloud_protocol.programs.rlve import RlveConfig
problems = Problems(RlveConfig(enabled=True, environment_list=["Division"]))
print(problems.generate("Division", 0, random.Random(0)).verify("<answer>x</answer>").reward)
print("torch" in sys.modules)
"""
    printed = subprocess.check_output([sys.executable, "-c", script], text=True)

    assert printed.split() == ["-1.0", "False"]


def test_the_difficulty_rises_when_enough_prompts_of_the_highest_one_are_solved() -> None:
    settings = config(min_prompts_before_difficulty_check=3, min_metric_to_increase_difficulty=0.5)
    difficulty = Difficulty(2)

    for accuracy in (0.0, 1.0):
        difficulty.record(2, accuracy, settings)
    difficulty.record(1, 0.0, settings)
    assert difficulty.highest == 2
    difficulty.record(2, 0.6, settings)

    assert (difficulty.highest, difficulty.num_prompts) == (3, 0)
    assert difficulty.metric == pytest.approx(1.6 / 3)
    assert difficulty.total_prompts == 4


def test_the_difficulty_stays_when_too_few_prompts_are_solved_and_counting_restarts() -> None:
    settings = config(min_prompts_before_difficulty_check=2)
    difficulty = Difficulty(0)

    for accuracy in (0.8, 0.8, 1.0, 1.0):
        difficulty.record(0, accuracy, settings)

    assert (difficulty.highest, difficulty.metric) == (1, 1.0)


@given(highest=st.integers(0, 20), window=st.integers(1, 10), seed=st.integers())
def test_problems_have_difficulties_of_the_window_below_the_highest(
    highest: int, window: int, seed: int
) -> None:
    settings = config(difficulty_sliding_window_size=window)

    chosen = Difficulty(highest).choose(settings, random.Random(seed))

    assert max(0, highest - window + 1) <= chosen <= highest


def test_a_problem_is_the_same_for_the_same_seed_and_verifies_its_answer(
    problems: Problems,
) -> None:
    first, second = (problems.generate("Division", 1, random.Random(5)) for _ in range(2))

    verdicts = [first.verify(f"<answer>{number}</answer>") for number in range(100)]

    assert first.text == second.text
    assert [verdict for verdict in verdicts if verdict.accuracy] == [Outcome(1.0, 1.0)]
    assert first.verify("no answer") == Outcome(-1.0, 0.0)


@given(REWARDS)
def test_advantages_of_a_group_are_relative_to_its_mean(rewards: list[float]) -> None:
    found = advantages(rewards)

    assert fmean(found) == pytest.approx(0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    assert [found[index] for index in order] == sorted(found)


def test_only_groups_with_different_rewards_are_trained_on(problems: Problems) -> None:
    problem = problems.generate("Division", 0, random.Random(0))

    def group(*rewards: float) -> Group:
        responses = [Response([7, 8], [-0.5, -0.25], Outcome(each, 0.0)) for each in rewards]
        return Group(problem, [1, 2, 3], responses)

    data = data_of([group(0.0, 1.0), group(1.0, 1.0)])

    assert len(data) == 2
    inputs = data[1].loss_fn_inputs
    assert data[1].model_input.to_ints() == [1, 2, 3, 7]
    assert list(inputs["target_tokens"].data) == [2, 3, 7, 8]
    assert list(inputs["logprobs"].data) == [0.0, 0.0, -0.5, -0.25]
    assert list(inputs["advantages"].data) == pytest.approx([0.0, 0.0, 0.25, 0.25], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment_list": ["multiplication"]}, "did you mean 'Multiplication'"),
        ({"environment_list": ["Division", "Division"]}, "more than once"),
        ({"partial_rollout": False}, "cannot be switched off"),
        ({"over_sampling_batch_size": 31}, "must be at least rollout_batch_size"),
        ({"answer_marker_type": "<a></a>"}, "answer_marker_type"),
        ({"rollout_temperature": 0}, "rollout_temperature"),
        ({"num_rollout": "5"}, "num_rollout"),
        ({"rollout": 5}, "rollout"),
    ],
)
def test_an_invalid_configuration_is_rejected_with_the_name_of_the_field(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_a_disabled_configuration_is_not_checked() -> None:
    settings = RlveConfig.model_validate({"enabled": False, "environment_list": ["?"], "x": 1})

    assert not settings.enabled
