"""`appliance`, with a stop watch on every call that makes receipts; the product itself has none.

    python tests/bench/metered_serve.py METER.json serve --model NAME ...

METER.json gets, at the end, one list per answer: its CPU seconds of receipt work. Calls within measured calls are not
counted twice.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.cli import main as appliance
from appliance.inference import answer
from appliance.receipts import issuer, transcript


class StopWatch:
    """Sums the CPU time of one thread within watched calls, the outermost only."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth = 0

    def watch(self, owner: Any, name: str) -> None:
        """Replace a function or method by one that is timed."""
        setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total_s += time.thread_time() - start

        return timed


def main() -> None:
    meter = Path(sys.argv.pop(1))
    watch, answers = StopWatch(), []
    watch.watch(issuer.Issuer, "sign_checkpoint")
    for name in ("add_frame", "take_checkpoint", "__init__"):
        watch.watch(transcript.StreamTranscript, name)
    watch.watch(transcript.OutputTranscript, "add")
    watch.watch(transcript.Subject, "commit")
    for name in ("prompt_facts", "request_facts"):
        watch.watch(answer, name)
    issue = watch.timed(issuer.Issuer.issue)

    def issue_and_note(*args: Any) -> bytes:
        receipt: bytes = issue(*args)
        answers.append(watch.total_s)
        watch.total_s = 0.0
        return receipt

    issuer.Issuer.issue = issue_and_note  # type: ignore[assignment, method-assign]
    try:
        appliance.main()
    finally:
        meter.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
