"""What the engine counts, with the texts of its metrics."""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_STATS: Mapping[str, str] = {
    "cells": "Cells of the context",
    "cells_reserved": "Cells reserved for jobs under evaluation",
    "cells_used": "Cells in use, those of answers that have just ended included",
    "cell_sweeps": "Times the cells of running answers were put together",
    "prefill_tokens": "Prompt tokens evaluated by the present worker",
    "answer_tokens": "Tokens made by the present worker",
    "vectors": "Vectors made by the present worker",
    "target_passes": "Evaluations that made at least one token of a job",
    "drafted_tokens": "Tokens proposed by drafters",
    "accepted_tokens": "Proposed tokens that the model would have made",
    "replayed_tokens": "Accepted tokens evaluated again, where wrong guesses could not be cut off behind them",
    "failed_steps": "Steps that were interrupted and repeated",
    "cache_hits": "Prompts that started from a kept prefix",
    "cache_misses": "Prompts for which no prefix was kept",
    "cache_reused_tokens": "Prompt tokens not evaluated again",
    "cache_evictions": "Prefixes dropped for room or age",
    "cache_entries": "Prefixes kept",
    "cache_bytes": "Bytes of kept prefixes",
    "copy_us": "Microseconds of copying states, for reuse and before guesses",
    "admit_us": "Microseconds of letting jobs in and putting cells together",
    "propose_us": "Microseconds of planning steps and guessing ahead",
    "evaluate_us": "Microseconds of evaluating",
    "draw_us": "Microseconds of drawing tokens",
    "commit_us": "Microseconds of committing steps, or of taking them back",
}
"""Names in `SupervisedEngine.stats`, beside the jobs running and waiting."""
