"""The curve of a run is the same whatever happens to its heads."""

from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.reports.run_curves import CurveReport
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.bare_heads import ADAM, MODEL, Head, a_head, train, until
from tinkercloud_worker.head.serve.lease_reports import curve_reports

pytestmark = pytest.mark.timeout(300)

SNAPSHOTS = DurabilityConfig(snapshot_steps=2)
LAST = 10
"""Number of the last request of five steps."""


def points(head: Head) -> list[tuple[int, Any]]:
    """Return the curve of the model, without the times of its steps."""
    ((_, curve),) = head.backend.curves.all()
    return [(point.step, point.metrics) for point in curve.points]


async def undisturbed(folder: Path) -> list[tuple[int, Any]]:
    with a_head(folder.as_uri(), folder, "g") as head:
        await head.begin()
        await train(head, 1, LAST)
        return points(head)


async def test_a_step_reports_its_loss_gradient_norm_learning_rate_and_tokens(
    tmp_path: Path,
) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        head.add(1)
        head.add(2, first=9)
        head.apply(3)
        loss = await head.loss(1) + await head.loss(2)
        await head.answer(3)

        ((step, metrics),) = points(head)

    means = {name: values.mean for name, values in metrics.items()}
    assert step == 1
    assert means.pop("grad_norm") > 0
    assert means == {
        "loss": pytest.approx(loss / 6),
        "learning_rate": ADAM["learning_rate"],
        "tokens": 6.0,
    }


@pytest.mark.parametrize("durability", [SNAPSHOTS, DurabilityConfig()], ids=["snapshot", "journal"])
async def test_a_killed_head_is_followed_by_one_with_the_same_curve(
    tmp_path: Path, durability: DurabilityConfig
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals, durability=durability) as head:
        await head.begin()
        await train(head, 1, 6)
        if durability is SNAPSHOTS:
            await until((journals / f"runs/{MODEL}/suspended/manifest.json").exists)
        # A pass whose step follows in the next head.
        head.add(7, first=12)
        await head.confirmed()
        await head.answer(7)

    with a_head(root, tmp_path, "g2", journals=journals, durability=durability) as head:
        await head.resume("g1")
        head.apply(8)
        await head.answer(8)
        await train(head, 9, LAST)
        assert points(head) == await undisturbed(tmp_path / "undisturbed")


async def test_a_suspended_run_continues_its_curve_in_another_head(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1, 6)
        head.add(7, first=12)
        await head.answer(7)
        await head.service.suspend()

    with a_head(root, tmp_path, "g2") as head:
        await head.resume("g1")
        head.apply(8)
        await head.answer(8)
        await train(head, 9, LAST)
        assert points(head) == await undisturbed(tmp_path / "undisturbed")


async def test_passes_whose_gradient_is_lost_to_a_checkpoint_are_in_no_step(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        await train(head, 1, 2)
        head.send(routes.SAVE_WEIGHTS, 3, path="first")
        head.add(4)
        head.send(routes.LOAD_WEIGHTS, 5, path=f"tinker://{MODEL}/weights/first", optimizer=True)
        head.add(6)
        head.apply(7)
        await head.answer(7)

        (_, (_, metrics)) = points(head)

    assert metrics["tokens"].mean == 3.0


async def test_a_lease_says_only_what_has_changed_in_a_curve(tmp_path: Path) -> None:
    with a_head(tmp_path.as_uri(), tmp_path, "g") as head:
        await head.begin()
        reported = dict[str, tuple[int, int]]()

        def changed() -> list[int]:
            lines = [
                CurveReport.model_validate_json(line)
                for line in curve_reports(head.backend, reported)
            ]
            return [point.step for line in lines for point in line.points]

        assert changed() == []
        await train(head, 1, 4)
        assert changed() == [1, 2]
        await train(head, 5, 6)
        assert changed() == [3]
        assert changed() == []
