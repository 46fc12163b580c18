"""Cuts of a text at which the parts, encoded one by one, give the tokens of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import product

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.errors import ContextLengthError
from hiserve.text.tokens.tokenizer import Tokenizer

# Letters of several scripts: a range of regular expressions, and examples.
SCRIPTS = {
    "A-Za-z": "ezQ",
    "À-ÖØ-öø-ɏ": "é",
    "Α-Ρα-ρ": "λ",
    "А-яЁё": "д",
    "א-ת": "מ",
    "ء-غف-ي": "م",
    "अ-ह": "ह",
    "ก-ฮ": "น",
    "一-龥": "国",
    "ぁ-ゖァ-ヺ": "は",
    "가-힣": "글",
}
# A cut is between a letter and one of these.
FOLLOWERS = " \n，。、！？"
# Precedes each part but the first in place of the letter before the cut; its tokens are removed again.
ANCHOR = "x"
# Most characters of a part without a cut: about a second of a thread.
MAX_WHOLE_CHARS = 2**18
_WINDOW = 4096
_MOST_TOKENS = 64
_LEFT = ("", "the 12", "I'", "\n…", "naïve")
_RIGHT = ("", "the", " \n", "'s 12? 日")


class SplitPoints:
    """The cuts at which one tokenizer may encode a text in parts.

    A tokenizer splits a text into words by a pattern, and words into tokens. A cut is correct where a word ends in any
    context: in the patterns of all common models between a letter and a space, a line break or a Chinese full stop. For
    a tokenizer without words, a cut is correct where no token of its vocabulary contains both characters side by side.
    A word also ends before a special token, such as the one that ends a message.
    Examples are encoded to find which of these cuts a tokenizer has; each cut must also give the same tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def num_anchor(self) -> int:
        """Tokens of ``ANCHOR``."""
        return self._encode(ANCHOR).size

    def find(self) -> None:
        """Finds the cuts now instead of at the first long text."""
        _ = self._pattern, self.num_anchor, self.tokenizer.around

    @property
    def exist(self) -> bool:
        """Whether there is any cut; otherwise a text must be encoded whole."""
        return self._pattern is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        added = sorted(self.tokenizer.added_tokens, key=lambda token: not token.special)
        if any(token.rstrip and token.content[-1:].isalpha() for token in added):
            return None
        contents, places = [token.content for token in added], []
        typed = [self._typed(content) for content in contents]
        for letters, examples in SCRIPTS.items():
            followers = [each for each in FOLLOWERS if self._is_cut(typed, letters, examples, each)]
            if followers:
                places.append(f"(?<=[{letters}])[{''.join(followers)}]")
        tokens = [re.escape(token) for token in contents[:_MOST_TOKENS] if self._is_cut_before(token, contents)]
        places += [f"(?={'|'.join(tokens)})"] if tokens else []
        return re.compile("|".join(places)) if places else None

    def first(self, text: str, start: int, end: int) -> int | None:
        """Returns the first cut in ``[start, end)``, or None."""
        found = self._pattern and self._pattern.search(text, start, end)
        return found.start() if found else None

    def last(self, text: str, start: int, end: int) -> int | None:
        """Returns the last cut in ``[start, end)``, or None."""
        for window_end in range(end, start, -_WINDOW) if self._pattern else ():
            window = max(start, window_end - _WINDOW), window_end
            found = [match.start() for match in self._pattern.finditer(text, *window)]  # type: ignore[union-attr]
            if found:
                return found[-1]
        return None

    def _typed(self, content: str) -> str:
        """Returns an added token as texts have it: with spaces, where the tokenizer makes ``▁`` of these before it looks."""
        spaced = content.replace("▁", " ")
        return spaced if np.array_equal(self._encode(spaced), self._encode(content)) else content

    def _is_cut(self, added: list[str], letters: str, examples: str, follower: str) -> bool:
        """Whether a text may be cut between any of these letters and the follower; ``added`` are as texts have them."""
        if any(map(re.compile(f"[{letters}][{follower}]").search, added)):
            return False
        across = re.compile(f"[{letters}][{follower}{'▁' if follower == ' ' else ''}]")
        texts = [(left + letter, follower + right) for left, letter, right in product(_LEFT, examples, _RIGHT)]
        has_words = all(self._are_words_cut(left, right) for left, right in texts)
        if not has_words and any(map(across.search, self.tokenizer.vocab.values())):
            return False
        return all(self._are_tokens_cut(left, right) for left, right in texts)

    def _is_cut_before(self, token: str, added: list[str]) -> bool:
        """Whether a text may be cut before a token that is found before the text is split into words."""
        ends = {other[at:] for other in added for at in range(1, len(other))}
        is_apart = not any(token.startswith(end) for end in ends if end) and not any(
            token in other[1:] for other in added
        )
        return is_apart and all(self._are_tokens_cut(left, token + right) for left, right in product(_LEFT, _RIGHT))

    def _are_words_cut(self, left: str, right: str) -> bool:
        words, before, after = map(self.tokenizer.words, (left + right, left, ANCHOR + right))
        return bool(before + after[1:] == words)

    def _are_tokens_cut(self, left: str, right: str) -> bool:
        whole, before, after = map(self._encode, (left + right, left, ANCHOR + right))
        return bool([*before.tolist(), *after[self.num_anchor :].tolist()] == whole.tolist())

    def _encode(self, text: str) -> Int32Array:
        return self.tokenizer.encode(text, add_special_tokens=False)


def ranges(
    text: str, split_points: SplitPoints, size: Callable[[], int], *, from_end: bool, param: str
) -> Iterator[tuple[int, int]]:
    """Yields the parts of a text as ``[start, end)``, in order or from the end backwards.

    Args:
        text: Any text.
        split_points: Its cuts.
        size: Returns the desired characters of the next part; a part is longer where there is no cut.
        from_end: Begin with the last part.
        param: The request field that the text came from.

    Raises:
        ContextLengthError: A part without a cut is longer than ``MAX_WHOLE_CHARS``.
    """
    done, length = 0, len(text)
    while done < length:
        wanted, most = done + size(), min(length, done + MAX_WHOLE_CHARS)
        cut = None
        if wanted < length:
            cut = (
                split_points.last(text, max(1, length - most), length - wanted)
                if from_end
                else split_points.first(text, wanted, most)
            )
        taken = length if cut is None else length - cut if from_end else cut
        if taken - done > MAX_WHOLE_CHARS and split_points.exist:
            raise ContextLengthError(
                f"the prompt has {MAX_WHOLE_CHARS} characters without a place where it could be divided, such as a space "
                "behind a letter. Divide or shorten it.",
                param=param,
            )
        yield (length - taken, length - done) if from_end else (done, taken)
        done = taken
