"""hiserve-nano in 8 and 4 bits: how likely it finds held-out text."""

from __future__ import annotations

import pytest

from tests.helpers.quantized import MOST_LOSS, held_out_losses
from tests.helpers.widening import some


@pytest.mark.parametrize("count", some([6, 29], 6))
def test_held_out_text_is_about_as_likely(count: int) -> None:
    losses = held_out_losses(count, "cpu")
    found = {scheme: losses[scheme] / losses["off"] for scheme in MOST_LOSS}
    print(count, losses, found)
    assert all(1 < found[scheme] <= most for scheme, most in MOST_LOSS.items()), (losses, found)
