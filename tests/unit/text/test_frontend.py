"""The text half of a model is loaded one way, whoever runs the model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from hiserve.config.options import make_options
from hiserve.core.request import SamplingParams
from hiserve.errors import ConfigError, RequestError
from hiserve.models.builtin_shapes import read_model
from hiserve.text.body.chat import parse_chat
from hiserve.text.frontend import Frontend, load_frontend

OPENING = {"role": "user", "content": "Where is the station?"}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def load(**options: object) -> Frontend:
    given = make_options(**options).model
    return load_frontend(given, *read_model(given))


def letters(frontend: Frontend) -> list[int]:
    return [int(frontend.tokenizer.encode(letter, add_special_tokens=False)[0]) for letter in "ab"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model, with sampling defaults of its own and no chat template."""
    folder = Path(shutil.copytree(read_model(make_options().model)[0], tmp_path / "model"))
    for name in ("chat_template.jinja", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.4, "top_p": 0.7}))
    return folder


def test_a_reply_keeps_the_tokens_it_was_generated_with_but_for_the_end_token() -> None:
    frontend = load()
    chat = parse_chat({"messages": [OPENING]})
    prompt = frontend.encode_chat(chat).tolist()
    spelled = frontend.tokenizer.encode("ab", add_special_tokens=False).tolist()
    one_by_one = letters(frontend)
    assert one_by_one != spelled, "the case is no case"
    history = parse_chat({"messages": [OPENING, {"role": "assistant", "content": "ab"}, OPENING]})
    assert frontend.encode_chat(history).tolist()[len(prompt) :][: len(spelled)] == spelled
    end = next(iter(frontend.tokenizer.hidden_ids))
    frontend.remember(chat, "ab", [*one_by_one, end])
    known = [*prompt, *one_by_one]
    assert frontend.encode_chat(history).tolist()[: len(known)] == known
    assert frontend.encode_chat(history, namespace=b"other").tolist()[: len(known)] != known


def test_an_encoder_of_prompts_recalls_the_same_replies() -> None:
    frontend = load()
    chat = parse_chat({"messages": [OPENING]})
    encoder = frontend.prompt_encoder()
    encoder.remember(b"", chat, "ab", letters(frontend))
    asyncio.run(encoder.close())
    history = parse_chat({"messages": [OPENING, {"role": "assistant", "content": "ab"}, OPENING]})
    start = len(frontend.encode_chat(chat))
    assert frontend.encode_chat(history).tolist()[start : start + 2] == letters(frontend)


def test_the_options_choose_template_and_sampling_defaults(model: Path, tmp_path: Path) -> None:
    frontend = load(model=str(model))
    assert (frontend.default_sampling.temperature, frontend.default_sampling.top_p) == (0.4, 0.7)
    chat = parse_chat({"messages": [OPENING]})
    with pytest.raises(RequestError, match="no chat template"):
        frontend.encode_chat(chat)
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    own = load(model=str(model), sampling_defaults="openai", chat_template=str(file))
    assert own.default_sampling == SamplingParams()
    text = own.tokenizer.decode(own.encode_chat(chat).tolist(), skip_hidden=False)
    assert text == "<user>Where is the station?"


def test_what_no_template_can_keep_is_refused_and_a_turn_without_an_end_token_is_warned_of(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "own.jinja"
    for template, is_warned in ((TEMPLATE, False), (TEMPLATE.replace("content }}", "content }}<|stop|>"), True)):
        file.write_text(template)
        caplog.clear()
        load(model=str(model), chat_template=str(file))
        assert ("replies may not end" in caplog.text) == is_warned
    with pytest.raises(ConfigError, match="--thoughts keep"):
        load(model=str(model), chat_template=str(file), thoughts="keep")
    assert load().abilities.template.turn_end.startswith("<|end|>")
