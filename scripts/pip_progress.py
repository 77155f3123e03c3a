"""Filter for `pip install -v`: keeps the lines people want, draws ninja's [n/m] as a bar, logs it all.

    pip install -v ... 2>&1 | python scripts/pip_progress.py LOGFILE

On a terminal the bar is redrawn in place; elsewhere there is a line per tenth. Standard library alone: it
runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO

_NINJA = re.compile(r"\s*\[(\d+)/(\d+)\] (?!.*VerifyGlobs)")
_KEPT = ("Building wheel for llama", "ERROR", "error:", "WARNING: Retrying")
_WIDTH = 40
_LINE = 160
_NOTICE = """\
llama.cpp is compiled from source with this project's kernels: about two minutes on two idle cores.
The wheel is kept in ~/.cache/attested-inference/engine, for every x86-64-v3 processor: the next time takes seconds."""


class Filter:
    """Writes what matters of pip's lines to `out`, all of them to `log`."""

    def __init__(self, out: TextIO, log: TextIO) -> None:
        self._out = out
        self._log = log
        self._tenth = -1
        self._bar_open = False
        self._told = False

    def feed(self, line: str) -> None:
        self._log.write(line)
        self._log.flush()
        step = _NINJA.match(line)
        if step:
            self._step(int(step[1]), int(step[2]))
            return
        text = line.strip()
        if not self._told and text.startswith("Building wheel for llama"):
            self._told = True
            self._say(_NOTICE)
        if text.startswith(_KEPT) or " attested-inference-" in text:
            self._say(text if len(text) < _LINE else text[: _LINE - 4] + " ...")

    def close(self) -> None:
        if self._bar_open:
            self._out.write("\n")
            self._bar_open = False

    def _step(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if self._out.isatty():
            filled = _WIDTH * done // max(total, 1)
            self._out.write(f"\r  compiling [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total} ")
            self._out.flush()
            self._bar_open = True
        elif tenth != self._tenth:
            self._tenth = tenth
            self._say(f"  compiling: {10 * tenth} % ({done}/{total})")

    def _say(self, text: str) -> None:
        self.close()
        print(text, file=self._out, flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with Path(arguments[0]).open("w", encoding="utf-8") as log:
        shown = Filter(sys.stdout, log)
        for line in sys.stdin:
            shown.feed(line)
        shown.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
