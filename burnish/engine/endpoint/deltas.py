"""The text of a response in pieces, while its tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.calls import CallFormatName, overlap, text_before_calls
from burnish.model.tokenizer import Tokenizer


class TextDeltas:
    """Decodes the tokens of one response, and holds back what may not be part of its text: an
    incomplete character, a stop string or the beginning of one, and tool calls."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), calls: CallFormatName | None = None
    ) -> None:
        """``calls``: format of the calls that the response may have; None if it has none."""
        self._decode = tokenizer.stream()
        self._ends, self._stops, self._calls = frozenset(tokenizer.end_ids), stops, calls
        self._text = ""
        """Decoded text so far, in which a stop string may be."""
        self._sent = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Decode further tokens; return the text that can be sent, which may be empty."""
        fresh = [self._decode(token) or "" for token in tokens if token not in self._ends]
        self._text += "".join(fresh)
        end = len(self._text)
        for stop in self._stops:
            place = self._text.find(stop, self._sent)
            end = min(end, place if place >= 0 else len(self._text) - overlap(self._text, stop))
        if self._calls is not None:
            end = min(end, text_before_calls(self._text[:end], self._calls, complete=False))
        found = self._text[self._sent : end]
        self._sent += len(found)
        return found

    def finish(self, content: str) -> str:
        """Return the rest of a response's whole text that has not been sent."""
        assert content.startswith(self._text[: self._sent]), "the sent text has changed"
        return content[self._sent :]
