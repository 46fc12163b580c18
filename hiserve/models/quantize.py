"""Reads ``quantization_config`` of a checkpoint, without torch, and says which parameters stay in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from hiserve.core.name_patterns import PatternError, name_pattern
from hiserve.core.quantization import Quantization, QuantSpec
from hiserve.errors import ModelError
from hiserve.models.checkpoint import MODELOPT
from hiserve.models.config_fields import ConfigFields, read_json
from hiserve.models.family import FAMILIES

BLOCK = 128  # rows and columns of a matrix that share a scale
GROUPS = (128, 64, 32)  # columns of a row that may share a scale in 4 bits
MADE = "made"
Scheme = Literal["fp8", "int4"]

_MXFP4 = QuantSpec(bits=4, kind="e2m1", group=(1, 32))
_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")  # of modules that stay as they are
_LEAVES = "-:"  # begins a rule of GPTQ's ``dynamic`` by which modules of a pattern stay as they are
_BLOCKS = [BLOCK, BLOCK]
_GROUP_OF = {"tensor": (0, 0), "channel": (1, 0), "block": (BLOCK, BLOCK)}  # strategies of compressed-tensors

Fields = dict[str, Any]


def read_quantization(config: ConfigFields, architecture: str) -> Quantization | None:
    """Returns how a checkpoint quantizes its model; None if it does not. ``architecture`` is of a supported family.

    Raises:
        ModelError: Weights are stored in a way that is not supported.
    """
    given = config.quantization_config
    if not given:
        return None
    fields: Fields = given if isinstance(given, dict) else {}
    method = fields.get("quant_method") if isinstance(given, dict) else given
    if isinstance(method, str) and method in FAMILIES[architecture].quantizations:
        return Quantization(method, None, _MXFP4)
    if not isinstance(method, str) or method not in _METHODS:
        known = [f"{each} ({name})" for name, family in FAMILIES.items() for each in sorted(family.quantizations)]
        raise ModelError(
            f"{architecture} with quantization_config of the quant_method {method} is not supported yet. Supported: "
            f"{', '.join((*known, *_METHODS))}, and weights that are not quantized.",
            param="model",
        )
    try:
        spec, ignored = _METHODS[method](fields), _read_ignored(fields)
    except _UnsupportedError as error:
        raise ModelError(
            f"{architecture} with quantization_config of {error} is not supported yet; {error.supported}.",
            param="model",
        ) from None
    name = "gptq_v2" if method == "gptq" and fields.get("checkpoint_format") == "gptq_v2" else method
    return Quantization(name, spec, _MXFP4 if config.expert_dtype == "fp4" else spec, ignored)


def with_quantization(raw: Fields, folder: Path) -> Fields:
    """Returns the fields ``raw`` of ``config.json`` with those of ``hf_quant_config.json``, where ModelOpt alone says it there.

    Raises:
        ModelError: That file is not JSON.
    """
    path = folder / MODELOPT
    if raw.get("quantization_config") or not path.is_file():
        return raw
    given = read_json(path).get("quantization")
    return raw | {"quantization_config": {"quant_method": "modelopt"} | (given if isinstance(given, dict) else {})}


def make_quantization(scheme: Scheme) -> Quantization:
    """Returns how weights are quantized when they are loaded; experts are not."""
    if scheme == "fp8":
        return Quantization(MADE, QuantSpec(bits=8, kind="e4m3", group=(1, 0), activations="token"), None)
    return Quantization(MADE, QuantSpec(bits=4, kind="int", group=(1, GROUPS[0])), None)


class _UnsupportedError(Exception):
    """A field has a value that is not supported."""

    def __init__(self, name: str, found: Any, supported: str) -> None:
        super().__init__(f"{name} {found}")
        self.supported = supported


def _require(fields: Fields, name: str, *supported: Any, default: Any = None, path: str = "") -> Any:
    """Returns the value of a field, by default ``default``, which must be one of ``supported``."""
    found = fields.get(name, default)
    if not any(type(found) is type(each) and found == each for each in supported):
        verb = "is" if len(supported) == 1 else "are"
        raise _UnsupportedError(path + name, found, f"{' and '.join(map(str, supported))} {verb}")
    return found


def _read_ignored(fields: Fields) -> tuple[str, ...]:
    found: list[str] = []
    for name in _LISTS:
        given = fields.get(name)
        if given is not None and not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
            raise _UnsupportedError(name, given, "a list of names is")
        found += given or ()
    rules = fields.get("dynamic")
    rules = rules if isinstance(rules, dict) else {}
    found += [f"re:{rule.removeprefix(_LEAVES)}" for rule in rules if rule.startswith(_LEAVES)]
    for pattern in found:
        if not pattern.startswith("re:"):
            continue
        try:
            name_pattern(pattern.removeprefix("re:"))
        except PatternError as error:
            supported = "a regular expression of characters, classes, groups, alternatives and repetitions is"
            raise _UnsupportedError("a module to leave as it is,", f"{pattern} ({error})", supported) from None
    return tuple(found)


def _read_fp8(fields: Fields) -> QuantSpec:
    _require(fields, "fmt", "e4m3", default="e4m3")
    _require(fields, "activation_scheme", "dynamic", "static", default="dynamic")
    blocks = _require(fields, "weight_block_size", _BLOCKS, None)
    return QuantSpec(8, "e4m3", (0, 0) if blocks is None else (BLOCK, BLOCK), "token")


def _read_modelopt(fields: Fields) -> QuantSpec:
    _require(fields, "quant_algo", "FP8")
    return QuantSpec(8, "e4m3", (0, 0), "token")


def _read_awq(fields: Fields) -> QuantSpec:
    _require(fields, "bits", 4)
    _require(fields, "version", "gemm", default="gemm")
    _require(fields, "zero_point", True, default=True)
    return QuantSpec(4, "uint", (1, _require(fields, "group_size", *GROUPS)))


def _read_gptq(fields: Fields) -> QuantSpec:
    _require(fields, "bits", 4)
    _require(fields, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    _require_rules(fields.get("dynamic"))
    is_symmetric = _require(fields, "sym", True, False, default=True)
    return QuantSpec(4, "int" if is_symmetric else "uint", (1, _require(fields, "group_size", *GROUPS)))


def _require_rules(given: Any) -> None:
    """Takes GPTQ's rules for single modules if by all of them these stay as they are."""
    if given is not None and not (isinstance(given, dict) and all(rule.startswith(_LEAVES) for rule in given)):
        raise _UnsupportedError("dynamic", given, f"{_LEAVES} before each pattern is")


