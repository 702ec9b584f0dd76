"""Metrics of how evenly the tokens of a pass were routed to experts, as the SDK defines them.

Shape legend: L layers that have experts, E experts of a layer.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

TokenCounts = npt.NDArray[np.int64]
"""[L, E]: number of tokens routed to each expert, counting a token once for each of its experts."""


def balance_metrics(tokens_LE: TokenCounts | None) -> Mapping[str, float]:
    """Return the balance metrics; none if the model has no experts.

    The fair share is the mean over the experts of a layer. The violation of an expert is its
    relative distance from the fair share, negative if below. The SDK combines the chunks of a call
    by the suffixes of the names; means are weighted by numbers of data.

    Args:
        tokens_LE: counts of a whole pass.
    """
    if tokens_LE is None:
        return {}
    total_L1 = tokens_LE.sum(1, keepdims=True)
    relative_LE = tokens_LE * tokens_LE.shape[1]
    violation_LE = relative_LE / total_L1 - 1.0
    return {
        "e_frac_with_tokens:mean": float((tokens_LE > 0).mean()),
        "e_frac_oversubscribed:mean": float((relative_LE > total_L1).mean()),
        "e_max_violation:mean": float(violation_LE.max(1).mean()),
        "e_max_violation:max": float(violation_LE.max()),
        "e_min_violation:mean": float(violation_LE.min(1).mean()),
    }
