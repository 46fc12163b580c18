"""Writes a model in Hugging Face's layout: ``config.json``, ``generation_config.json``, ``model.safetensors``."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tools.nano.model import Nano, NanoConfig
from tools.nano.tokenizer import BOS, END, PAD, special_id


def hf_config(config: NanoConfig) -> dict[str, object]:
    """The contents of ``config.json`` for a ``LlamaForCausalLM`` of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": special_id(BOS),
        "eos_token_id": special_id(END),
        "pad_token_id": special_id(PAD),
    }


def generation_config() -> dict[str, object]:
    """The contents of ``generation_config.json``: where replies end, and mild sampling."""
    return {
        "bos_token_id": special_id(BOS),
        "eos_token_id": special_id(END),
        "pad_token_id": special_id(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }


def hf_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters in bfloat16 under Hugging Face's names (the tied output layer is left out)."""
    return {f"model.{name}": t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in state.items()}


def export(state: dict[str, Tensor], config: NanoConfig, folder: Path) -> None:
    """Writes the three files into ``folder``.

    Args:
        state: ``Nano.state_dict()``, any dtype and device.
        config: The model's shape.
        folder: Created if missing; other files in it stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config", hf_config(config)), ("generation_config", generation_config())):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(save(hf_tensors(state), metadata={"format": "pt"}))


def load_state(folder: Path) -> dict[str, Tensor]:
    """Reads back the parameters of an exported model, under the names of ``Nano``, in float32."""
    tensors = load_file(str(folder / "model.safetensors"))
    return {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}


def main() -> None:
    """Command line: exports random weights, to try the format before there are trained ones."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    torch.manual_seed(args.seed)
    config = NanoConfig()
    export(Nano(config).state_dict(), config, args.out)


if __name__ == "__main__":
    main()
