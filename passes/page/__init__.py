"""A plan as one web page that stands by itself: its data, and the page around them."""

from passes.page.data import page_data
from passes.page.html import html

__all__ = ["html", "page_data"]
