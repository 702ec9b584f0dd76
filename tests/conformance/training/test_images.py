"""Training and sampling with images, as the unmodified SDK, the cookbook and agents send them."""

import io
import json
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from PIL import Image, ImageOps
from tinker import types

from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server
from tinkercloud_testing.small_models.pictures import encoded, picture, plain_picture
from tinkercloud_testing.small_models.vision_models import (
    VISION_END,
    VISION_START,
    save_vision_model,
)

MODEL = "tiny/qwen-vl"
RED, BLUE = (255, 0, 0), (0, 0, 255)
NAMES = {RED: b"red", BLUE: b"blue"}
ADAM = types.AdamParams(learning_rate=2e-2)

LOAD_THE_PROCESSOR = f"""
from PIL import Image
from tinker_cookbook.image_processing_utils import get_image_processor
processor = get_image_processor({MODEL!r})
print(processor.get_number_of_image_patches(84, 56, images_kwargs={{}}) // processor.merge_size**2)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, trainer: str) -> Iterator[Server]:
    """Run a server with a vision-language model."""
    folder = save_vision_model(tmp_path_factory.mktemp("models") / "qwen-vl")
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: folder}, TRAINERS[trainer]) as running:
        yield running


@pytest.fixture
def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=8, seed=1).result()


def image_of(color: tuple[int, int, int], **changes: object) -> types.ImageChunk:
    """Return an image of 6 x 6 patches, which is 9 tokens."""
    data = plain_picture(color, 84, file_format="jpeg")
    return types.ImageChunk.model_validate(
        {"data": data, "format": "jpeg", "expected_tokens": 9, **changes}
    )


def question(image: types.ImageChunk) -> list[types.ModelInputChunk]:
    return [
        types.EncodedTextChunk(tokens=[*b"see ", VISION_START]),
        image,
        types.EncodedTextChunk(tokens=[VISION_END, *b"color "]),
    ]


def a_datum(color: tuple[int, int, int]) -> types.Datum:
    """Return a question about an image, of which only the answer is trained."""
    answer = list(NAMES[color])
    chunks = question(image_of(color))
    prompt = types.ModelInput(chunks=chunks)
    length = prompt.length + len(answer) - 1
    targets, weights = [0] * length, [0.0] * length
    targets[-len(answer) :], weights[-len(answer) :] = answer, [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=answer[:-1])]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(targets, np.int64)),
            "weights": types.TensorData.from_numpy(np.array(weights, np.float32)),
        },
    )


DATA = [a_datum(RED), a_datum(BLUE)]


def train(training: tinker.TrainingClient, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        step = training.forward_backward(DATA, "cross_entropy")
        applied = training.optim_step(ADAM)
        losses.append(step.result().metrics["loss:sum"])
        applied.result()
    return losses


def logprobs_of(training: tinker.TrainingClient) -> list[list[float]]:
    outputs = training.forward(DATA, "cross_entropy").result().loss_fn_outputs
    return [list(output["logprobs"].data) for output in outputs]


def answer_of(sampling: tinker.SamplingClient, color: tuple[int, int, int]) -> bytes:
    prompt = types.ModelInput(chunks=question(image_of(color)))
    params = types.SamplingParams(max_tokens=len(NAMES[color]), temperature=0)
    [sequence] = sampling.sample(prompt, 1, params).result().sequences
    return bytes(sequence.tokens)


def test_training_on_images_lowers_the_loss_and_continues_from_a_checkpoint(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    losses = train(training, 8)

    assert losses[-1] < 0.5 * losses[0]
    path = training.save_state("images").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs_of(resumed) == logprobs_of(training)
    assert train(resumed, 1) == train(training, 1)


@pytest.mark.parametrize("end", ["kill", pytest.param("restart", marks=pytest.mark.long)])
def test_training_on_images_continues_after_the_end_of_its_head(
    server: Server, client: tinker.ServiceClient, training: tinker.TrainingClient, end: str
) -> None:
    undisturbed = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    expected = train(undisturbed, 4)
    losses = train(training, 2)
    # A gradient waits for the optimizer step that follows the end.
    step = training.forward_backward(DATA, "cross_entropy").result()

    if end == "kill":
        server.kill_heads()
    else:
        server.stop()
        server.start()
    training.optim_step(ADAM).result()

    assert [*losses, step.metrics["loss:sum"], *train(training, 1)] == expected


def test_samples_after_training_name_what_is_in_the_image(training: tinker.TrainingClient) -> None:
    train(training, 20)

    sampling = training.save_weights_and_get_sampling_client().result()

    assert [answer_of(sampling, color) for color in NAMES] == list(NAMES.values())


def test_the_sampler_scores_a_prompt_with_an_image_as_the_trainer(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    datum = DATA[0]
    targets = datum.loss_fn_inputs["target_tokens"].data
    chunks = [*question(image_of(RED)), types.EncodedTextChunk(tokens=list(NAMES[RED]))]

    of_trainer = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    sampling = client.create_sampling_client(base_model=MODEL).result()
    of_sampler = sampling.compute_logprobs(types.ModelInput(chunks=chunks)).result()

    count = len(NAMES[RED])
    assert len(of_sampler) == len(targets) + 1
    scored = np.array(of_sampler[-count:], np.float32)
    np.testing.assert_allclose(scored, of_trainer.to_numpy()[-count:], atol=1e-4)


def test_another_image_gives_other_logprobs(training: tinker.TrainingClient) -> None:
    red = a_datum(RED)
    other = types.Datum(
        model_input=types.ModelInput(
            chunks=[
                image_of(BLUE) if isinstance(chunk, types.ImageChunk) else chunk
                for chunk in red.model_input.chunks
            ]
        ),
        loss_fn_inputs=red.loss_fn_inputs,
    )

    outputs = training.forward([red, other], "cross_entropy").result().loss_fn_outputs

    one, two = (output["logprobs"].data for output in outputs)
    before = len(b"see ")
    np.testing.assert_allclose(one[:before], two[:before], atol=1e-5)
    assert np.abs(np.array(one[-3:]) - np.array(two[-3:])).max() > 1e-3


def test_a_wrong_count_of_tokens_is_rejected_with_both_numbers(
    client: tinker.ServiceClient,
) -> None:
    sampling = client.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput(chunks=question(image_of(RED, expected_tokens=8)))

    with pytest.raises(tinker.BadRequestError, match=r"expected_tokens is 8, but .* makes 9"):
        sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()


def test_an_image_at_an_address_is_rejected(client: tinker.ServiceClient) -> None:
    sampling = client.create_sampling_client(base_model=MODEL).result()
    pointer = types.ImageAssetPointerChunk(
        format="png", location="http://127.0.0.1/x.png", expected_tokens=9
    )

    with pytest.raises(tinker.BadRequestError, match="only data: URLs are accepted"):
        sampling.sample(
            types.ModelInput(chunks=[pointer]), 1, types.SamplingParams(max_tokens=1)
        ).result()


def transparent() -> tuple[str, bytes, Image.Image, Image.Image]:
    """Return a format, a file of it, and its picture as people and as some programs see it."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 4), np.uint8))
    white = Image.new("RGBA", image.size, "white")
    return "png", encoded(image, "png"), Image.alpha_composite(white, image), image


