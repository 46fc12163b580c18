"""The recipe's draft heads: unrolled drafts equal a rollout row by row, files hold the published names, training learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.widening import some
from tests.unit.tools.head_oracle import HeadOracle
from tests.unit.tools.tiny_heads import CONFIG, draft_logits, tiny_corpus, tiny_head, tiny_ids, tiny_target
from tools.nano.generate import continuations
from tools.nano.head_files import export_head, load_head, published, restore
from tools.nano.heads import AUX_LAYERS, HEADS, Seen, observe
from tools.nano.model import Nano, NanoConfig
from tools.nano.optimizer import learning_rate
from tools.nano.stream import StreamConfig, TokenStream
from tools.nano.train_heads import HeadTrainer, HeadTraining, chain_losses, mixed_batches, new_head, own_spans

KINDS = ("eagle3", "mtp")
LAYER = {
    "input_layernorm.weight": [256],
    "post_attention_layernorm.weight": [256],
    "self_attn.o_proj.weight": [256, 256],
    "mlp.gate_proj.weight": [768, 256],
    "mlp.up_proj.weight": [768, 256],
    "mlp.down_proj.weight": [256, 768],
}


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_drafts_equal_a_rollout_row_by_row(kind: str) -> None:
    target = tiny_target(seed=1)
    head, ids, num_steps = tiny_head(kind, target, seed=2), tiny_ids(3, 2, 13), 4
    with torch.no_grad():
        unrolled = draft_logits(head, target, ids, num_steps)
    oracle = HeadOracle(kind, published(head, CONFIG), CONFIG, target.embed_tokens.weight)
    seen = observe(target, ids)
    assert unrolled.shape == (num_steps, 2, 13 - num_steps, CONFIG.vocab_size)
    for batch, text in enumerate(ids):
        mine = Seen(seen.aux[batch], seen.last[batch])
        for row in range(13 - num_steps):
            chain = oracle.chain(text, mine, row, num_steps, lambda drafts, r=row, t=text: int(t[r + 1 + len(drafts)]))
            torch.testing.assert_close(unrolled[:, batch, row].double(), chain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_gives_the_rows_of_the_whole(kind: str) -> None:
    target = tiny_target(seed=1)
    head, ids = tiny_head(kind, target, seed=2), tiny_ids(4, 2, 20)
    with torch.no_grad():
        whole, window = draft_logits(head, target, ids, 3), draft_logits(head, target, ids, 3, start=6, rows=5)
    torch.testing.assert_close(window, whole[:, :, 6:11])


def test_heads_see_the_residual_stream_after_three_layers_and_the_last_normed_states() -> None:
    target, ids, outputs = tiny_target(seed=1), tiny_ids(5, 2, 9), {}
    for number, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda _module, _args, out, n=number: outputs.__setitem__(n, out))
    last = target(ids)
    after = torch.cat([outputs[number] for number in AUX_LAYERS], dim=-1)
    seen = observe(target, ids)
    torch.testing.assert_close(seen.aux, after)
    torch.testing.assert_close(seen.last, last)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_head_drafts_the_same_when_read_back(kind: str, tmp_path: Path) -> None:
    target = tiny_target(seed=1)
    head, ids = tiny_head(kind, target, seed=2), tiny_ids(6, 1, 16)
    export_head(head, CONFIG, tmp_path)
    with torch.no_grad():
        again = draft_logits(load_head(tmp_path, target), target, ids, 3)
        assert torch.equal(again, draft_logits(head, target, ids, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_from_an_exported_head_of_its_kind_if_asked(kind: str, tmp_path: Path) -> None:
    target = tiny_target(1)
    export_head(head := tiny_head(kind, target, 2), target.config, tmp_path)
    begun = new_head(kind, target, tmp_path)
    assert all(torch.equal(tensor, begun.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert begun.training and all(parameter.requires_grad for parameter in begun.parameters())
    (other,) = set(HEADS) - {kind}
    with pytest.raises(ValueError, match=f"holds {type(head).__name__}; {other} needs"):
        new_head(other, target, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_and_an_unexpected_tensor_are_errors(kind: str) -> None:
    target = tiny_target(seed=1)
    head = tiny_head(kind, target, seed=2)
    tensors = published(head, CONFIG)
    name = next(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    with pytest.raises(RuntimeError, match=r"Missing key.*up_proj"):
        restore(head, {n: t for n, t in tensors.items() if n != name}, CONFIG)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*stray"):
        restore(head, tensors | {name.replace("up_proj", "stray"): tensors[name]}, CONFIG)


def test_an_eagle3_file_of_the_embedded_model_has_the_published_names(tmp_path: Path) -> None:
    config = NanoConfig()
    export_head(HEADS["eagle3"](Nano(config)), config, tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    inner = {f"midlayer.{name}": shape for name, shape in LAYER.items()}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == inner | {
        "midlayer.hidden_norm.weight": [256],
        "midlayer.self_attn.q_proj.weight": [256, 512],
        "midlayer.self_attn.k_proj.weight": [128, 512],
        "midlayer.self_attn.v_proj.weight": [128, 512],
        "fc.weight": [256, 768],
        "norm.weight": [256],
        "lm_head.weight": [4096, 256],
        "d2t": [4096],
        "t2d": [4096],
    }
    assert (tensors["d2t"].dtype, int(tensors["d2t"].abs().sum())) == (torch.int64, 0)
    assert (tensors["t2d"].dtype, int(tensors["t2d"].sum())) == (torch.bool, 4096)
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tmp_path / "model.safetensors").stat().st_size <= 5_000_000
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 4096,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    assert {key: written[key] for key in expected} == expected
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)


def test_an_mtp_file_of_the_embedded_model_has_deepseeks_names(tmp_path: Path) -> None:
    config = NanoConfig()
    export_head(HEADS["mtp"](Nano(config)), config, tmp_path)
    tensors = load_file(str(tmp_path / "model.safetensors"))
    inner = LAYER | {
        "enorm.weight": [256],
        "hnorm.weight": [256],
        "eh_proj.weight": [256, 512],
        "shared_head.norm.weight": [256],
        "self_attn.q_proj.weight": [256, 256],
        "self_attn.k_proj.weight": [128, 256],
        "self_attn.v_proj.weight": [128, 256],
    }
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        f"model.layers.8.{name}": shape for name, shape in inner.items()
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (tmp_path / "model.safetensors").stat().st_size <= 3_000_000
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_nextn_predict_layers"], written["num_hidden_layers"]) == (1, 8)


@pytest.mark.parametrize("kind", some(KINDS, "eagle3"))
def test_training_on_one_batch_learns_every_draft_of_it(kind: str) -> None:
    target = tiny_target(seed=1)
    torch.manual_seed(2)
    head, ids, num_steps = HEADS[kind](target), tiny_ids(7, 2, 16), 3
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    first = None
    for _ in range(120):
        losses, _ = chain_losses(head, target, ids, num_steps, 0, 13)
        first = losses.detach() if first is None else first
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    assert first is not None
    assert (losses < 0.5 * first).all()
    with torch.no_grad():
        drafts = draft_logits(head, target, ids, num_steps).argmax(-1)
        wanted = target.logits(target(ids)).argmax(-1)
    right = torch.stack([drafts[step] == wanted[:, 1 + step : 14 + step] for step in range(num_steps)])
    assert right.float().mean(dim=(1, 2)).min() > 0.95
    assert 1 + float(right.long().cumprod(0).sum(0).float().mean()) > 0.95 * (num_steps + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_cross_entropy_with_the_targets_next_distributions(kind: str) -> None:
    target = tiny_target(seed=1)
    head, ids = tiny_head(kind, target, seed=2), tiny_ids(8, 2, 14)
    with torch.no_grad():
        losses, agreed = chain_losses(head, target, ids, 3, 2, 8)
        drafts = draft_logits(head, target, ids, 3, 2, 8)
        probabilities = target.logits(target(ids)).softmax(-1)
    for step in range(3):
        wanted = probabilities[:, 3 + step : 11 + step]
        torch.testing.assert_close(losses[step], -(wanted * drafts[step].log_softmax(-1)).sum(-1).mean())
        same = drafts[step].argmax(-1) == wanted.argmax(-1)
        assert float(agreed[step]) == float(same[:, ::8].float().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_changes_losses_little_and_greedy_writing_runs_in_it(kind: str) -> None:
    target = tiny_target(seed=1)
    head, ids = tiny_head(kind, target, seed=2), tiny_ids(9, 2, 14)
    exact, _ = chain_losses(head, target, ids, 3, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = chain_losses(head, target, ids, 3, 2, 8)
        written = continuations(target, ids, torch.full((2,), 14), 4, torch.zeros(2))
    rounded.sum().backward()
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())
    assert written.shape == (2, 18)


def small_stream(seed: int) -> TokenStream:
    cut = StreamConfig(span=32, short=16, long_every=2, batch_tokens=64)
    return TokenStream(tiny_corpus(seed), cut, torch.device("cpu"), seed)


def test_batches_take_their_share_from_the_targets_own_writing() -> None:
    own = torch.full((3, 32), 47)
    stream = small_stream(seed=1)
    for ids, _ in zip(mixed_batches(stream, own, 0.5), range(4), strict=False):
        num_own = int((ids == 47).all(dim=1).sum())
        assert num_own == len(ids) // 2


def test_the_target_writes_the_second_half_of_each_of_its_blocks() -> None:
    target, config = tiny_target(seed=1), HeadTraining(own_tokens=128, own_block=16)
    torch.manual_seed(1)
    blocks = own_spans(target, small_stream(seed=1), config).view(-1, 16)
    assert len(blocks) == 8
    greedy = target.logits(target(blocks)).argmax(-1)
    follows = (greedy[:, 7:15] == blocks[:, 8:]).all(dim=1)
    assert follows.tolist()[:2] == [True, True]
    assert not follows.all()


@pytest.mark.parametrize("kind", some(KINDS, "mtp"))
def test_a_run_keeps_to_its_steps_and_records_its_progress(kind: str) -> None:
    target, stream = tiny_target(seed=1), small_stream(seed=1)
    torch.manual_seed(3)
    config = HeadTraining(
        steps=12,
        seconds=1e6,
        warmup=2,
        unrolled=2,
        first_share=0.4,
        window=8,
        own_tokens=64,
        own_block=16,
        evaluations=3,
    )
    trainer = HeadTrainer(HEADS[kind](target), target, config, stream, tiny_corpus(1))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    assert trainer.train(own_spans(target, stream, config), began=0.0) == 12
    assert [row["step"] for row in trainer.curve] == [4, 8, 12]
    assert [len(row["losses"]) for row in trainer.curve] == [1, 2, 2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_the_learning_rate_warms_up_and_ends_at_its_end() -> None:
    rates = [learning_rate(step, 10, step / 100, 0.02) for step in range(101)]
    assert rates[0] == pytest.approx(0.1, rel=1e-3)
    assert int(np.argmax(rates)) == 9
    assert rates[100] == pytest.approx(0.02)
