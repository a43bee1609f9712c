"""A plan as one web page that stands by itself: its data, and the page around them."""

from passes.page.data import page_data
from passes.page.html import html
from passes.page.measured import REST, Measured, MeasuredSpan

__all__ = ["REST", "Measured", "MeasuredSpan", "html", "page_data"]
