"""The places of the ranks in their group, and the check that all have loaded the same base."""

from tinkercloud_worker.actors.group import RankGroup, RanksUnavailable
from tinkercloud_worker.engine.ranks import Membership


def memberships_of(group: RankGroup, base: str | None = None) -> list[Membership]:
    """Return the places of all ranks.

    Args:
        group: the ranks.
        base: fingerprint of the base model of the previous group; None: any that all have loaded.

    Raises:
        RanksUnavailable: a rank has a different base model.
        RanksLost: a rank was lost.
    """
    memberships: list[Membership] = group.call_each("membership", [()] * group.shape.ranks)
    loaded = [each.base_fingerprint for each in memberships]
    expected = base or loaded[0]
    for rank, fingerprint in enumerate(loaded):
        if None not in {fingerprint, expected} and fingerprint != expected:
            raise RanksUnavailable(
                f"the model files at rank {rank} (fingerprint {fingerprint}) differ from those that"
                f" were loaded first ({expected}); put the same files on every node, or restart the"
                " session if the model was replaced"
            )
    return memberships
