"""Draft heads with latent attention and experts, in the files of their model: against transformers' own layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiserve.config.options import make_options
from hiserve.errors import ModelError
from hiserve.models.draft_config import read_draft
from hiserve.models.model_config import read_model_config
from tests.helpers.draft_heads import Drafter
from tests.helpers.latent_models import FAMILIES, INDEXED, SHAPE, save_latent, save_with_mtp
from tests.helpers.models import load_transformers

HIDDEN, NUM_LAYERS, FILE = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], "model.safetensors"


@pytest.mark.parametrize("family", [*FAMILIES, *INDEXED])
@pytest.mark.parametrize("chunk", [5, 40])
def test_a_head_gives_the_logits_of_a_layer_of_transformers(tmp_path: Path, family: str, chunk: int) -> None:
    """The layer sees the embedding of a token beside the model's state of the token before; of an index it takes no notice."""
    folder = save_with_mtp(family, tmp_path, **{} if family in FAMILIES else {"index_topk": 37})
    drafter = Drafter(folder, "mtp")
    text = torch.randint(0, 320, (37,), generator=torch.Generator().manual_seed(2))
    (shown,) = drafter.show([text], chunk)
    found = []
    for first in range(1, len(text), chunk):
        part = text[first : first + chunk]
        found.append(
            drafter.compute([(0, first, part)], drafter.head.fuse(shown[first - 1 : first - 1 + len(part)]))[0]
        )
    assert (torch.cat(found) - expected(folder, text)).abs().max().item() <= 1e-4


@torch.inference_mode()
def expected(folder: Path, text: torch.Tensor) -> torch.Tensor:
    """Logits behind each token but the first, by the modules of a model that has the head as its last layer."""
    tensors, head = load_file(folder / FILE), f"model.layers.{NUM_LAYERS}."
    config = (folder / "config.json").read_text()
    longer = folder / "longer"
    longer.mkdir(exist_ok=True)
    (longer / "config.json").write_text(
        config.replace(f'"num_hidden_layers": {NUM_LAYERS}', f'"num_hidden_layers": {NUM_LAYERS + 1}')
    )
    own = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    save_file({n: t for n, t in tensors.items() if not n.startswith(tuple(head + each for each in own))}, longer / FILE)
    model = load_transformers(longer, torch.float32)
    states = load_transformers(folder, torch.float32).model(text[None]).last_hidden_state[0, :-1]
    embedded = model.model.embed_tokens(text[1:])
    both = [
        norm(x, tensors[f"{head}{name}.weight"], model.config.rms_norm_eps)
        for name, x in (("enorm", embedded), ("hnorm", states))
    ]
    stream = (torch.cat(both, -1) @ tensors[head + "eh_proj.weight"].T)[None]
    size = stream.shape[1]
    angles = model.model.rotary_emb(stream, torch.arange(size)[None])
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    layer = model.model.layers[NUM_LAYERS]
    out = layer(stream, attention_mask=mask, position_embeddings=angles)[0]
    out = norm(out.view(size, -1), tensors[head + "shared_head.norm.weight"], model.config.rms_norm_eps)
    return model.lm_head(out)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def test_auto_takes_the_head_that_the_files_have(tmp_path: Path) -> None:
    folder = save_with_mtp("deepseek_v3", tmp_path)
    config, options = read_model_config(folder), make_options(model=str(folder), spec="auto")
    draft = read_draft(options, folder, config)
    assert draft is not None and draft.kind == "mtp"
    tensors = load_file(folder / FILE)
    saved_again = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(f"model.layers.{NUM_LAYERS}.")
    }
    save_file(saved_again, folder / FILE)
    assert read_draft(options, folder, config) is None
    with pytest.raises(ModelError, match=rf"lacks tensors model\.layers\.{NUM_LAYERS}"):
        Drafter(folder, "mtp")


def test_a_model_with_an_index_is_no_draft_model(tmp_path: Path) -> None:
    """Its layers have two groups of rows, those of drafts one."""
    folder = save_latent("deepseek_v32", tmp_path)
    options = make_options(model=str(folder), spec=f"draft:{folder}")
    with pytest.raises(ModelError, match="its layers with an index are supported in the model alone"):
        read_draft(options, folder, read_model_config(folder))
