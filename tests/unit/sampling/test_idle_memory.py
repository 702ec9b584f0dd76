"""An idle head frees its caches, without any effect on later results."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.bare_heads import Head, a_head
from tinkercloud_worker.head.serve.idle_memory import IdleMemory
from tinkercloud_worker.torch_sampler.sampler import TorchSampler

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    """Return a head with a sampler that has read a prompt."""
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=1)
        await head.answer(1)
        await head.drawn(1, 1)
        yield head


def kept_prompts(head: Head) -> int:
    assert isinstance(head.backend.sampler, TorchSampler)
    return len(head.backend.sampler._prefixes._entries)


def status(head: Head, **changes: object) -> HeadStatus:
    return head.service.status().model_copy(update=changes)


async def test_an_idle_head_drops_the_prompts_it_has_read_and_samples_as_before(
    head: Head,
) -> None:
    before = await head.drawn(1, 2)
    assert kept_prompts(head) == 1

    await IdleMemory(head.backend).check(status(head, idle_seconds=61.0))

    assert kept_prompts(head) == 0
    assert await head.drawn(1, 3) == before


async def test_a_head_with_work_keeps_them(head: Head) -> None:
    memory = IdleMemory(head.backend)

    await memory.check(status(head, idle_seconds=61.0, pending_requests=1))
    await memory.check(status(head, idle_seconds=1.0))

    assert kept_prompts(head) == 1


async def test_every_idle_period_frees_memory(head: Head) -> None:
    memory = IdleMemory(head.backend)
    await memory.check(status(head, idle_seconds=61.0))
    await head.drawn(1, 2)
    await memory.check(status(head, idle_seconds=1.0))

    await memory.check(status(head, idle_seconds=61.0))

    assert kept_prompts(head) == 0
