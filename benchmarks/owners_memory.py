"""What a head keeps in memory of owners who have finished.

    python -m benchmarks.owners_memory [--owners 6] [--minutes 22] [--model FOLDER]

Owners create runs of different ranks one after the other, train them with texts of different
lengths, save and sample, and unload them. The memory of the head is read after a first run and
after the last one, when the head has been idle for so long that it has freed its caches.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from tinker import types

from tinkercloud_testing.models import save, smollm2, tiny_llama
from tinkercloud_testing.sdk_steps import a_text
from tinkercloud_testing.servers import Server, a_server

MODEL = "benchmark/model"
IDLE_SECONDS = 90
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
            one_run(server, keys[0], random.Random(0))  # noqa: S311
            before = idle_memory(server)
            until = time.monotonic() + 60 * chosen.minutes
            with ThreadPoolExecutor(len(keys)) as threads:
                runs = threads.map(
                    lambda index: work(server, index, keys[index], until), range(len(keys))
                )
                curve = list(measured(server, until))
                count = sum(runs)
            after = idle_memory(server)
    result = {"owners": len(keys), "minutes": chosen.minutes, "runs": count, "tiny": chosen.tiny}
    sizes = {
        "before_mib": before // MIB,
        "after_mib": after // MIB,
        "kept_mib": (after - before) // MIB,
    }
    print(json.dumps(result | sizes | {"each_minute_mib": curve}))


def work(server: Server, index: int, key: str, until: float) -> int:
    """Run one run after the other, and return how many."""
    chance = random.Random(index)  # noqa: S311
    for count in itertools.count():
        if time.monotonic() > until:
            return count
        one_run(server, key, chance)
    raise AssertionError


def measured(server: Server, until: float) -> Iterator[int]:
    """Yield the memory of the head in MiB, each minute."""
    while time.monotonic() < until:
        yield resident(server) // MIB
        time.sleep(60)


def one_run(server: Server, key: str, chance: random.Random) -> None:
    service = server.client(key)
    training = service.create_lora_training_client(MODEL, rank=chance.choice([4, 8, 16])).result()
    for _ in range(5):
        training.forward_backward(texts(chance), "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens(chance, 64))
    sampler.sample(prompt, 4, types.SamplingParams(max_tokens=32, seed=1)).result()
    training.save_state("last").result()
    server.post("unload_model", {"model_id": training.model_id}, key=key)


def texts(chance: random.Random) -> list[types.Datum]:
    lengths = [chance.randint(16, 256) for _ in range(4)]
    return [a_text(tokens(chance, each), weights=[1.0] * (each - 1)) for each in lengths]


def tokens(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1, 60) for _ in range(length)]


def idle_memory(server: Server) -> int:
    time.sleep(IDLE_SECONDS)
    return resident(server)


def resident(server: Server) -> int:
    """Return the bytes of physical memory of the head."""
    return sum(psutil.Process(pid).memory_info().rss for pid in server.head_pids())


if __name__ == "__main__":
    main()
