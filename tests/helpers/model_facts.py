"""Facts of models and machines that ``resolve`` decides from."""

from __future__ import annotations

import msgspec

from hiserve.core.machine import Machine
from hiserve.core.step_memory import DraftFacts, DraftShape, ModelFacts, StepShape

MIB, GIB = 2**20, 2**30
NANO = ModelFacts(
    context_length=8192,
    checkpoint_dtype="bfloat16",
    num_params=7_344_384,
    slot_elements=2048,
    step=StepShape(
        num_layers=8, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_elements=3 * 768, vocab_size=4096
    ),
)


NANO_HEAD = DraftFacts(
    kind="eagle3",
    num_params=2_163_712,
    slot_elements=256,
    step=DraftShape(step=msgspec.structs.replace(NANO.step, num_layers=1), shown_elements=3 * 256, feature_size=256),
)


LARGE = ModelFacts(
    context_length=131_072,
    checkpoint_dtype="bfloat16",
    num_params=8_030_261_248,
    slot_elements=65_536,
    step=StepShape(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_elements=3 * 14_336,
        vocab_size=128_256,
    ),
)


# A head of one layer that sees three layers of the model.
LARGE_HEAD = DraftFacts(
    kind="eagle3",
    num_params=850_000_000,
    slot_elements=2048,
    step=DraftShape(step=msgspec.structs.replace(LARGE.step, num_layers=1), shown_elements=3 * 4096, feature_size=4096),
)


LAPTOP = Machine(cores=4, memory_bytes=16 * GIB, cuda_memory_bytes=())
SERVER = Machine(cores=64, memory_bytes=256 * GIB, cuda_memory_bytes=(80 * GIB,))
