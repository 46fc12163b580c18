"""A reply that comes back as history keeps the ids it was generated with."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.text.conversation import Conversation, Message
from hiserve.text.prompt.known_replies import KnownReply
from hiserve.text.prompt.reply_tokens import ReplyTokenCache, encode_chat
from hiserve.text.template.chat_template import ChatTemplate
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of

TOKENIZER = tiny_text.byte_level()
TEMPLATE = ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"})
TRIMMING = ChatTemplate(tiny_text.TRIMMING_TEMPLATE, {"bos_token": "<|bos|>"})
REPLY = "the tokenizer of the text"


def conversation(*replies: str, system: str = "") -> Conversation:
    messages: list[Message] = [{"role": "system", "content": system}] * bool(system)
    messages.append({"role": "user", "content": "I would like a coffee"})
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "thank you"}]
    return chat_of(messages)


def plain(chat: Conversation, template: ChatTemplate = TEMPLATE) -> list[int]:
    return TOKENIZER.encode(template.render(chat), add_special_tokens=False).tolist()


def encode(chat: Conversation, reply_cache: ReplyTokenCache, template: ChatTemplate = TEMPLATE) -> list[int]:
    return encode_chat(chat, reply_cache.recall(b"", chat), template, TOKENIZER).tolist()


def remember(reply_cache: ReplyTokenCache, ids: list[int], *texts: str, namespace: bytes = b"") -> None:
    """Remembers the last of the replies of a conversation."""
    *before, last = texts
    reply_cache.remember(namespace, conversation(*before), last, ids)


def remembering(*texts: str) -> ReplyTokenCache:
    """Remembers each of the replies of a conversation, spelled in bytes."""
    reply_cache = ReplyTokenCache()
    for i, text in enumerate(texts):
        remember(reply_cache, tiny_text.spell_in_bytes(TOKENIZER, text), *texts[: i + 1])
    return reply_cache


def test_ids_that_are_not_the_canonical_tokenization_survive() -> None:
    sampled = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    assert sampled != TOKENIZER.encode(REPLY, add_special_tokens=False).tolist()
    first = plain(conversation())
    second = encode(conversation(REPLY), remembering(REPLY))
    history = [*first, *sampled, tiny_text.END]
    assert second[: len(history)] == history
    assert TOKENIZER.decode(second, skip_hidden=False) == TEMPLATE.render(conversation(REPLY))
    assert plain(conversation(REPLY))[: len(history)] != history, "without the memory the hit would end here"


def test_every_known_reply_of_a_long_conversation_is_spliced() -> None:
    texts = ["a token", "the text", "a token", "unknown words"]
    ids = encode(conversation(*texts), remembering(*texts[:3]))
    assert TOKENIZER.decode(ids, skip_hidden=False) == TEMPLATE.render(conversation(*texts))
    joined = ",".join(map(str, ids))
    for text, times in (("a token", 2), ("the text", 1), ("unknown words", 0)):
        assert joined.count(",".join(map(str, tiny_text.spell_in_bytes(TOKENIZER, text)))) == times


def test_a_changed_reply_is_tokenized_afresh() -> None:
    chat = conversation(REPLY + "!")
    assert encode(chat, remembering(REPLY)) == plain(chat)


def test_only_messages_of_the_assistant_are_spliced() -> None:
    chat = chat_of([{"role": "user", "content": REPLY}])
    assert encode(chat, remembering(REPLY)) == plain(chat)


def test_ids_that_decode_to_another_text_are_not_used() -> None:
    reply_cache = ReplyTokenCache()
    remember(reply_cache, TOKENIZER.encode("something else", add_special_tokens=False).tolist(), REPLY)
    assert encode(conversation(REPLY), reply_cache) == plain(conversation(REPLY))


def test_ids_with_a_special_token_inside_are_not_used() -> None:
    ids = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    reply_cache = ReplyTokenCache()
    remember(reply_cache, [*ids[:3], tiny_text.USER, *ids[3:]], REPLY)
    assert TOKENIZER.decode([*ids[:3], tiny_text.USER, *ids[3:]]) == REPLY, "only when special tokens are skipped"
    assert encode(conversation(REPLY), reply_cache) == plain(conversation(REPLY))


def test_a_template_that_trims_keeps_the_replies_it_leaves_alone() -> None:
    chat = conversation(" padded ", REPLY)
    ids = encode(chat, remembering(" padded ", REPLY), TRIMMING)
    assert TOKENIZER.decode(ids, skip_hidden=False) == TRIMMING.render(chat)
    spelt = ",".join(map(str, tiny_text.spell_in_bytes(TOKENIZER, REPLY)))
    assert spelt in ",".join(map(str, ids))


def test_a_template_that_cuts_one_reply_keeps_the_others() -> None:
    cut = "message['content'].split('</think>')[-1]"
    template = ChatTemplate(tiny_text.TEMPLATE.replace("message['content']", cut), {"bos_token": "<|bos|>"})
    chat = conversation("hm</think>the text", REPLY)
    ids = encode(chat, remembering("hm</think>the text", REPLY), template)
    assert TOKENIZER.decode(ids, skip_hidden=False) == template.render(chat)
    assert "hm" not in TOKENIZER.decode(ids)
    spelt = ",".join(map(str, tiny_text.spell_in_bytes(TOKENIZER, REPLY)))
    assert spelt in ",".join(map(str, ids))


@pytest.mark.parametrize(
    "change",
    [
        "message['content'] | upper",
        "message['content'][:4]",
        "(message['content'] | length) ~ message['content']",
        "('x' if message['content'].startswith('the') else 'y') ~ message['content']",
    ],
)
def test_a_template_that_looks_into_the_content_is_obeyed(change: str) -> None:
    template = ChatTemplate(tiny_text.TEMPLATE.replace("message['content']", change), {"bos_token": "<|bos|>"})
    chat = conversation(REPLY)
    assert encode(chat, remembering(REPLY), template) == plain(chat, template)


@pytest.mark.parametrize(
    "forged", ["\ue0001\ue001", "\ue0000\ue001", "\ue00099\ue001", "\ue000" + "9" * 5000 + "\ue001"]
)
def test_a_message_that_forges_a_stand_in_is_plain_text(forged: str) -> None:
    messages = [{"role": "user", "content": forged}, *conversation(REPLY).messages[1:]]
    chat, first = chat_of(messages), chat_of(messages[:1])
    reply_cache = ReplyTokenCache()
    reply_cache.remember(b"", first, REPLY, tiny_text.spell_in_bytes(TOKENIZER, REPLY))
    assert list(reply_cache.recall(b"", chat)) == [1]
    ids = encode(chat, reply_cache)
    assert TOKENIZER.decode(ids, skip_hidden=False) == TEMPLATE.render(chat)


def test_a_tokenizer_that_pads_every_text_is_never_spliced() -> None:
    tokenizer = tiny_text.byte_fallback()
    template = ChatTemplate("{% for m in messages %}{{ m.content }} {% endfor %}")
    chat = chat_of([{"role": "assistant", "content": "the"}])
    odd = np.array([tokenizer.encode(c, add_special_tokens=False)[-1] for c in "the"], dtype=np.int32)
    expected = tokenizer.encode("the ", add_special_tokens=False).tolist()
    assert encode_chat(chat, {0: KnownReply.of(odd, "the", ())}, template, tokenizer).tolist() == expected


def test_the_same_words_keep_the_ids_of_their_own_turn() -> None:
    canonical = TOKENIZER.encode(REPLY, add_special_tokens=False).tolist()
    spelt = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    reply_cache = ReplyTokenCache()
    remember(reply_cache, spelt, REPLY)
    remember(reply_cache, canonical, REPLY, REPLY)
    recalled = reply_cache.recall(b"", conversation(REPLY, REPLY))
    assert {i: reply.ids.tolist() for i, reply in recalled.items()} == {1: spelt, 3: canonical}


def test_another_conversation_does_not_see_the_reply() -> None:
    assert remembering(REPLY).recall(b"", conversation(REPLY, system="x")) == {}


def test_namespaces_do_not_see_each_other() -> None:
    reply_cache = ReplyTokenCache()
    remember(reply_cache, tiny_text.spell_in_bytes(TOKENIZER, REPLY), REPLY, namespace=b"ann")
    assert list(reply_cache.recall(b"ann", conversation(REPLY))) == [1]
    assert reply_cache.recall(b"bob", conversation(REPLY)) == {}


def test_the_memory_is_bounded_by_entries_and_drops_the_least_recently_used() -> None:
    reply_cache = ReplyTokenCache(max_entries=2)
    remember(reply_cache, [10], "a")
    remember(reply_cache, [11], "b")
    assert list(reply_cache.recall(b"", conversation("a"))) == [1]
    remember(reply_cache, [12], "c")
    assert reply_cache.num_entries == 2
    assert [bool(reply_cache.recall(b"", conversation(text))) for text in "abc"] == [True, False, True]


def test_the_memory_is_bounded_by_tokens() -> None:
    reply_cache = ReplyTokenCache(max_tokens=10)
    for i in range(50):
        remember(reply_cache, [1] * (1 + i % 5), f"reply {i % 7}")
        kept = [reply_cache.recall(b"", conversation(f"reply {j}")) for j in range(7)]
        assert reply_cache.num_tokens == sum(len(found[1].ids) for found in kept if found) <= 10
    remember(reply_cache, [1] * 11, "too long")
    assert reply_cache.recall(b"", conversation("too long")) == {}


def test_the_latest_ids_of_a_turn_count() -> None:
    reply_cache = ReplyTokenCache()
    remember(reply_cache, [1, 2, 3], REPLY)
    remember(reply_cache, [4, 5], REPLY)
    assert reply_cache.recall(b"", conversation(REPLY))[1].ids.tolist() == [4, 5]
    assert reply_cache.num_tokens == 2


TOOL = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    "setting", [{"tools": [TOOL]}, {"documents": [{"text": "a"}]}, {"template_kwargs": {"style": "short"}}]
)
def test_what_a_template_may_show_belongs_to_the_conversation(setting: dict[str, Any]) -> None:
    spelt = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    first, second = (msgspec.structs.replace(chat, **setting) for chat in (conversation(), conversation(REPLY)))
    reply_cache = ReplyTokenCache()
    reply_cache.remember(b"", first, REPLY, spelt)
    assert reply_cache.recall(b"", second)[1].ids.tolist() == spelt
    assert reply_cache.recall(b"", conversation(REPLY)) == {}
    assert encode_chat(second, reply_cache.recall(b"", second), TEMPLATE, TOKENIZER).tolist() != plain(second)


@pytest.mark.parametrize("more", [{"name": "ann"}, {"tool_calls": [TOOL]}])
def test_every_field_of_an_earlier_message_belongs_to_the_conversation(more: dict[str, Any]) -> None:
    spelt = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    plain_chat, other = conversation("one", REPLY), conversation("one", REPLY)
    messages = other.messages
    messages[1].update(more)
    other = chat_of(messages)
    reply_cache = ReplyTokenCache()
    reply_cache.remember(b"", chat_of(messages[:3]), REPLY, spelt)
    assert list(reply_cache.recall(b"", other)) == [3]
    assert reply_cache.recall(b"", plain_chat) == {}


def test_a_reply_is_found_by_its_words_whatever_the_client_adds_to_it() -> None:
    messages = conversation(REPLY).messages
    messages[1]["name"] = "bot"
    assert list(remembering(REPLY).recall(b"", chat_of(messages))) == [1]


def test_a_continued_message_keeps_its_ids_and_is_remembered_whole() -> None:
    begun, rest = "the token", "ized"
    reply_cache = ReplyTokenCache()
    remember(reply_cache, tiny_text.spell_in_bytes(TOKENIZER, begun), begun)
    messages = conversation(begun).messages[:-1]
    open_chat = chat_of(messages, add_generation_prompt=False, continue_final_message=True)
    ids = encode(open_chat, reply_cache)
    assert ids == [*plain(conversation()), *tiny_text.spell_in_bytes(TOKENIZER, begun)]
    added = tiny_text.spell_in_bytes(TOKENIZER, rest)
    reply_cache.remember(b"", open_chat, rest, added)
    whole = encode(conversation(begun + rest), reply_cache)
    assert whole[: len(ids) + len(added)] == [*ids, *added]


def test_a_continued_message_that_is_not_known_is_not_remembered() -> None:
    reply_cache = ReplyTokenCache()
    messages = conversation("the").messages[:-1]
    open_chat = chat_of(messages, add_generation_prompt=False, continue_final_message=True)
    reply_cache.remember(b"", open_chat, "text", tiny_text.spell_in_bytes(TOKENIZER, "text"))
    assert reply_cache.num_entries == 0
