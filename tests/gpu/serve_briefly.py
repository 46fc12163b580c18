"""A few requests over a small pool with a host tier and a draft head, for tools that watch the device.

``compute-sanitizer --tool memcheck python -m tests.gpu.serve_briefly``. Says how many steps were replayed: such a tool may
refuse captures, and steps run eagerly then. Drafts are two a step, so that the head goes on from its own state too; ``--spec
off`` leaves them out. With ``--graphs off`` and ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` every tensor has memory of its own, so
that one that is overrun is told.
"""

from __future__ import annotations

import argparse
import sys

import torch

from hiserve import LLM, SamplingParams
from hiserve.core.usage import DraftUse
from tests.helpers import cuda
from tests.helpers.gated import spoil_device
from tests.helpers.tiered import engine_of

NUM_PROMPTS, NUM_TOKENS, NUM_NEW, NUM_DRAFTS = 3, 40, 5, 2  # few: under such tools a step takes seconds


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="all", help="as the setting")
    parser.add_argument("--dtype", default="bfloat16", help="as the setting")
    parser.add_argument(
        "--attention-backend", default="triton", help="as the setting; FlashInfer's kernels are not ours"
    )
    parser.add_argument("--spec", default="eagle3", help="as the setting")
    options = vars(parser.parse_args(arguments))
    prompts = torch.randint(7, 4096, (NUM_PROMPTS, NUM_TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    drawn = {"max_tokens": NUM_NEW, "ignore_eos": True}
    sampling = [
        SamplingParams(temperature=0.8 * (i % 3 > 0), top_k=20 * (i % 3 > 1), seed=i, **drawn)
        for i in range(NUM_PROMPTS)
    ]
    with LLM(
        in_process=True,
        device=cuda.DEVICE,
        max_model_len=64,
        page_size=16,
        kv_pages=12,
        max_running_requests=2,
        max_batched_tokens=16,
        host_cache_gib=0.05,
        spec_steps=NUM_DRAFTS,
        overlap=1,
        cpu_threads=1,
        log_level="info",
        **options,
    ) as llm:
        use = DraftUse()
        for _ in range(2):
            choices = [result.outputs[0] for result in llm.generate(prompts, sampling)]
            assert all(len(choice.token_ids) == NUM_NEW for choice in choices)
            use = sum((choice.drafts or DraftUse() for choice in choices), use)
            spoil_device(llm)
        stats = engine_of(llm).stats()
    assert bool(use.proposed) == (options["spec"] != "off"), use
    cache = stats.cache
    sys.stdout.write(
        f"steps: {stats.graph_gate}\npages: {cache.offloads.num_fulfilled} stored, {cache.loads.num_fulfilled} loaded\n"
        f"drafts: {use.shown()}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
