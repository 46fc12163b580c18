"""Models, their configurations and weights."""

from hiserve.attention import backends, latent
from hiserve.core import name_patterns
from hiserve.kernels import quantized, routing
from hiserve.models import (
    block_scales,
    builtin_shapes,
    config_fields,
    conversion,
    decoder,
    draft_formats,
    expert_weights,
    four_bits,
    latent_attention,
    latent_config,
    model_config,
    reading,
    refusals,
    tensor_checks,
    weights,
)
from tests.e2e import test_latent_oracle, test_transformers_oracle, test_window_families_oracle
from tests.unit.attention import test_backends, test_latent
from tests.unit.core import test_name_patterns
from tests.unit.kernels import test_routing
from tests.unit.models import (
    test_block_scales,
    test_conversion,
    test_expert_weights,
    test_latent_config,
    test_latent_heads,
    test_model_config,
    test_quantized_weights,
    test_reading,
    test_rope,
    test_weights,
    test_window_families,
)

with decoder._grouped_attention, test_transformers_oracle.test_float32_logits_of_every_position_agree:
    "INV 18: queries and keys are not normed"
    qk_weight
    None
with model_config._checked, test_model_config.test_a_size_that_no_model_has_is_refused_before_anything_is_built_of_it:
    "config.json may name any size"
    refuse_oversize(fields, path)
    pass
with name_patterns.NamePattern._enter, test_name_patterns.test_drawn_patterns_match_what_pythons_do:
    "conditions on places in a name are not asked"
    not state.takes_character and (state.test is None or state.test(name, at))
    not state.takes_character
with reading._Buffer.load, test_reading.test_a_buffer_is_pinned_once_after_its_first_read:
    "a buffer of weights is pinned once, and used many times"
    not self._has_been_pinned
    True
with reading._Buffer.unload, test_reading.test_targets_that_were_made_in_inference_mode_are_converted_too:
    "a thread writes targets of inference mode outside of it, which torch refuses"
    torch.inference_mode()
    nullcontext()
with tensor_checks.compare, test_weights.test_a_missing_tensor_is_named:
    "a checkpoint may lack a tensor"
    raise ModelError(f"{str(folder)!r} lacks {_named(missing)}. Is the download complete?", param=param)
    pass
with config_fields.read_windows, test_model_config.test_windows_are_those_that_a_request_could_outgrow:
    "INV 67: all layers have a window although some attend to everything"
    tuple(window if each else None for each in slides)
    (window,) * len(slides)
with latent_config.read_latent, test_latent_config.test_scores_take_the_square_of_yarns_factor:
    "scores of latent attention take YaRN's factor once"
    _mscale(fields) ** 2
    _mscale(fields)
with latent_attention.make_latent_attention, test_latent_oracle.test_logits_are_those_of_transformers["deepseek"]:
    "neighbours that are rotated together are taken for halves"
    latent.is_interleaved
    False
with routing.route_in_groups, test_routing.test_a_bias_changes_the_choice_and_never_a_share:
    "the bias of an expert is part of its share"
    scores.gather(-1, experts)
    biased.flatten(1).gather(-1, experts)
with latent.LatentAttention._expand_and_attend, test_latent.test_every_token_sees_its_row_absorbed_and_expanded:
    "parts of a prefix are joined without their sums"
    merge(out, lse, *self._attend(q, rows, kv, is_causal=False))
    out + self._attend(q, rows, kv, is_causal=False)[0], lse
with backends._Backend._latent_misfit, test_backends.test_flashinfer_computes_latents_of_its_sizes_alone:
    "FlashInfer computes latents of any number of heads, and loses keys"
    self.latent_heads % shape.num_heads
    0
with latent.LatentAttention.plan, test_latent.test_a_row_that_decodes_is_not_expanded_because_its_length_is_only_bounded:
    "a row is expanded although the host has only a bound of its length"
    first = inputs.num_decode + int(is_long.argmax()) if is_long.any() else num_rows
    first = 0
with weights._offset_norms, test_window_families.test_norms_of_a_16_bit_model_are_one_more_than_stored_and_not_rounded:
    "INV 18: norms that are stored less 1 are taken as they are"
    parameter += config.norm_offset
    pass
with (
    decoder.Decoder.trunk,
    test_window_families_oracle.test_gemma3_gives_the_logits_and_tokens_of_transformers["no window reached-64-1-4-off-0"],
):
    "INV 18: layers with a window rotate as the others"
    rotations[index in self._local_layers]
    rotations[0]
with conversion.mxfp4_pairs, test_conversion.test_every_byte_under_every_scale_is_exact:
    "INV 18: the upper half of a packed byte comes first"
    (codes & 15, codes >> 4)
    (codes >> 4, codes & 15)
with expert_weights._pack, test_expert_weights.test_packed_parameters_stand_for_those_that_are_unpacked:
    "packed gates and ups of gpt-oss stay interleaved"
    pieces[0].is_interleaved
    False
with expert_weights._check_exponents, test_expert_weights.test_scales_that_make_no_sense_are_refused:
    "a scale that products do not upcast is read"
    exponent > LARGEST_SCALE
    False
with block_scales.multiply, test_block_scales.test_long_matrices_are_multiplied_stripe_by_stripe:
    "rows of an FP8 weight take the scales of the first rows"
    factors.index_select(0, its)
    factors.index_select(0, its - its[0])
with block_scales.check_scale, test_block_scales.test_what_cannot_be_multiplied_is_refused_by_name["blocks"]:
    "an FP8 weight may have scales of other blocks"
    scale.shape not in (wanted, *others)
    False
with quantized.unpack_codes, test_quantized_weights.test_every_value_of_a_format_is_read["int"]:
    "codes of a number are columns of other quarters of a tile"
    (low & 15, low >> 4, high & 15, high >> 4)
    (low & 15, high & 15, low >> 4, high >> 4)
with four_bits.unpack_weight, test_quantized_weights.test_every_value_of_a_format_is_read["gptq"]:
    "zero points of GPTQ are those that are stored, which are one less"
    1 if method == "gptq" else 0
    0
with four_bits._order, test_quantized_weights.test_what_is_missing_or_makes_no_sense_is_named:
    "groups may have any number of inputs"
    torch.equal(groups[order].long(), adjacent)
    True
with block_scales.check_values, test_quantized_weights.test_what_is_missing_or_makes_no_sense_is_named:
    "a scale may be 0"
    (wide != 0)
    True
with builtin_shapes._as_asked, test_quantized_weights.test_weights_that_are_quantized_are_not_quantized_again:
    "--quantize replaces the quantization of a checkpoint"
    model.quantization is not None
    False
with draft_formats.one_layer, test_latent_heads.test_a_head_gives_the_logits_of_a_layer_of_transformers:
    "the draft head of a model of experts has an MLP"
    keeps and has_experts_behind(model)
    False
with refusals._limits, test_window_families.test_a_constant_that_experts_of_gpt_oss_need_is_a_number["None-swiglu_alpha"]:
    "a constant of the experts may be null: the first step fails"
    getattr(fields, name) is None
    False
with model_config.parse_config, test_window_families.test_a_part_that_would_be_left_out_is_named_with_what_is_supported:
    "a part of a model that is not supported is left out"
    refuse_foreign(spelled, architecture, has_index=family.has_index)
    pass
with config_fields, test_rope.test_numbers_that_make_no_sense_are_named:
    "a factor may be so large that a forward overflows"
    Meta(ge=1e-6, le=1e6)
    Meta(ge=1e-30, le=1e30)