def turned() -> tuple[str, bytes, Image.Image, Image.Image]:
    """Return the same of a photo that was taken with the camera turned."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(84, 56))).save(file, format="jpeg", exif=exif)
    stored = Image.open(file)
    return "jpeg", file.getvalue(), ImageOps.exif_transpose(stored), stored


def answer_to(server: Server, file_format: str, data: bytes) -> list[float]:
    """Return the logprobs of the answer to a chat about an image."""
    url = f"data:image/{file_format};base64,{b64encode(data).decode()}"
    content = [
        {"type": "text", "text": "see "},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    fields = {"model": MODEL, "max_tokens": 8, "temperature": 0, "logprobs": True}
    chat = {**fields, "messages": [{"role": "user", "content": content}]}
    answer = server.request("POST", routes.OPENAI_CHAT, chat)
    while answer.status == 503:
        # The model is being loaded.
        answer = server.request("POST", routes.OPENAI_CHAT, chat)
    assert answer.status == 200, answer.body
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    return [entry["logprob"] for entry in entries]


@pytest.mark.parametrize("case", [transparent, turned])
def test_a_chat_about_an_image_has_the_answer_to_what_people_see(
    server: Server, case: Callable[[], tuple[str, bytes, Image.Image, Image.Image]]
) -> None:
    file_format, data, seen, stored = case()

    answer = answer_to(server, file_format, data)
    expected = answer_to(server, "png", encoded(seen.convert("RGB"), "png"))
    other = answer_to(server, "png", encoded(stored.convert("RGB"), "png"))

    assert answer == pytest.approx(expected, abs=1e-5)
    assert answer != pytest.approx(other, abs=1e-3)


def test_the_capabilities_say_that_the_model_reads_images(server: Server) -> None:
    [model] = server.request("GET", "/api/v1/get_server_capabilities").json()["supported_models"]

    assert (model["model_name"], model["reads_images"]) == (MODEL, True)
    assert model["max_context_length"] == 512


def run(arguments: list[str], server: Server, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=server.environment_of_recipes(folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.long
def test_the_cookbook_loads_the_image_processor_from_the_mirror(
    server: Server, tmp_path: Path
) -> None:
    assert run(["-c", LOAD_THE_PROCESSOR], server, tmp_path).strip() == "6"


@pytest.mark.long
def test_the_vlm_classifier_of_the_cookbook_takes_two_steps(server: Server, tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name, color in (("red", RED), ("blue", BLUE)):
            folder = tmp_path / "dpdl-benchmark" / "caltech101" / part / name
            folder.mkdir(parents=True)
            for index in range(2):
                picture = plain_picture(color, 60 + 20 * index, file_format="png")
                (folder / f"{index}.png").write_bytes(picture)

    run(
        [
            *("-m", "tinker_cookbook.recipes.vlm_classifier.train", "experiment_dir=log"),
            *(f"model_name={MODEL}", "renderer_name=qwen3_vl_instruct", "dataset=caltech101"),
            *("batch_size=2", "max_steps=2", "lora_rank=4", "n_eval=2", "max_tokens=4"),
            *("eval_every=2", "save_every=0", "behavior_if_log_dir_exists=delete"),
        ],
        server,
        tmp_path,
    )

    [log] = (tmp_path / "log").glob("*/metrics.jsonl")
    losses = [json.loads(line).get("train_mean_nll") for line in log.read_text().splitlines()]
    assert len([loss for loss in losses if loss is not None]) == 2
