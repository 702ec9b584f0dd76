"""How long an idle adapter takes to return: rank 32, with the shapes of a model of 4B parameters.

`python -m benchmarks.paging`. The weights are random and the base model is not needed. Page caches
of the disk are warm, as they are for a model that was used lately. Copies within host memory stand
for those between a GPU and the host, whose bandwidth is similar.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_worker.lora.adapters import Target
from tinkercloud_worker.training.paging import DiskFiles, HostMemory, Models, PagingPlace
from tinkercloud_worker.training.trained_model import TrainedModel, new_adapter

HIDDEN, INNER, QUERIES, KEYS, LAYERS, VOCABULARY = 2560, 9728, 4096, 1024, 36, 151_936
"""The dimensions of Qwen3-4B."""
ROUNDS = 7


def targets() -> list[Target]:
    shapes = {
        "self_attn.q_proj": (HIDDEN, QUERIES),
        "self_attn.k_proj": (HIDDEN, KEYS),
        "self_attn.v_proj": (HIDDEN, KEYS),
        "self_attn.o_proj": (QUERIES, HIDDEN),
        "mlp.gate_proj": (HIDDEN, INNER),
        "mlp.up_proj": (HIDDEN, INNER),
        "mlp.down_proj": (INNER, HIDDEN),
    }
    found = [
        Target(f"model.layers.{layer}.{name}", *shape, "mlp" if "mlp" in name else "attention")
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    ]
    return [*found, Target("lm_head", HIDDEN, VOCABULARY, "unembed")]


def trained_adapter() -> TrainedModel:
    """Return an adapter with moments, without an unapplied gradient."""
    model = new_adapter(targets(), LoraConfig(rank=32, seed=1))
    model.begin_moments()
    weights, _, *moments = model.vectors
    for vector in (weights, *moments):
        vector.uniform_(-1, 1)
    return model


def seconds_of(place: PagingPlace, model: TrainedModel) -> tuple[list[float], list[float]]:
    """Return how long the model took to leave and to return."""
    models, out, back = Models(place, lambda size: size - room[0]), [], []
    room = [2 * model.full_bytes]
    models["m"] = model
    for _ in range(ROUNDS):
        room[0] = 0
        began = time.perf_counter()
        # There is never enough room, so that every model leaves.
        models.make_room(1)
        left = time.perf_counter()
        room[0] = 2 * model.full_bytes
        models["m"]
        out.append(left - began)
        back.append(time.perf_counter() - left)
    return out, back


def main() -> None:
    model = trained_adapter()
    content = sum(vector.nbytes for vector in model.vectors if bool(vector.any()))
    print(
        f"{model.trainable.flat.numel() / 1e6:.0f} million parameters, {content / 1e6:.0f} MB of"
        f" content; copying it within memory takes {1e3 * copy_seconds(content):.0f} ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        places: dict[str, PagingPlace] = {
            "host memory": HostMemory(lambda: None),
            "files": DiskFiles(Path(folder), 1 << 40),
        }
        for name, place in places.items():
            out, back = (1e3 * statistics.median(each) for each in seconds_of(place, model))
            print(f"{name}: leaves in {out:.0f} ms, returns in {back:.0f} ms (median of {ROUNDS})")


def copy_seconds(size: int) -> float:
    """Return the median seconds of a copy between two tensors whose memory is mapped."""
    source = torch.ones(size, dtype=torch.uint8)
    target, seconds = source.clone(), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
