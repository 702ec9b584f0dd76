"""Options and variables of an engine's pod exist in SGLang."""

import re

import pytest

from tinkercloud_operator.children.engines import engines
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    TRAINERS,
    Json,
    a_base_model,
    a_build,
)
from tinkercloud_testing.sglang.source import server_options, server_variables

pytestmark = pytest.mark.slow

MEMORY = {"gpuMemoryPercent": 60, "maxCachedTokens": 4096}


@pytest.fixture(params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Return a dtype of the weights; SGLang selects its own kernels for only one of them."""
    return str(request.param)


@pytest.fixture(params=[ENGINES, COLOCATED], ids=["engines", "colocated"])
def containers(request: pytest.FixtureRequest, dtype: str) -> list[Json]:
    sampler: Json = request.param
    offered = a_base_model(
        trainer={**TRAINERS, "dtype": dtype},
        sampler={**sampler, "engines": {**sampler["engines"], **MEMORY}},
    )
    return engines(a_build(offered))


def test_all_options_of_an_engine_exist_in_sglang(containers: list[Json], dtype: str) -> None:
    for engine in containers:
        given = {word for word in engine["args"] if word.startswith("--")}
        assert "--model-path" in given
        assert ("--attention-backend" in given) == (dtype == "float32")
        assert given <= server_options()


def test_all_options_added_by_the_shell_of_the_pod_exist_in_sglang(containers: list[Json]) -> None:
    for engine in containers:
        added = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", " ".join(engine["command"])))
        assert {"--attention-backend", "--api-key", "--admin-api-key"} == added
        assert added <= server_options()


def test_all_environment_variables_for_sglang_are_read_by_it(containers: list[Json]) -> None:
    for engine in containers:
        given = {each["name"] for each in engine["env"] if each["name"].startswith("SGLANG_")}
        assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in given
        assert given <= server_variables()
