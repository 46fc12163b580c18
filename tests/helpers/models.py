"""Tiny random models: made by transformers, or drawn here, and an executor around them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hiserve.attention.backends import open_attention
from hiserve.cache.storage.device import DevicePool
from hiserve.config.options import Runner
from hiserve.engine.executor import Executor
from hiserve.engine.runner_factory import make_runners
from hiserve.models.decoder import attention_shape
from hiserve.models.loading import load_decoder
from hiserve.models.model_config import read_model_config
from hiserve.runners.device_rows import DeviceRows
from hiserve.runners.dispatch import Dispatch, EagerRunner
from hiserve.runners.inputs import build_inputs
from hiserve.runners.step_output import record
from tests.helpers.plans import HandPlanner

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}


def save_llama(folder: Path, **overrides: Any) -> Path:
    """Saves a random Llama with its own output head; overrides as in transformers' config."""
    torch.manual_seed(1)
    values = SHAPE | {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    LlamaForCausalLM(LlamaConfig(**values | overrides)).save_pretrained(folder)
    return folder


def save_qwen3(folder: Path, **overrides: Any) -> Path:
    """Saves a random Qwen3 with tied embeddings, heads wider than hidden_size / heads, and uneven norms."""
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"tie_word_embeddings": True, "head_dim": 24} | overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


# What makes each family itself, beyond SHAPE; the key is transformers' ``model_type``.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


# Families of which some layers have a window.
WINDOW_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": 0,
    },
    "gpt_oss": {
        "sliding_window": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
    },
}


_STATES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
}
_SHARED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
# Families of which some layers have recurrent states.
STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": _STATES | _SHARED,
    "qwen3_next": _STATES | _SHARED | {"linear_num_value_heads": 6, "full_attention_interval": 3},
}


def save_family(family: str, folder: Path, *, save: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """Saves a random model of a family, with uneven norms and biases.

    Args:
        family: A key of ``FAMILIES``, ``WINDOW_FAMILIES`` or ``STATE_FAMILIES``.
        folder: Where.
        save: Arguments of ``save_pretrained``.
        **overrides: As in transformers' config.
    """
    torch.manual_seed(3)
    own = (FAMILIES | WINDOW_FAMILIES | STATE_FAMILIES)[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | own | overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if family in STATE_FAMILIES and "linear_attn" not in name:
                    parameter -= 1.0  # which the model adds
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, **save or {})
    return folder


def spell_as_before(folder: Path, kind: str = "rope_type") -> None:
    """Rewrites config.json as transformers 4 wrote it; ``type`` is how it named a scaling still earlier."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    rope[kind] = rope.pop("rope_type")
    raw["rope_scaling"] = None if rope[kind] == "default" else rope
    if raw["model_type"] == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    path.write_text(json.dumps(raw))


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Loads the oracle, in its plainest form."""
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if oracle.config.model_type == "gpt_oss":  # in transformers 5.17 constants, whatever config.json says
        for layer in oracle.model.layers:
            layer.mlp.experts.alpha = getattr(oracle.config, "swiglu_alpha", 1.702)
            layer.mlp.experts.limit = getattr(oracle.config, "swiglu_limit", 7.0)
    return oracle


class Engine:
    """Everything under the planner, for one model folder.

    Args:
        folder: Checkpoint folder.
        dtype: Type name of weights and pool.
        attention: Name of a backend.
        graphs: As the setting.
        max_batched_tokens: Tokens of the largest step for which pieces are captured.
        widths: Tokens of each row for which whole steps are captured.
        windows: Of each layer, whatever the model's own are; empty leaves those.
        num_snapshots: Slots of snapshots, slot 0 included.
        packs_rows: Rows are packed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        attention: str = "cpu",
        page_size: int = 16,
        num_pages: int = 64,
        max_rows: int = 8,
        max_len: int = 256,
        threaded: bool = False,
        load_format: str = "auto",
        graphs: str = "off",
        max_batched_tokens: int = 64,
        widths: tuple[int, ...] = (1,),
        windows: tuple[int | None, ...] = (),
        num_snapshots: int = 1,
        packs_rows: bool = False,
    ) -> None:
        config = read_model_config(folder)
        self.model = load_decoder(folder, config, dtype=dtype, device=device, load_format=load_format, max_len=max_len)
        max_draft = max(*widths, 8) - 1  # some tests add graphs of more tokens a row
        plan = config.cache_plan(dtype, frees_windows=False, max_draft=max_draft, packs_rows=packs_rows)
        self.pool = DevicePool(
            plan.groups, num_pages, page_size, device, num_rows=max_rows + 1, num_snapshots=num_snapshots
        )
        self.layers = self.pool.model_layers(plan)
        self.rows = DeviceRows(
            max_rows,
            max_len,
            page_size,
            num_pages,
            device,
            vocab_size=config.vocab_size,
            max_draft=max_draft,
            carried=tuple(self.pool.carried.values()),
        )
        shape = attention_shape(
            config,
            dtype=getattr(torch, dtype),
            page_size=page_size,
            sinks=self.model.sinks,
            packs_rows=packs_rows,
        )
        if windows:
            shape = dataclasses.replace(shape, windows=windows)
        self.shape = shape
        self.attention = open_attention(attention, shape, torch.device(device))
        self.runner = EagerRunner(self.model, self.layers, self.attention)
        self.runners = Dispatch(self.rows, self.runner)
        if graphs != "off":
            settings = Runner(attention_backend=attention, graphs=graphs)  # type: ignore[arg-type]
            self.runners = make_runners(
                settings,
                self.model,
                self.layers,
                self.rows,
                shape,
                max_batched_tokens=max_batched_tokens,
                widths=widths,
            )
        self.executor = Executor(self.runners, self.rows, threaded=threaded)

    @torch.inference_mode()
    def logits(self, planner: HandPlanner, prompts: dict[int, list[int]], chunk: int) -> dict[int, torch.Tensor]:
        """Computes ragged chunks of all prompts, and returns the logits of every position, by row.

        Returns:
            ``[len(prompt), vocab_size]`` for each row.
        """
        for row, prompt in prompts.items():
            planner.admit(row, prompt)
        parts: dict[int, list[torch.Tensor]] = {row: [] for row in prompts}
        while work := {row: min(chunk, left) for row in prompts if (left := len(prompts[row]) - planner.computed[row])}:
            plan = planner.step(work)
            self.rows.apply(plan)
            step = build_inputs(plan, self.rows)
            every = torch.arange(plan.num_tokens, device=self.rows.device)
            out = self.runner.run(dataclasses.replace(step.forward, logits_rows=every)).logits
            record(step, step.sampling[:, None], self.rows)
            assert step.legal.all()
            for row, part in zip(work, out.split(list(work.values())), strict=True):
                parts[row].append(part)
        return {row: torch.cat(part) for row, part in parts.items()}
