"""Reads the checkpoint of a draft head, strictly: every tensor is wanted, and every wanted one is there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.draft_config import DraftConfig
from hiserve.models.weights import compare, draw_parameters, held_tensors, read_parameters, read_tensor


def load_head_parameters(
    draft: DraftConfig, dtype: torch.dtype, device: torch.device, load_format: str
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Allocates every parameter of a head on the device and fills it.

    Args:
        draft: The head.
        dtype: What the parameters are stored as.
        device: Where.
        load_format: ``auto`` reads safetensors; ``dummy`` draws weights from a fixed seed.

    Returns:
        The parameters, as ``Head.table`` names them; and the model's token of each token that the head can draft, int64
        ``[n]``, or None if they are the same.

    Raises:
        ModelError: A file is missing or damaged; a tensor is missing, unexpected or of the wrong shape or type.
    """
    head = draft.head
    assert head is not None, f"{draft.kind} is no head"
    table = head.table(draft.model)
    is_reduced = head.vocab_size < draft.model.vocab_size
    if load_format == "dummy":
        tokens = torch.arange(head.vocab_size, device=device) if is_reduced else None
        return draw_parameters(table, dtype, device), tokens
    held = held_tensors(draft.folder, param="spec")
    sources = set(held) - head.ignored
    if head.is_in_model:
        sources = {source for source in sources if source.startswith(head.named(head.format.layer))}
    wanted = {piece.source for pieces in table.values() for piece in pieces}
    maps = head.format.maps
    if maps is not None and (is_reduced or maps in sources):
        wanted.add(maps)
    what = f"a head in the format {head.format.title} as described by config.json"
    compare(draft.folder, what, wanted, sources, param="spec")
    parameters = read_parameters(held, table, dtype, device, param="spec")
    if maps is None or maps not in wanted:
        return parameters, None
    tokens = _tokens(read_tensor(held, maps, param="spec"), draft.folder, maps, head.vocab_size, draft.model.vocab_size)
    is_same = not is_reduced and torch.equal(tokens, torch.arange(head.vocab_size))
    return parameters, None if is_same else tokens.to(device)


def _tokens(offsets: Tensor, folder: Path, name: str, num_drafted: int, num_tokens: int) -> Tensor:
    """Returns the model's token of each drafted one: its own number and an offset."""
    if tuple(offsets.shape) != (num_drafted,) or offsets.is_floating_point() or offsets.is_complex():
        raise ModelError(
            f"tensor {name} in {str(folder)!r} is {offsets.dtype} {list(offsets.shape)}; {num_drafted} whole numbers are "
            "wanted.",
            param="spec",
        )
    tokens = torch.arange(num_drafted) + offsets
    if tokens.min() < 0 or tokens.max() >= num_tokens or len(set(tokens.tolist())) < num_drafted:
        raise ModelError(
            f"tensor {name} in {str(folder)!r} names tokens {int(tokens.min())} to {int(tokens.max())}; different ones of "
            f"the model's {num_tokens} are wanted.",
            param="spec",
        )
    return tokens
