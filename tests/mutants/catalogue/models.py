"""Models, their configurations and weights."""

from hiserve.models import config_fields, decoder, model_config, weights
from tests.e2e import test_transformers_oracle
from tests.unit.models import test_model_config, test_weights

with decoder.make_layer, test_transformers_oracle.test_float32_logits_of_every_position_agree:
    "INV 18: queries and keys are not normed"
    qk_weight
    None
with model_config.parse_config, test_model_config.test_a_size_that_no_model_has_is_refused_before_anything_is_built_of_it:
    "config.json may name any size"
    refuse_oversize(fields, path)
    pass
with weights.compare, test_weights.test_a_missing_tensor_is_named:
    "a checkpoint may lack a tensor"
    raise ModelError(f"{str(folder)!r} lacks {_named(missing)}. Is the download complete?", param=param)
    pass
with config_fields.read_windows, test_model_config.test_windows_are_those_that_a_request_could_outgrow:
    "INV 67: all layers have a window although some attend to everything"
    tuple(window if each else None for each in slides)
    (window,) * len(slides)
