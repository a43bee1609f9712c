"""The errors that planning raises."""

import pickle

from passes.errors import InternalError


def test_internal_error_of_a_worker_process_says_its_remedy_once() -> None:
    error = InternalError("a table without rows")
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert str(error).startswith("a table without rows. This is a bug in autopar")
