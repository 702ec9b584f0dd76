"""What an engine's pod tells SGLang's server is what that server can be told."""

import pytest

from tinkercloud_operator.children.engines import engines
from tinkercloud_testing.sessions import COLOCATED, ENGINES, TRAINERS, Json, a_base_model, a_build
from tinkercloud_testing.sglang_definitions import server_options

pytestmark = pytest.mark.slow

MEMORY = {"gpuMemoryPercent": 60, "maxCachedTokens": 4096}


@pytest.mark.parametrize("sampler", [ENGINES, COLOCATED])
def test_every_option_of_an_engine_is_one_of_sglang_s(sampler: Json) -> None:
    offered = a_base_model(
        trainer=TRAINERS, sampler={**sampler, "engines": {**sampler["engines"], **MEMORY}}
    )

    for engine in engines(a_build(offered)):
        given = {word for word in engine["args"] if word.startswith("--")}
        assert "--model-path" in given
        assert given <= server_options()
