"""Work for every token, chunk, block or element, as loops compiled with Numba."""

from __future__ import annotations

from impress_sglang.loops.scores import record_scores, scores_of, update_scores

__all__ = ["record_scores", "scores_of", "update_scores"]
