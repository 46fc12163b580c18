"""A reply that comes back as history keeps the ids it was generated with."""

from __future__ import annotations

import numpy as np
import pytest

from hiserve.text.chat import ChatTemplate, Message
from hiserve.text.replies import Replies, encode_messages
from tests.helpers import tiny_text

TOKENIZER = tiny_text.byte_level()
TEMPLATE = ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"})
TRIMMING = ChatTemplate(tiny_text.TRIMMING_TEMPLATE, {"bos_token": "<|bos|>"})
REPLY = "the tokenizer of the text"


def conversation(*replies: str) -> list[Message]:
    messages = [{"role": "user", "content": "I would like a coffee"}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "thank you"}]
    return messages


def plain(messages: list[Message], template: ChatTemplate = TEMPLATE) -> list[int]:
    return TOKENIZER.encode(template.render(messages), add_special_tokens=False).tolist()


def encode(messages: list[Message], replies: Replies, template: ChatTemplate = TEMPLATE) -> list[int]:
    return encode_messages(messages, replies.recall(b"", messages), template, TOKENIZER).tolist()


def remember(replies: Replies, ids: list[int], *texts: str, namespace: bytes = b"") -> None:
    """Remembers the last of the replies of a conversation."""
    *before, last = texts
    replies.remember(namespace, conversation(*before), last, ids)


def remembering(*texts: str) -> Replies:
    """Remembers each of the replies of a conversation, spelled in bytes."""
    replies = Replies()
    for i, text in enumerate(texts):
        remember(replies, tiny_text.spell_in_bytes(TOKENIZER, text), *texts[: i + 1])
    return replies


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
    messages = conversation(REPLY + "!")
    assert encode(messages, remembering(REPLY)) == plain(messages)


def test_only_messages_of_the_assistant_are_spliced() -> None:
    messages = [{"role": "user", "content": REPLY}]
    assert encode(messages, remembering(REPLY)) == plain(messages)


def test_ids_that_decode_to_another_text_are_not_used() -> None:
    replies = Replies()
    remember(replies, TOKENIZER.encode("something else", add_special_tokens=False).tolist(), REPLY)
    assert encode(conversation(REPLY), replies) == plain(conversation(REPLY))


def test_ids_with_a_special_token_inside_are_not_used() -> None:
    ids = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    replies = Replies()
    remember(replies, [*ids[:3], tiny_text.USER, *ids[3:]], REPLY)
    assert TOKENIZER.decode([*ids[:3], tiny_text.USER, *ids[3:]]) == REPLY, "only when special tokens are skipped"
    assert encode(conversation(REPLY), replies) == plain(conversation(REPLY))


def test_a_template_that_trims_keeps_the_replies_it_leaves_alone() -> None:
    messages = conversation(" padded ", REPLY)
    ids = encode(messages, remembering(" padded ", REPLY), TRIMMING)
    assert TOKENIZER.decode(ids, skip_hidden=False) == TRIMMING.render(messages)
    spelt = ",".join(map(str, tiny_text.spell_in_bytes(TOKENIZER, REPLY)))
    assert spelt in ",".join(map(str, ids))


def test_a_template_that_cuts_one_reply_keeps_the_others() -> None:
    cut = "message['content'].split('</think>')[-1]"
    template = ChatTemplate(tiny_text.TEMPLATE.replace("message['content']", cut), {"bos_token": "<|bos|>"})
    messages = conversation("hm</think>the text", REPLY)
    ids = encode(messages, remembering("hm</think>the text", REPLY), template)
    assert TOKENIZER.decode(ids, skip_hidden=False) == template.render(messages)
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
    messages = conversation(REPLY)
    assert encode(messages, remembering(REPLY), template) == plain(messages, template)


@pytest.mark.parametrize(
    "forged", ["\ue0001\ue001", "\ue0000\ue001", "\ue00099\ue001", "\ue000" + "9" * 5000 + "\ue001"]
)
def test_a_message_that_forges_a_stand_in_is_plain_text(forged: str) -> None:
    messages = conversation(REPLY)
    messages[0] = {"role": "user", "content": forged}
    replies = Replies()
    replies.remember(b"", messages[:1], REPLY, tiny_text.spell_in_bytes(TOKENIZER, REPLY))
    assert list(replies.recall(b"", messages)) == [1]
    ids = encode(messages, replies)
    assert TOKENIZER.decode(ids, skip_hidden=False) == TEMPLATE.render(messages)


def test_a_tokenizer_that_pads_every_text_is_never_spliced() -> None:
    tokenizer = tiny_text.byte_fallback()
    template = ChatTemplate("{% for m in messages %}{{ m.content }} {% endfor %}")
    messages = [{"role": "assistant", "content": "the"}]
    odd = np.array([tokenizer.encode(c, add_special_tokens=False)[-1] for c in "the"], dtype=np.int32)
    expected = tokenizer.encode("the ", add_special_tokens=False).tolist()
    assert encode_messages(messages, {0: odd}, template, tokenizer).tolist() == expected


def test_the_same_words_keep_the_ids_of_their_own_turn() -> None:
    canonical = TOKENIZER.encode(REPLY, add_special_tokens=False).tolist()
    spelt = tiny_text.spell_in_bytes(TOKENIZER, REPLY)
    replies = Replies()
    remember(replies, spelt, REPLY)
    remember(replies, canonical, REPLY, REPLY)
    recalled = replies.recall(b"", conversation(REPLY, REPLY))
    assert {i: ids.tolist() for i, ids in recalled.items()} == {1: spelt, 3: canonical}


def test_another_conversation_does_not_see_the_reply() -> None:
    messages = [{"role": "system", "content": "x"}, *conversation(REPLY)]
    assert remembering(REPLY).recall(b"", messages) == {}


def test_namespaces_do_not_see_each_other() -> None:
    replies = Replies()
    remember(replies, tiny_text.spell_in_bytes(TOKENIZER, REPLY), REPLY, namespace=b"ann")
    assert list(replies.recall(b"ann", conversation(REPLY))) == [1]
    assert replies.recall(b"bob", conversation(REPLY)) == {}


def test_the_memory_is_bounded_by_entries_and_drops_the_least_recently_used() -> None:
    replies = Replies(max_entries=2)
    remember(replies, [10], "a")
    remember(replies, [11], "b")
    assert list(replies.recall(b"", conversation("a"))) == [1]
    remember(replies, [12], "c")
    assert replies.num_entries == 2
    assert [bool(replies.recall(b"", conversation(text))) for text in "abc"] == [True, False, True]


def test_the_memory_is_bounded_by_tokens() -> None:
    replies = Replies(max_tokens=10)
    for i in range(50):
        remember(replies, [1] * (1 + i % 5), f"reply {i % 7}")
        kept = [replies.recall(b"", conversation(f"reply {j}")) for j in range(7)]
        assert replies.num_tokens == sum(len(found[1]) for found in kept if found) <= 10
    remember(replies, [1] * 11, "too long")
    assert replies.recall(b"", conversation("too long")) == {}


def test_the_latest_ids_of_a_turn_count() -> None:
    replies = Replies()
    remember(replies, [1, 2, 3], REPLY)
    remember(replies, [4, 5], REPLY)
    assert replies.recall(b"", conversation(REPLY))[1].tolist() == [4, 5]
    assert replies.num_tokens == 2
