"""Large arrays between processes: memory that is used again, and connections that end, or that strangers make."""

from __future__ import annotations

import gc
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.distributed.streams import Memory, Streams
from autopar.errors import PeerError
from tests.autopar.distributed.fake_service import FakeService, processes_of

NBYTES = 1 << 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_memory_is_an_arrays_as_long_as_anything_reads_it(dtype: str):
    memory, type = Memory(), jnp.dtype(dtype)
    lent = memory.take(NBYTES)
    lent[:] = 1
    at = lent.ctypes.data
    array = jax.device_put(lent.view(type).reshape(8, -1), jax.devices()[1])
    assert array.unsafe_buffer_pointer() == at  # as it is
    del lent
    view = np.asarray(array)
    expected = view.copy()
    result = jax.jit(lambda x: ~x if x.dtype == bool else x + x, donate_argnums=0)(array).block_until_ready()
    del array
    gc.collect()
    assert memory.free_nbytes == 0
    np.testing.assert_array_equal(view, expected)  # no program was given it to write to
    assert result.unsafe_buffer_pointer() != at
    del view, result
    gc.collect()
    jnp.zeros(()).block_until_ready()  # JAX lets go of NumPy's arrays when it is called next
    assert memory.free_nbytes == NBYTES
    assert memory.take(NBYTES).ctypes.data == at


STRUCT = jax.ShapeDtypeStruct((4,), np.float32)


def two() -> tuple[Streams, Streams]:
    first, second = processes_of(FakeService(), 2)
    return Streams(first, "127.0.0.1"), Streams(second, "127.0.0.1")


def test_the_first_error_of_a_connection_is_what_all_that_follows_ends_with():
    sender, receiver = two()
    array, deleted = jnp.arange(4.0), jnp.arange(4.0)
    sender.send(1, [array])
    np.testing.assert_array_equal(receiver.receive(0, [STRUCT]).result()[0], array)
    deleted.delete()
    waits = threading.Event()
    sender.threads[0, 1].submit(waits.wait)
    failed, behind = sender.send(1, [deleted]), sender.send(1, [array])
    waits.set()
    for sent in (failed, behind):
        with pytest.raises(RuntimeError, match="deleted") as error:
            sent.result()
        assert error.value.__cause__ is None
    with pytest.raises(RuntimeError, match="deleted"):
        sender.send(1, [array])
    for _ in range(2):
        with pytest.raises(PeerError, match=r"process 0 on host h0: .* ended: the other side has closed it") as lost:
            receiver.receive(0, [STRUCT]).result()
        assert isinstance(lost.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize("words", [b"", b"GET /", b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("stays", [False, True])
def test_whatever_else_connects_is_in_nobodys_way(words: bytes, stays: bool):
    sender, receiver = two()
    sent = sender.send(1, [jnp.arange(4.0)])
    address, port, _ = receiver.processes.shared("stream/0/1", 0).split()
    strangers = [socket.create_connection((address, int(port))) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(words)
        if not stays:
            stranger.close()
    (array,) = receiver.receive(0, [STRUCT]).result(timeout=20)
    sent.result()
    np.testing.assert_array_equal(array, np.arange(4.0))
    for stranger in strangers:
        stranger.close()