def _read_fields(scheme: Fields, name: str) -> Fields:
    found = scheme.get(name) or {}
    if not isinstance(found, dict):
        raise _UnsupportedError(f"config_groups.{name}", found, "an object is")
    return found


def _read_compressed(fields: Fields) -> QuantSpec:
    """Of compressed-tensors: one scheme for all linears."""
    groups = fields.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if len(schemes) != 1 or not isinstance(schemes[0], dict):
        raise _UnsupportedError("config_groups of", f"{len(schemes)} schemes", "one is")
    scheme: Fields = schemes[0]
    _require(scheme, "targets", ["Linear"], path="config_groups.targets: ")
    weights, inputs = (_read_fields(scheme, name) for name in ("weights", "input_activations"))
    where = "config_groups.weights."
    kind = _require(weights, "type", "float", "int", default="int", path=where)
    if kind == "float":
        _require(fields, "format", "float-quantized", "naive-quantized")
        _require(weights, "num_bits", 8, path=where)
        strategy = _require(weights, "strategy", *_GROUP_OF, path=where)
        if strategy == "block":
            _require(weights, "block_structure", _BLOCKS, path=where)
        if inputs:
            _require(inputs, "type", "float", path="config_groups.input_activations.")
            _require(inputs, "num_bits", 8, path="config_groups.input_activations.")
        return QuantSpec(8, "e4m3", _GROUP_OF[strategy], "token" if inputs else "none")
    _require(fields, "format", "pack-quantized")
    _require(weights, "num_bits", 4, path=where)
    _require(weights, "strategy", "group", path=where)
    if inputs:
        raise _UnsupportedError("config_groups.input_activations", "beside weights in 4 bits", "null is")
    is_symmetric = _require(weights, "symmetric", True, False, default=True, path=where)
    size = _require(weights, "group_size", *GROUPS, path=where)
    return QuantSpec(4, "int" if is_symmetric else "uint", (1, size))


_METHODS: dict[str, Callable[[Fields], QuantSpec]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
}


def spec_for(spec: QuantSpec, columns: int) -> QuantSpec | None:
    """Returns how a weight of so many columns is quantized when it is loaded: with the largest group that divides them."""
    if spec.bits == 8:
        return spec
    group = next((each for each in GROUPS if columns % each == 0), None)
    return None if group is None else msgspec.structs.replace(spec, group=(1, group))


def asks_for_packed(given: Any) -> bool:
    """Whether a checkpoint was made for keys and values in E4M3; ``given`` is its ``quantization_config``.

    ``kv_cache_scheme`` is of compressed-tensors and ModelOpt, ``kv_cache_quant_algo`` of ModelOpt. Their scales, one of all
    tokens, are not read: each token has its own. Other schemes are no reason to round, as wider numbers lose nothing.
    """
    if not isinstance(given, dict):
        return False
    scheme, algorithm = given.get("kv_cache_scheme"), given.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return algorithm.upper() == "FP8"
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
