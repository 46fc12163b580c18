"""Philox against its published vectors, and the noise made from it."""

from __future__ import annotations

import math

import pytest
import torch

from hiserve.kernels.noise import gumbel, philox

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def noise(*, seed: int = 7, choice: int = 0, position: int = 0, stream: int = 0, size: int = 100) -> torch.Tensor:
    return gumbel(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]), stream, size)[0]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox(torch.tensor(counter), torch.tensor(key)).tolist() == list(words)


def test_philox_works_on_many_counters_at_once() -> None:
    counters, keys, words = (torch.tensor(column).t() for column in zip(*KNOWN_ANSWERS, strict=True))
    assert torch.equal(philox(counters, keys), words)


def test_noise_is_made_of_the_words_of_its_counter() -> None:
    """Entry v takes word v % 4 of counter (v // 4, position, choice, stream) under the seed's two halves."""
    seed, choice, position, stream = 0x123456789ABCDEF, 3, 1_000_000, 2
    got = noise(seed=seed, choice=choice, position=position, stream=stream, size=10)
    for entry in range(10):
        counter = torch.tensor([entry // 4, position, choice, stream])
        word = int(philox(counter, torch.tensor([seed & 0xFFFFFFFF, seed >> 32]))[entry % 4])
        assert got[entry].item() == pytest.approx(-math.log(-math.log((word + 0.5) / 2**32)), abs=1e-12)


@pytest.mark.parametrize("changed", ["seed", "choice", "position", "stream"])
def test_each_part_of_the_key_gives_other_noise(changed: str) -> None:
    assert not torch.isclose(noise(), noise(**{changed: 8})).any()


def test_both_halves_of_a_seed_count() -> None:
    assert not torch.isclose(noise(seed=7), noise(seed=7 + (1 << 40))).any()


def test_noise_does_not_depend_on_the_batch_or_on_the_vocabulary() -> None:
    seeds, choices, positions = torch.tensor([1, 7, 9]), torch.tensor([0, 0, 4]), torch.tensor([5, 0, 2**31])
    together = gumbel(seeds, choices, positions, 0, 1001)
    assert torch.equal(together[1, :100], noise())
    assert torch.equal(together[2:], gumbel(seeds[2:], choices[2:], positions[2:], 0, 1001))


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean is Euler's constant, variance pi² / 6, and exp(-exp(-x)) is uniform."""
    values = gumbel(torch.arange(50), torch.zeros(50, dtype=torch.int64), torch.arange(50), 0, 4000).flatten()
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    uniform = torch.exp(-torch.exp(-values)).sort().values
    even = (torch.arange(len(uniform)) + 0.5) / len(uniform)
    assert (uniform - even).abs().max().item() < 1.95 / math.sqrt(len(uniform))  # Kolmogorov-Smirnov, p = 0.001
