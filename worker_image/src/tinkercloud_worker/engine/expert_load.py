"""How evenly a pass's tokens were spread over experts, as the SDK describes it.

Shape legend: L layers that have experts, E experts of a layer.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

TokenCounts = npt.NDArray[np.int64]
"""[L, E]: tokens that each expert was sent, each token once for every expert it was sent to."""


def balance_metrics(tokens_LE: TokenCounts | None) -> Mapping[str, float]:
    """Return the metrics of a mixture; none if the model has no experts.

    A fair share is the mean over the experts of a layer. A violation is how far an expert is above
    it (or below: negative), as a fraction of it. The SDK folds the chunks of a call by the ends of
    the names: means by numbers of data.

    Args:
        tokens_LE: of a whole pass.
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
