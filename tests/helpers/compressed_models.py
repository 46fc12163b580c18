"""Tiny random models with compressed attention (DeepSeek-V4), as transformers saves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from hiserve import LLM
from hiserve.cache.storage.device import DevicePool
from hiserve.engine import executing_half
from hiserve.engine.loop import Engine
from hiserve.models.model_config import NANO, find_model
from tests.helpers.tiered import engine_of

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VOCAB = 256
NOT_A_NUMBER = 255  # each byte of one in E4M3, bfloat16 or float32
YARN = {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256}
# Few index heads would often score 0, where transformers breaks ties in another order.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 8 / 32,
    "q_lora_rank": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "layer_types": [WINDOW, HEAVY, SPARSE, HEAVY, SPARSE],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "sliding_window": 12,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 5,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.08,
    "rope_parameters": YARN,
    "eos_token_id": None,
    "bos_token_id": None,
}
# Window, ratios and limit of the index as released; in three layers, each of another kind.
RELEASED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": [SPARSE, WINDOW, HEAVY],
    "mlp_layer_types": ["moe", "moe", "hash_moe"],
    "sliding_window": 128,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "index_topk": 512,
    "max_position_embeddings": 8192,
}


def save_compressed(folder: Path, *, save: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """Saves a random model whose every parameter differs from the value that it begins with.

    Args:
        folder: Where.
        save: Arguments of ``save_pretrained``.
        **overrides: As in transformers' config.
    """
    torch.manual_seed(4)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SHAPE | overrides))
    randomise(model)
    model.save_pretrained(folder, **save or {})
    shutil.copy(find_model(NANO) / "tokenizer.json", folder)
    return folder


def add_stream_head(folder: Path) -> DeepseekV4ForCausalLM:
    """Gives a saved model a head that drafts, in released names; returns a model of one layer whose parts are the head's.

    Its ``embed_tokens`` and ``lm_head`` are not; ``enorm``, ``hnorm``, ``e_proj`` and ``h_proj`` are attributes.
    """
    torch.manual_seed(5)
    one = {"num_hidden_layers": 1, "layer_types": [WINDOW], "mlp_layer_types": ["moe"]}
    config = json.loads((folder / "config.json").read_text())
    sizes = ("num_attention_heads", "o_groups", "o_lora_rank", "moe_intermediate_size")
    kept = {name: config[name] for name in ("hc_mult", "sliding_window", "swiglu_limit", *sizes)}
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SHAPE | kept | one))
    randomise(model)
    model.save_pretrained(folder / "head")
    found = load_file(folder / "head" / "model.safetensors")
    shutil.rmtree(folder / "head")
    tensors = {
        "mtp.0." + name.removeprefix("model.layers.0."): tensor
        for name, tensor in found.items()
        if ".layers.0." in name
    }
    tensors |= {f"mtp.0.hc_head_{name}": found[f"model.hc_head.hc_{name}"] for name in ("fn", "base", "scale")}
    hidden = SHAPE["hidden_size"]
    for name in ("enorm", "hnorm", "e_proj", "h_proj"):
        weight = torch.rand(hidden) + 0.5 if name.endswith("norm") else torch.randn(hidden, hidden) * 0.2
        tensors[f"mtp.0.{name}.weight"] = weight
        setattr(model, name, weight)
    tensors["mtp.0.norm.weight"] = found["model.norm.weight"]
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    model.config._experts_implementation = "eager"  # the default product refuses float64
    return model.eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Draws what transformers leaves at 0 or 1: norms, sinks, biases, tables of experts, and constants of streams."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            order = torch.rand(parameter.shape[0], model.config.n_routed_experts).argsort(-1)  # type: ignore[union-attr]
            parameter.copy_(order[:, : parameter.shape[1]])
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(("sinks", "position_bias", "base")):
            parameter.normal_(0.0, 0.5)
        elif name.endswith("scale"):
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("e_score_correction_bias"):
            parameter.normal_(0.0, 0.2)
        elif name.endswith(("lm_head.weight", "embed_tokens.weight")):
            parameter.normal_(0.0, 0.5)


def poison(pool: DevicePool) -> DevicePool:
    """Makes all memory of a pool NaN: nobody has written any of it."""
    for storage in pool._storages.values():
        storage.fill_(NOT_A_NUMBER if storage.dtype == torch.uint8 else torch.nan)
    for snapshots in pool._snapshots.values():
        snapshots.fill_(torch.nan)
    return pool


class PoisonedPool:
    """The pools that engines make while a test runs: NaN at first, and again wherever nobody owns them after a step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[DevicePool] = []
        make = DevicePool

        def kept(*args: Any) -> DevicePool:
            self.made.append(poison(make(*args)))
            return self.made[-1]

        patch.setattr(executing_half, "DevicePool", kept)

    def watch(self, llm: LLM) -> Engine:
        """Poisons pages, and what rows carry along, after each step of an LLM, once no request holds them."""
        engine, pool = engine_of(llm), self.made[-1]
        step, planner = engine.step, engine._planner

        def watched() -> Any:
            updates = step()
            cache, rows = planner._cache, planner._rows
            free = {False: cache.device.pages._is_free.nonzero()[0].tolist(), True: []}
            if cache.windows is not None:
                cache.windows.check()
                free[True] = (cache.windows.num_refs == 0).nonzero()[0][1:].tolist()
            idle = (rows.generation == 0).nonzero()[0][1:].tolist()
            for name, storage in pool._storages.items():
                if name.endswith("_inputs"):
                    if not planner._in_flight:
                        storage[:, idle] = torch.nan
                else:
                    num_pages = cache.windows.num_refs.size if name == "swa" and cache.windows is not None else 0
                    if planner._in_flight and not num_pages:
                        continue  # a step in flight may read a page in whose place its row has the tree's now
                    pages = storage.view(*storage.shape[:2], num_pages or cache.page_owner.size, -1)
                    is_packed = storage.dtype == torch.uint8
                    pages[:, :, free[bool(num_pages)]] = NOT_A_NUMBER if is_packed else torch.nan
            if cache.snapshots is not None:
                unheld = (cache.snapshots.num_refs == 0).nonzero()[0][1:].tolist()
                for memory in pool.carried.values():
                    memory.snapshots[:, unheld] = torch.nan
            return updates

        engine.step = watched  # type: ignore[method-assign]
        return engine
