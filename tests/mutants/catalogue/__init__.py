"""The mutants, by room. Its modules are parsed and never run, so that patterns may name what only their function knows.

An entry names a function (class, module), the tests that notice, the broken rule, what is replaced, its replacement::

    with budget.share_budget, test_budget.test_a_step_samples_only_when_it_reaches_the_end:
        "a step samples before it reaches the end of its row"
        (num_new >= behind) & (behind > 0)
        num_new > 0

The third line is matched on the syntax tree inside the function, so line breaks, quotes and comments do not matter. An
expression is found wherever it is evaluated, a statement wherever it stands; ``pass`` deletes. It must match once;
``budget.share_budget[2]`` names the second of several matches. ``test_x["a-1"]`` is one set of parameters. Prefer the
smallest expression that says what is broken: it survives most edits.

Renames: targets and tests are ordinary imports and attributes, patterns ordinary code. A codemod that renames modules,
functions, attributes or arguments in ``hiserve`` and ``tests`` rewrites these files with the rest; move a module together
with its imports here. ``python -m tests.mutants.run`` and a unit test name each entry that no longer fits.

How they were chosen, from the 1,379 of the catalogue before this one: one or two for each numbered invariant of
ARCHITECTURE.md (``INV 9``) and for each reported bug of other engines (``TC-42``, ``tests/invariants``), a unit test
demands both; one for each bug of ours that CHANGELOG names and a test can show without a GPU; one for each rule of safety
(bounds of last_loc, relocation version, waits of the gate, order of records, checksums, journal, crash isolation,
position-keyed noise, verification, shares of tenants, refusals of malformed requests, keys). Of several the one whose test
is fast and specific was kept. Rules that are arithmetic of the planning half are left to ``make mutants-pure``. A mended
bug or a new invariant adds one; a variant of one that is here does not.
"""
