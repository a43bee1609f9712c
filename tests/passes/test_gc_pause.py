"""Garbage collection is off while many objects are built, and afterwards as it was."""

import gc

import pytest

from passes.gc_pause import without_gc


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with without_gc():
            assert not gc.isenabled()
            with without_gc():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(ValueError, match="inside"), without_gc():
            raise ValueError("inside")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
