"""From token bytes to text that may go out: whole characters only, and never a stop string.

The concatenation of everything `feed` and `finish` return does not depend on how the bytes were cut into tokens.
"""

from __future__ import annotations

import codecs


class TextAssembler:
    """Incremental UTF-8 decoder with stop strings.

    Incomplete sequences are held back; bytes that are no UTF-8 become U+FFFD, as `bytes.decode(errors="replace")` makes
    them. The text ends before the stop string that is complete first (of several complete at once, the longest); text
    that may still become one is held back.
    """

    __slots__ = ("_decoder", "_pending", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """Take the bytes of one token, return the text released by it. Sets `stopped` when a stop string appeared."""
        if self.stopped:
            return ""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._pending = text + self._pending, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        pending = self._pending + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._pending = ""
            return pending[: min(matches)[1]]
        held = max(partial(pending, stop) for stop in self._stops)
        cut = len(pending) - held
        self._pending = pending[cut:]
        return pending[:cut]


def partial(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
