"""Traced programs rewritten: in microbatches, with recomputation, with chunked loops, and as shorter samples."""

from autopar.rewrite.chunked_scans import in_pieces
from autopar.rewrite.microbatch import function_of, microbatched
from autopar.rewrite.step import TracedStep, step_of

__all__ = ["TracedStep", "function_of", "in_pieces", "microbatched", "step_of"]
