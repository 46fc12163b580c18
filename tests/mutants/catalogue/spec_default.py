"""Guards of who drafts where nobody was named, of its costs at start, and of the heads that are shipped."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESOLVE = "tests/unit/core/test_resolve.py::test_who_drafts_is_the_head_that_came_with_the_model"
COSTS = "tests/unit/worker/test_draft_costs.py::"

MUTANTS = [
    Mutant(
        name="a head that came with the model drafts only when it is named",
        file="hiserve/core/resolve.py",
        old="if model.draft is None:\n            who",
        new="if True:\n            who",
        test=RESOLVE,
    ),
    Mutant(
        name="a context too short to measure drafts is refused though nobody asked for any",
        file="hiserve/core/resolve.py",
        old='spec.spec_steps == "auto" and length < MIN_AUTO_LEN',
        new="False",
        test=RESOLVE,
    ),
    Mutant(
        name="a head drafts for weights that were drawn",
        file="hiserve/models/speculation.py",
        old='if config.model.load_format == "dummy":',
        new="if False:",
        test="tests/unit/models/test_shapes.py::test_a_shape_generates_from_text_and_from_token_ids",
    ),
    Mutant(
        name="a stall at start is believed",
        file="hiserve/worker/draft_costs.py",
        old="seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis=axis), axis)",
        new="seconds = seconds.copy()",
        test=COSTS + "test_what_took_longer_than_more_of_the_same_was_held_up",
    ),
    Mutant(
        name="drafts are the likeliest tokens, whatever the temperature",
        file="hiserve/spec/head.py",
        old="        if is_greedy:\n            drafts",
        new="        if True:\n            drafts",
        test="tests/e2e/test_spec_acceptance.py::test_drafts_drawn_with_the_noise_of_their_places_are_accepted_more_often_than_the_likeliest",
    ),
    Mutant(
        name="the folders of heads are left out of the package",
        file="pyproject.toml",
        old='"models/nano/*", "models/nano/*/*"',
        new='"models/nano/*"',
        test="tests/unit/models/test_nano_files.py::test_every_file_is_packaged",
    ),
]
