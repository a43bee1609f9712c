"""Traced programs rewritten: in microbatches, with recomputation, with loops in pieces, as shorter samples."""

from autopar.rewrite.chunk_writer import MOST
from autopar.rewrite.chunked_scans import in_pieces
from autopar.rewrite.family import Family
from autopar.rewrite.forms import TracedForms
from autopar.rewrite.microbatch import microbatched
from autopar.rewrite.remat import recomputed

__all__ = ["MOST", "Family", "TracedForms", "in_pieces", "microbatched", "recomputed"]
