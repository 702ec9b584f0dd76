"""`engines` is set exactly if the sampler has engines."""

import pytest

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.pods.shapes import EnginesShape, SamplerShape
from tinkercloud_testing.resources.sessions import (
    COLOCATED,
    ENGINES,
    EXTERNAL,
    SAMPLERS,
    Json,
    a_base_model,
)


@pytest.mark.parametrize("said", [{}, {"engines": None}, {"engines": {}}], ids=str)
def test_what_is_not_said_of_engines_is_as_their_fields_say(said: Json) -> None:
    read = SamplerShape.model_validate(SAMPLERS | said)

    assert read.engines == EnginesShape()
    assert SamplerShape(**SAMPLERS | said) == read


@pytest.mark.parametrize("sampler", [{}, EXTERNAL, {"colocated": True}], ids=str)
@pytest.mark.parametrize("said", [{}, {"engines": {}}], ids=["not said", "older definitions"])
def test_other_backends_have_no_engines(sampler: Json, said: Json) -> None:
    assert SamplerShape.model_validate(sampler | said).engines is None


@pytest.mark.parametrize("sampler", [ENGINES, COLOCATED], ids=["own pods", "colocated"])
def test_what_is_said_of_engines_is_kept(sampler: Json) -> None:
    read = SamplerShape.model_validate(sampler)

    assert read.engines == EnginesShape.model_validate(sampler["engines"])
    assert SamplerShape(**dict(read)) == read


def test_a_base_model_is_read_again_as_it_was_written() -> None:
    offered = a_base_model(sampler=SAMPLERS)

    assert BaseModelSpec.model_validate_json(offered.model_dump_json(by_alias=True)) == offered
