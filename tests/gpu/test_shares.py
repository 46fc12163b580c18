"""Shares of models on a GPU: the tensors that ranks read there, and experts whose outputs sum to those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hiserve.distributed.shard import WHOLE, Shard
from hiserve.kernels.ops import ops_for
from hiserve.kernels.packed_weights import PackedWeights
from hiserve.models import expert_weights
from hiserve.models.decoder import _moe
from hiserve.models.model_config import read_model_config
from hiserve.models.shards import local_config
from hiserve.models.weights import load_parameters
from tests.helpers.block_scaled import quantize
from tests.helpers.latent_models import save_latent
from tests.helpers.models import save_family
from tests.helpers.packed_models import pack_gpt_oss, save_released

pytestmark = pytest.mark.gpu
CPU, DEVICE = torch.device("cpu"), torch.device("cuda")
RANKS = (Shard(0, 2), Shard(1, 2))


def save_eights(folder: Path) -> None:
    """DeepSeek-V3 in FP8, whose ranks have two blocks of an expert each."""
    save_latent("deepseek_v3", folder, hidden_size=256, intermediate_size=256, moe_intermediate_size=512, v_head_dim=64)
    quantize(folder, torch.float32)


def save_fours(folder: Path) -> None:
    """gpt-oss in MXFP4, whose ranks have three groups of an expert each."""
    pack_gpt_oss(save_family("gpt_oss", folder, intermediate_size=192))


def save_states(folder: Path) -> None:
    """Qwen3.5: convolutions and projections of queries, keys and values, of which ranks have a part of each."""
    save_family("qwen3_5_moe_text", folder)


def save_streams(folder: Path) -> None:
    """DeepSeek-V4 as released, whose ranks have a block of the shared expert and four groups of each other one."""
    save_released(folder, o_lora_rank=128, moe_intermediate_size=256)


def load(folder: Path, shard: Shard, device: torch.device) -> dict[str, Any]:
    return load_parameters(folder, read_model_config(folder), torch.bfloat16, device, "auto", shard)


@pytest.mark.parametrize("save", [save_eights, save_fours, save_states, save_streams])
def test_a_gpu_reads_the_share_that_a_cpu_reads(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(expert_weights, "unpacks_in_tiles", lambda device, dtype: True)
    for shard in RANKS:
        expected = load(tmp_path, shard, CPU)
        for name, found in load(tmp_path, shard, DEVICE).items():
            parts = ("codes", "scales")
            ours, theirs = (
                [getattr(each, part) for part in parts] if hasattr(each, "codes") else [each]
                for each in (found, expected[name])
            )
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
@pytest.mark.parametrize("save", [save_eights, save_fours])
def test_packed_experts_of_ranks_sum_to_those_of_all(
    save: Callable[[Path], None], num_tokens: int, tmp_path: Path
) -> None:
    save(tmp_path)
    config = read_model_config(tmp_path)
    x = torch.randn((num_tokens, config.hidden_size), generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    outputs = []
    for shard in (WHOLE, *RANKS):
        experts = local_config(config, shard).experts
        assert experts is not None
        parameters = load(tmp_path, shard, DEVICE)
        assert isinstance(parameters["layers.1.experts_down"], PackedWeights)
        with torch.inference_mode():
            outputs.append(_moe(experts, config.activation, parameters, "layers.1.", ops_for(DEVICE))(x).float())
    whole, *parts = outputs
    assert (torch.stack(parts).sum(0) - whole).norm() < 0.01 * whole.norm()
