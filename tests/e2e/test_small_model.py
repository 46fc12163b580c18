"""What other tests take for granted of the small model: replies that vary and depend on all before them, and heads that are right now and then."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from tests.helpers.cache_paths import SMALL_MODEL, pool
from tests.helpers.dialogues import trained
from tests.helpers.small_model import small_model

PAGE, NUM_NEW = 16, 24
PROMPT = np.random.default_rng(1).integers(7, 4096, 5 * PAGE).tolist()


def replies(prompts: list[list[int]], temperature: float, spec: str = "off") -> tuple[list[list[int]], list[float]]:
    """Returns the replies, and of each the share of drafts that were accepted."""
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=NUM_NEW, ignore_eos=True)
    settings = SMALL_MODEL | pool(PAGE) | {"host_cache_gib": 0, "spec": spec, "spec_steps": 0 if spec == "off" else 2}
    with LLM(**settings) as llm:
        outputs = [result.outputs[0] for result in llm.generate(prompts, sampling)]
    shares = [each.drafts.accepted / each.drafts.proposed for each in outputs if each.drafts]
    return [each.token_ids for each in outputs], shares


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_change_anywhere_in_the_prompt_changes_a_reply_which_does_not_repeat_itself(temperature: float) -> None:
    prompts = [PROMPT, *(PROMPT[:at] + [9] * 4 + PROMPT[at + 4 :] for at in range(0, len(PROMPT), PAGE // 2))]
    (told, *others), _ = replies(prompts, temperature)
    assert len(set(told)) > 0.8 * NUM_NEW
    assert sum(other != told for other in others) >= 0.9 * len(others)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_its_heads_are_right_now_and_then(kind: str) -> None:
    prompts = [PROMPT[at:] for at in range(4)]
    told, shares = replies(prompts, 0.0, trained(kind, small_model()))
    assert told == replies(prompts, 0.0)[0]
    assert 0.05 < np.mean(shares) < 0.7, shares
