"""The garbage collector is away while much is built, and back as it was."""

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


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_was_made_is_old_but_for_users_who_have_frozen_objects(is_frozen: bool) -> None:
    before = gc.isenabled()
    gc.enable()
    (gc.freeze if is_frozen else gc.unfreeze)()
    try:
        with without_gc():
            made = [[] for _ in range(100)]
        old = set(map(id, gc.get_objects(generation=2)))
        assert [id(thing) in old for thing in made] == [not is_frozen] * 100
        assert (gc.get_freeze_count() > 1000) == is_frozen
    finally:
        gc.freeze()  # as tests have it
        (gc.enable if before else gc.disable)()
