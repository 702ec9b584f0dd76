"""The pictures of docs/use/console.md; `make console-pictures` writes them."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from PIL import Image
from playwright.sync_api import Page
from tinker import types
from transformers import AutoTokenizer

from tinkercloud_testing.clients.browsers import Open
from tinkercloud_testing.clients.console_runs import trained
from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import smollm2

pytestmark = pytest.mark.skipif(
    "TINKERCLOUD_TEST_PICTURES" not in os.environ, reason="writes to docs: make console-pictures"
)

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(__file__).parents[2] / "docs" / "images"
VERSES = [
    "Tyger Tyger, burning bright, in the forests of the night",
    "Shall I compare thee to a summer's day? Thou art more lovely and more temperate",
    "Two roads diverged in a yellow wood, and sorry I could not travel both",
    "Hope is the thing with feathers that perches in the soul",
    "I wandered lonely as a cloud that floats on high o'er vales and hills",
]
MAX_BYTES = 150_000
PICTURES: dict[str, dict[str, Any]] = {
    "console.png": {"viewport": {"width": 1100, "height": 900}},
    "console-dark.png": {"viewport": {"width": 1100, "height": 900}, "color_scheme": "dark"},
    "console-phone.png": {"viewport": {"width": 380, "height": 820}},
}


@pytest.fixture(scope="session")
def server(chromium: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the model of `make run` in place of a tiny one."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: smollm2()}) as running:
        yield running


@pytest.fixture(scope="module")
def run(server: Server) -> str:
    """Return a run that has learned verses, each of them several times."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    texts = [
        a_text(tokens, weights=[1.0] * (len(tokens) - 1)) for tokens in tokenizer(VERSES).input_ids
    ]

    def learn(training: tinker.TrainingClient, number: int) -> None:
        learned = [texts[number % len(texts)], texts[(3 * number + 1) % len(texts)]]
        _gradient = training.forward_backward(learned, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=5e-4)).result()

    return trained(server, MODEL, steps=40, name="verses", learn=learn)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_a_run_is_small(logged_in: Open, run: str, name: str) -> None:
    window = logged_in(**PICTURES[name])
    window.goto(f"/console/runs/{run}")
    if name == "console-phone.png":
        window.get_by_role("button", name="Save").evaluate("element => element.scrollIntoView()")

    content = picture(window)

    assert len(content) < MAX_BYTES
    (FOLDER / name).write_bytes(content)


def picture(window: Page) -> bytes:
    """Return what the window shows, as a PNG of 64 colours."""
    shown, small = Image.open(io.BytesIO(window.screenshot())), io.BytesIO()
    shown.convert("RGB").quantize(64).save(small, "png", optimize=True)
    return small.getvalue()
