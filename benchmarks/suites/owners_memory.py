"""What a head keeps in memory of owners who have finished.

    PYTHONPATH=tests/support python -m benchmarks.suites.owners_memory [--owners 6] [--minutes 22] [--tiny]

Owners create runs of different ranks one after the other, train them with texts of different
lengths, save and sample, and finish their session, as the SDK does. The memory of the idle head is
read before the first run, after three minutes, in which it has loaded everything that it needs, and
at the end.

`python -m benchmarks owners_memory` compares the memory of a head with that of its model: once
loaded, and after two minutes of such runs. The libraries alone take 0.75 GiB with a torch build for
CUDA.
"""

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from tinker import types

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement
from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, smollm2, tiny_llama
from tinkercloud_worker.model.weight_files import stored_tensors, weight_files

MODEL = "benchmark/model"
WARM_MINUTES = 3
SUITE_MINUTES = 2
SUITE_OWNERS = 2
IDLE_SECONDS = 120
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--owners", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=22)
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of SmolLM2")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(tiny_llama(), Path(scratch) / "model") if chosen.tiny else smollm2()
        with a_server(Path(scratch) / "state", {MODEL: folder}) as server:
            keys = [server.new_key(f"owner {index}") for index in range(chosen.owners)]
            before = idle_memory(server)
            work_for(server, keys, WARM_MINUTES)
            warm = idle_memory(server)
            count = work_for(server, keys, chosen.minutes)
            after = idle_memory(server)
    result = {"owners": len(keys), "minutes": chosen.minutes, "runs": count, "tiny": chosen.tiny}
    sizes = {"before_mib": before, "warm_mib": warm, "after_mib": after, "kept_mib": after - warm}
    print(json.dumps(result | sizes))


def measure(folder: str) -> Iterator[Measurement]:
    tensors = stored_tensors(weight_files(folder)).values()
    of_model = 4 * sum(math.prod(each.shape) for each in tensors) / MIB
    with (
        tempfile.TemporaryDirectory() as scratch,
        a_server(Path(scratch) / "state", {MODEL: Path(folder)}) as server,
    ):
        keys = [server.new_key(f"owner {index}") for index in range(SUITE_OWNERS)]
        loaded = idle_memory(server)
        count = work_for(server, keys, SUITE_MINUTES)
        after = idle_memory(server)
    note = f"{loaded} MiB for a model of {of_model:.0f} MiB"
    yield Measurement(
        "C38", "memory of a loaded head / its model in float32", loaded / of_model, "x",
        "<= 3", "<= 2.2", note,
    )  # fmt: skip
    yield Measurement(
        "C39", "memory of a head after runs / its model in float32", after / of_model, "x",
        "<= 4", "<= 3", f"{after} MiB after {count} runs of {SUITE_OWNERS} owners",
    )  # fmt: skip


def work_for(server: Server, keys: Sequence[str], minutes: float) -> int:
    """Let all owners run one run after the other at the same time, and return how many."""
    until = time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(len(keys)) as threads:
        numbers = range(len(keys))
        return sum(threads.map(lambda index: work(server, index, keys[index], until), numbers))


def work(server: Server, index: int, key: str, until: float) -> int:
    """Run one run after the other, and return how many."""
    chance = random.Random(index)  # noqa: S311
    for count in itertools.count():
        if time.monotonic() > until:
            return count
        one_run(server, key, chance)
    raise AssertionError


def one_run(server: Server, key: str, chance: random.Random) -> None:
    with server.client(key) as service:
        rank = chance.choice([4, 8, 16])
        training = service.create_lora_training_client(MODEL, rank=rank).result()
        for _ in range(5):
            training.forward_backward(texts(chance), "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(tokens(chance, 64))
        sampler.sample(prompt, 4, types.SamplingParams(max_tokens=32, seed=1)).result()
        training.save_state("last").result()


def texts(chance: random.Random) -> list[types.Datum]:
    lengths = [chance.randint(16, 256) for _ in range(4)]
    return [a_text(tokens(chance, each), weights=[1.0] * (each - 1)) for each in lengths]


def tokens(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1, 60) for _ in range(length)]


def idle_memory(server: Server) -> int:
    """Return the MiB of physical memory of the head once it has freed its caches."""
    time.sleep(IDLE_SECONDS)
    total: int = sum(psutil.Process(pid).memory_info().rss for pid in server.head_pids())
    return total // MIB


if __name__ == "__main__":
    main()
