"""Guards of the digests that name a prefix."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DIGEST = "hiserve/core/digest.py"
OF_DIGEST = "tests/unit/core/test_digest.py::"

MUTANTS = [
    Mutant(
        name="parts of a namespace run into each other",
        file=DIGEST,
        old='        hasher.update(len(data).to_bytes(8, "little"))\n',
        new="",
        test=OF_DIGEST + "test_parts_of_a_namespace_do_not_run_into_each_other",
    ),
    Mutant(
        name="a digest covers its own page only",
        file=DIGEST,
        old="parent = link(parent + key[start : start + stride])",
        new="parent = link(key[start : start + stride])",
        test=OF_DIGEST + "test_a_digest_covers_everything_before_it",
    ),
    Mutant(
        name="half a page has a digest",
        file=DIGEST,
        old="range(0, len(key) - stride + 1, stride)",
        new="range(0, len(key), stride)",
        test=OF_DIGEST + "test_one_digest_for_each_whole_page",
    ),
]
