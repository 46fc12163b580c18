"""The embedded model's files: what they hold, that transformers reads them, and what the chat template writes."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import LlamaForCausalLM

from tools.nano.export import load_state
from tools.nano.model import Nano, NanoConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "hiserve" / "models" / "nano"
SPECIAL_TOKENS = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
BOS, END, USER, ASSISTANT = 0, 1, 4, 5
DIALOGUE = [
    {"role": "user", "content": "Hi, can I get a latte with oat milk?"},
    {"role": "assistant", "content": "Sure, does this look right?"},
    {"role": "user", "content": "Yes, that looks good."},
    {"role": "assistant", "content": "Great, your order will be ready soon."},
]


def read_json(name: str) -> dict[str, Any]:
    """A JSON file of the model's folder."""
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer as ``tokenizers`` reads it."""
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """The model as transformers reads it, in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded.eval()


def test_every_file_is_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["hiserve"]
    packaged = {path for pattern in patterns for path in (ROOT / "hiserve").glob(pattern) if path.is_file()}
    assert packaged >= {path for path in FOLDER.rglob("*") if path.is_file()}
    assert {FOLDER / kind / "model.safetensors" for kind in ("eagle3", "mtp")} < packaged


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = False, trim: bool = True) -> str:
    """The chat template through plain jinja2."""

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_files_are_there_and_small() -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"ATTRIBUTION.md"} <= {path.name for path in FOLDER.iterdir()}
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000
    assert (FOLDER / "tokenizer.json").stat().st_size <= 500_000


def test_weights_are_bf16_finite_and_at_most_eight_million() -> None:
    count, names = 0, set()
    with safe_open(str(FOLDER / "model.safetensors"), framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - not a mapping
            tensor = stored.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert torch.isfinite(tensor).all()
            count += tensor.numel()
            names.add(name)
    assert count == 7_344_384 <= 8_000_000
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 9 * 8


def test_config_describes_a_tied_llama_of_8192_positions() -> None:
    config = read_json("config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "bos_token_id": BOS,
        "eos_token_id": END,
    }
    assert {key: config[key] for key in expected} == expected


def test_generation_config_ends_replies_at_the_end_token() -> None:
    config = read_json("generation_config.json")
    assert config["eos_token_id"] == END
    assert 0 < config["temperature"] <= 1
    assert 0 < config["top_p"] <= 1


def test_attribution_names_every_source_and_licence() -> None:
    text = (FOLDER / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for words in ("Taskmaster-4", "CC BY 4.0", "Schema-Guided Dialogue", "CC BY-SA 4.0", "GSM8K", "MIT"):
        assert words in text
    for words in ("LMCache", "Apache-2.0", "Python standard library", "PSF"):
        assert words in text


def test_special_tokens_come_first_and_stay_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    assert [tokenizer.id_to_token(number) for number in range(7)] == SPECIAL_TOKENS
    assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == list(range(7))
    assert tokenizer.encode("plain text").ids[0] > 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading and trailing  \n",
        "naïve café — “quotes” …",
        "emoji 😀 👩‍👩‍👧 🇳🇴",
        "中文 и кириллица ไทย",
        "tabs\tand\r\nlines\n\n\n",
        "\x00\x7f\u200b\ufeff𝔘",
        "def f(x):\n        return x + 1234567  # why?",
    ],
)
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_numbers_are_written_digit_by_digit(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]


@pytest.mark.parametrize("trim", [True, False])
def test_template_writes_contents_verbatim(trim: bool) -> None:
    messages = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "a <b> & {{c}}\n\n"},
        {"role": "assistant", "content": "\n  d  "},
        {"role": "tool", "content": "4"},
    ]
    expected = "<|bos|><|system|> Be brief.\n<|end|><|user|>a <b> & {{c}}\n\n<|end|><|assistant|>\n  d  <|end|><|tool|>4<|end|>"
    assert render(messages, trim=trim) == expected
    assert render(messages, trim=trim, add_generation_prompt=True) == expected + "<|assistant|>"


def test_template_joins_text_parts_and_takes_no_content() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "image_url", "image_url": "x"}, {"type": "text", "text": " b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert render(messages) == "<|bos|><|user|>a  b<|end|><|assistant|><|end|>"


def test_template_refuses_unknown_roles() -> None:
    with pytest.raises(ValueError, match="roles"):
        render([{"role": "narrator", "content": "a"}])


def test_transformers_renders_the_same(tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    text = loaded.apply_chat_template(DIALOGUE, tokenize=False, add_generation_prompt=True)
    assert text == render(DIALOGUE, add_generation_prompt=True)
    ids = loaded.apply_chat_template(DIALOGUE, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text).ids
    assert (loaded.bos_token_id, loaded.eos_token_id) == (BOS, END)
    assert loaded.model_max_length == read_json("config.json")["max_position_embeddings"]


@pytest.mark.parametrize("reply", ["Sure.", " leading", "trailing \n\n", "12 + 3", "```python\nx = 1\n```", "😀"])
def test_a_reply_stands_verbatim_in_the_next_prompt(tokenizer: Tokenizer, reply: str) -> None:
    history = DIALOGUE[:1]
    prompt = tokenizer.encode(render(history, add_generation_prompt=True)).ids
    served = [*prompt, *tokenizer.encode(reply).ids, END]
    later = [*history, {"role": "assistant", "content": reply}, {"role": "user", "content": "Thanks!"}]
    assert tokenizer.encode(render(later)).ids[: len(served) + 1] == [*served, USER]


def test_transformers_and_the_recipe_agree_on_logits(model: LlamaForCausalLM) -> None:
    recipe = Nano(NanoConfig()).eval()
    recipe.load_state_dict(load_state(FOLDER))
    ids = torch.randint(7, 4096, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = model(ids).logits - recipe.logits(recipe(ids))
    assert difference.abs().max() < 1e-4


def test_the_model_has_learned_dialogue(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode(render(DIALOGUE)).ids])
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss < 2.0 < math.log(4096)


def test_the_model_replies_and_stops(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    ids = torch.tensor([tokenizer.encode(render(DIALOGUE[:1], add_generation_prompt=True)).ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False, temperature=None, top_p=None
    )
    reply = out[0, ids.shape[1] :].tolist()
    assert reply[-1] == END
    assert len(tokenizer.decode(reply).split()) >= 2


def test_results_describe_these_weights() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "nano_training.json").read_text(encoding="utf-8"))
    assert results["parameters"] == 7_344_384
    for source in ("coffee", "services"):
        assert results["losses"]["ratio_8192_to_1024"][f"{source}_alone"] <= 1.1
        assert results["losses"]["ratio_8192_to_1024"][f"{source}_mixed"] <= 1.1
