"""Respells config.json of models with compressed attention (DeepSeek-V4), without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiserve.errors import ModelError
from hiserve.models.compressed_config import LayerKind
from hiserve.models.config_fields import MOST, nonsense

_KIND_OF_RATIO = {0: LayerKind.WINDOW, 4: LayerKind.SPARSE, 128: LayerKind.HEAVY}
_DEFAULT_RATES = {LayerKind.SPARSE: 4, LayerKind.HEAVY: 128}
_OLD_RATES = {LayerKind.SPARSE: "compress_rate_csa", LayerKind.HEAVY: "compress_rate_hca"}
_FIELD_OF_KIND = {LayerKind.SPARSE: "sparse_ratio", LayerKind.HEAVY: "heavy_ratio"}
_MOST_RATE = 2**12  # a page has at least as many tokens
_DEFAULT_ROPE_DIM, _DEFAULT_HEAD_DIM = 64, 512
_NUM_HASH_LAYERS = 3
_HASH, _CHOSEN = "hash_moe", "moe"
_MTP_RATIOS = 1  # entries of ``compress_ratios`` behind those of the layers, for one head that drafts token after token
_VISION = ("vision_config", "vision_n_layers", "vision_hidden_size")
_WANTED = {str: "the name of a type", int: "a number"}
_SHOWN = 100  # characters of a value that makes no sense


def respell_compressed(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of a model with compressed attention in one spelling.

    Files as they were released count layers by ratios and hash layers; transformers names a type for each layer, and
    rotations ``main``, of layers with a window alone, and ``compress``, of the others. Afterwards rotations are named
    as in models whose windows have their own.

    Raises:
        ModelError: They cannot be read, contradict each other, or describe a part that is not supported.
    """
    fields = dict(raw)
    _refuse_parts(fields)
    count, most = fields.get("num_hidden_layers"), MOST["num_hidden_layers"]
    if type(count) is not int or not 1 <= count <= most:
        raise nonsense(path, f"num_hidden_layers is {_shown(count)}, and a number from 1 to {most} is wanted")
    rates = _rates(fields, path)
    types = _layer_types(fields, rates, count, path)
    mlp_types, rope_dim = _mlp_layer_types(fields, count, path), _rope_dim(fields, path)
    return fields | {
        **{_FIELD_OF_KIND[kind]: rate for kind, rate in rates.items()},
        "layer_types": types,
        "mlp_layer_types": mlp_types,
        "qk_rope_head_dim": rope_dim,
        "intermediate_size": fields.get("moe_intermediate_size"),
        **_rotations(fields, path),
    }


