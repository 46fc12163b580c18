"""A median and how far its samples lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, the 10th and the 90th percentile."""
    low, median, high = np.percentile(np.asarray(samples, dtype=float), (10, 50, 90))
    return float(median), float(low), float(high)


def spread_text(samples: Sequence[float], form: str, unit: str = "") -> str:
    """Returns ``26 ms [24 – 31]``: median and spread in a format, as ``.2f``; one sample is said to be one."""
    median, low, high = spread(samples)
    apart = f"{low:{form}} – {high:{form}}" if len(samples) > 1 else "one sample"
    return f"{median:{form}}{unit} [{apart}]"
