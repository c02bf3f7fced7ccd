"""Arrays of JAX and pandas, real ones: what is sent, what is refused, and why."""

from __future__ import annotations

import numpy as np
import pytest

import pynccl
from ranks import on_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]


@on_ranks(2, timeout=100, env={"JAX_PLATFORMS": "cpu"})
def test_jax(rank: int, nranks: int) -> None:
    """Send JAX's arrays in every form, among them dtypes that NumPy lacks; none is written to."""
    import jax.numpy as jnp

    with pynccl.init(timeout=60) as comm:
        x = jnp.arange(4, dtype=jnp.float32) + rank
        total = np.arange(4, dtype=np.float32) * nranks + sum(range(nranks))
        np.testing.assert_array_equal(comm.all_reduce(x, np.empty(4, np.float32)), total)
        every = comm.all_gather(x.reshape(2, 2), np.empty((nranks, 2, 2), np.float32))
        np.testing.assert_array_equal(every[rank].ravel(), x)
        narrow = jnp.full(3, rank + 1, jnp.bfloat16)
        summed = comm.all_reduce(narrow, np.empty(3, narrow.dtype))
        np.testing.assert_array_equal(summed.astype(np.float32), np.full(3, nranks * (nranks + 1) / 2))
        # What comes back goes on in JAX.
        np.testing.assert_array_equal(jnp.asarray(total) * 2, total * 2)
        if rank == 0:
            comm.send(x, 1)
        elif rank == 1:
            np.testing.assert_array_equal(comm.recv(np.empty(4, np.float32), 0), np.arange(4))
        prepared = comm.prepare.all_reduce(x, np.empty(4, np.float32))
        np.testing.assert_array_equal(prepared(), total)
        with pytest.raises(ValueError, match=r"send \(in place\) is read-only; expected a writable array"):
            comm.all_reduce(x)
        with pytest.raises(ValueError, match="recv is read-only"):
            comm.all_reduce(np.ones(4, np.float32), x)
        with pytest.raises(TypeError, match="cannot make a new ArrayImpl; expected .* as numpy.empty"):
            comm.all_gather(x)
        np.testing.assert_array_equal(x, np.arange(4, dtype=np.float32) + rank)


@on_ranks(1, timeout=100, env={"JAX_PLATFORMS": "cpu"})
def test_a_call_in_a_traced_function(rank: int, nranks: int) -> None:
    """JAX says what it thinks of it."""
    import jax
    import jax.numpy as jnp

    with pynccl.init(timeout=60) as comm:
        traced = jax.jit(lambda a: comm.all_reduce(a, np.empty(4, np.float32)))
        with pytest.raises(TypeError, match="traced array with shape"):
            traced(jnp.ones(4, jnp.float32))


@on_ranks(2, timeout=100, env={"JAX_PLATFORMS": "cpu"})
def test_deleted_arrays(rank: int, nranks: int) -> None:
    """Name the argument whose memory JAX has given away, whether or not it is the first array of its type."""
    import jax
    import jax.numpy as jnp

    donate = jax.jit(lambda a: a + 1, donate_argnums=0)
    ones, out = np.ones(4, np.float32), np.empty(4, np.float32)
    with pynccl.init(timeout=60) as comm:
        for _ in range(2):
            x = jnp.arange(4, dtype=jnp.float32)
            donate(x)
            for call in (
                lambda x=x: comm.all_reduce(x, out),
                lambda x=x: comm.send(x, 1 - rank),
                lambda x=x: comm.all_gather(x),
                lambda x=x: comm.prepare.all_reduce(x, out),
            ):
                with pytest.raises(ValueError, match="(send|buf) is a JAX array that was deleted"):
                    call()
            with pytest.raises(ValueError, match="recv is a JAX array that was deleted"):
                comm.all_reduce(ones, x)
            comm.all_reduce(jnp.ones(4, jnp.float32), out)
            np.testing.assert_array_equal(out, nranks * ones)


@on_ranks(2, timeout=100)
def test_pandas(rank: int, nranks: int) -> None:
    """Refuse columns and frames, whose memory is pandas' own affair; take what comes out of them."""
    import pandas

    with pynccl.init(timeout=60) as comm:
        frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
        for thing in (frame, frame["a"], frame.index):
            with pytest.raises(TypeError, match=r"send is of type .* such as numpy\.array\(send\)"):
                comm.all_reduce(thing)
        total = comm.all_reduce(np.asarray(frame["a"]), np.empty(2))
        np.testing.assert_array_equal(total, [nranks, 2 * nranks])