def _refuse_parts(fields: dict[str, Any]) -> None:
    for name in fields:
        if name.startswith("dspark_") and fields[name]:
            raise ModelError(
                f"DeepseekV4ForCausalLM with {name} is not supported yet: drafts of DSpark. Checkpoints whose head drafts one "
                "token after another are supported.",
                param="model",
            )
    if fields.get("mlp_bias"):
        raise ModelError(
            "DeepseekV4ForCausalLM with mlp_bias is not supported yet; without biases it is.", param="model"
        )
    if named := [name for name in _VISION if fields.get(name)]:
        raise ModelError(
            f"DeepseekV4ForCausalLM with {', '.join(named)} is not supported: images. Give a checkpoint of text alone.",
            param="model",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _rates(fields: dict[str, Any], path: Path) -> dict[LayerKind, int]:
    """Removes the tokens of a compressed row of each kind of layer from the fields, and returns them."""
    given, rates = fields.pop("compress_rates", None), dict[LayerKind, int]()
    if not isinstance(given, dict | None):
        raise nonsense(path, f"compress_rates is {_shown(given)}, and a rate for each type of layer is wanted")
    for kind, default in _DEFAULT_RATES.items():
        old = fields.pop(_OLD_RATES[kind], None)
        rates[kind] = rate = (given or {}).get(kind, default) if old is None else old
        if type(rate) is not int or not 1 <= rate <= _MOST_RATE:
            raise nonsense(path, f"the rate of {kind} is {_shown(rate)}, and a number from 1 to {_MOST_RATE} is wanted")
    return rates


def _list_of(kind: type, name: str, given: Any, count: int, path: Path) -> list[Any]:
    """Returns a list with a value of each of ``count`` layers, and possibly others."""
    if not isinstance(given, list) or len(given) < count or any(type(each) is not kind for each in given):
        raise nonsense(
            path, f"{name} is {_shown(given)}, for {count} layers; a list with {_WANTED[kind]} for each is wanted"
        )
    return given


def _layer_types(fields: dict[str, Any], rates: dict[LayerKind, int], count: int, path: Path) -> list[str]:
    """Returns the type of each layer, from a list of them, from one of ratios, or as in the model without either."""
    given, ratios = fields.get("layer_types"), _ratios(fields, count, path)
    if given is not None:
        types = _list_of(str, "layer_types", given, count, path)[:count]
    elif ratios is None:
        return [LayerKind.SPARSE if layer >= 2 and layer % 2 else LayerKind.HEAVY for layer in range(count)]
    else:
        if unknown := sorted({str(ratio) for ratio in ratios if ratio not in _KIND_OF_RATIO}):
            raise ModelError(
                f"compress_ratios has {', '.join(unknown)}; without layer_types only "
                f"{', '.join(map(str, _KIND_OF_RATIO))} are supported. Name layer_types and compress_rates.",
                param="model",
            )
        types = [_KIND_OF_RATIO[ratio] for ratio in ratios]
    known = {LayerKind.WINDOW: 0, **rates}
    for kind, ratio in zip(types, ratios or (), strict=False):
        if ratio != known.get(kind, ratio):
            raise nonsense(path, f"compress_ratios has {ratio} for a layer of {kind}, whose rate is {known[kind]}")
    return types


def _ratios(fields: dict[str, Any], count: int, path: Path) -> list[int] | None:
    """Removes the ratio of each layer from the fields, and returns it; None without."""
    given = fields.pop("compress_ratios", None)
    if given is None:
        return None
    num_behind = len(_list_of(int, "compress_ratios", given, count, path)) - count
    if num_behind > _MTP_RATIOS:
        raise ModelError(
            f"DeepseekV4ForCausalLM with {num_behind} compress_ratios behind its {count} layers is not supported "
            "yet: drafts of DSpark. Checkpoints whose head drafts one token after another are supported.",
            param="model",
        )
    return given[:count]  # type: ignore[no-any-return]


def _mlp_layer_types(fields: dict[str, Any], count: int, path: Path) -> list[str]:
    """Returns the kind of each layer's experts, from a list of them, or from the number of layers that hash."""
    hashed, types = fields.pop("num_hash_layers", None), fields.get("mlp_layer_types")
    if type(hashed) not in (int, type(None)) or (hashed or 0) < 0:
        raise nonsense(path, f"num_hash_layers is {_shown(hashed)}, and a number of layers is wanted")
    first = _NUM_HASH_LAYERS if hashed is None else hashed
    counted = [_HASH if layer < first else _CHOSEN for layer in range(count)]
    if types is None:
        return counted
    named = _list_of(str, "mlp_layer_types", types, count, path)[:count]
    if hashed is not None and named != counted and {*named} <= {_HASH, _CHOSEN}:
        raise nonsense(
            path, f"mlp_layer_types does not name the {hashed} first layers alone as {_HASH}, as num_hash_layers says"
        )
    return named


def _rope_dim(fields: dict[str, Any], path: Path) -> int:
    """Returns the elements of a row that are rotated: a number, or shares of it, which must agree."""
    rope, head_dim = fields.get("rope_parameters"), fields.get("head_dim", _DEFAULT_HEAD_DIM)
    places = [fields, *([rope, *rope.values()] if isinstance(rope, dict) else [])]
    shares = [place.get("partial_rotary_factor") for place in places if isinstance(place, dict)]
    fields.pop("partial_rotary_factor", None)
    given = fields.get("qk_rope_head_dim")
    found = [] if given is None else [given]
    for share in shares:
        if share is None:
            continue
        if type(share) not in (int, float) or not 0 < share <= 1 or type(head_dim) is not int:
            raise nonsense(path, f"partial_rotary_factor is {_shown(share)} of a head_dim of {_shown(head_dim)}")
        found.append(int(head_dim * share))
    if any(each != found[0] for each in found):
        raise nonsense(
            path, f"qk_rope_head_dim and partial_rotary_factor differ: {', '.join(map(_shown, found))} elements"
        )
    return found[0] if found else _DEFAULT_ROPE_DIM


def _rotations(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns both rotations. YaRN scales no cosines here, whatever factor it would have."""
    given = fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise nonsense(path, f"rope_parameters is {_shown(given)}")
    main, compress = given.get("main"), given.get("compress")
    if main is None and compress is None:
        main, compress = {}, {name: value for name, value in given.items() if name not in ("main", "compress")}
        compress.pop("rope_theta", None)  # of the file's only rotation, which is that of windows
    if not (isinstance(main, dict) and isinstance(compress, dict)):
        raise nonsense(path, f"rope_parameters is {_shown(given)}, and both main and compress are wanted, or neither")
    if given.get("compress") is not None and compress.get("rope_theta") is None:
        raise nonsense(path, "rope_parameters.compress lacks rope_theta, for which engines take different ones")
    main = {name: value for name, value in main.items() if name != "partial_rotary_factor"}
    compress = {name: value for name, value in compress.items() if name != "partial_rotary_factor"}
    if (compress.get("rope_type") or compress.get("type")) == "yarn":
        compress.setdefault("attention_factor", 1.0)
    theta, wide = (
        next(each for each in (part.get("rope_theta"), fields.get(name), default) if each is not None)
        for part, name, default in ((main, "rope_theta", 10_000.0), (compress, "compress_rope_theta", 160_000.0))
    )
    return {
        "rope_theta": wide,
        "rope_local_base_freq": theta,
        "rope_parameters": {
            "full_attention": compress | {"rope_theta": wide},
            "sliding_attention": main | {"rope_theta": theta},
        },
    }
