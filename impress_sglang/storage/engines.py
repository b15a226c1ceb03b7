"""Engines that read blocks from files into memory with many reads in flight.

`AioEngine` passes a whole batch to the kernel in one call (Linux native AIO, `man 2 io_submit`), so
that starting and collecting reads costs no Python per read; `ThreadEngine` uses threads and
`preadv` where the kernel does not offer AIO.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from impress_sglang.errors import ConfigError

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]

# struct iocb and struct io_event of linux/aio_abi.h, little endian.
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("address", "<u8"),
        ("size", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_descriptor", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
# Numbers of io_setup, io_destroy, io_getevents, io_submit.
_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}


# More threads are slower: they wait for the GIL, not for the device.
MAX_THREADS = 8
# Seconds of one wait for reads: others may begin after it, or have ended, while these hang.
WAIT_SECONDS = 0.02


def read_exactly(descriptor: int, offset: int, target: memoryview) -> None:
    """Fill `target` from a file; `EOFError` if the file ends before it is full."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise EOFError(f"expected {len(target)} bytes at {offset}, file ends after {done}")
        done += count


class BlockEngine(Protocol):
    """Interface of engines; tests/unit/test_engines.py checks it for every implementation.

    One thread uses an engine. The memory of a read must stay alive and untouched until `finish` has
    returned it.
    """

    name: str

    @property
    def depth(self) -> int:
        """Maximum number of reads in flight; may change between calls, even during reads."""
        ...

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        """Begin reads, which must not exceed `depth` with those in flight.

        Returns:
            A number for each read, unique among the reads in flight.
        """
        ...

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        """Wait until `at_least` reads have ended, but only for about WAIT_SECONDS; at least that
        many must be in flight.

        Returns:
            Numbers of the reads that have ended, and for each the number of bytes read, which may
            be fewer than asked for, or minus the error number.
        """
        ...

    def close(self) -> None:
        """Free the resources of the engine; no read may be in flight."""
        ...


class AioEngine:
    """Linux native AIO; truly asynchronous for files opened with O_DIRECT."""

    name = "aio"

    def __init__(self, depth: int) -> None:
        """Raises `OSError` if AIO is not supported, or its limit (fs.aio-max-nr) is reached."""
        self.depth = depth
        self._free = list(range(depth))
        self._requests = np.zeros(depth, _IOCB)
        self._requests["data"] = np.arange(depth)
        self._pointers = self._requests.ctypes.data + np.arange(depth, dtype=np.uint64) * np.uint64(
            _IOCB.itemsize
        )
        self._events = np.zeros(depth, _EVENT)
        # A timespec.
        self._patience = (ctypes.c_long * 2)(0, int(WAIT_SECONDS * 1e9))
        # Reads that the kernel refused to begin, with the error.
        self._refused: list[tuple[int, int]] = []
        numbers = _SYSCALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"AIO is not known for {platform.machine()}")
        setup, self._destroy_call, self._getevents_call, self._submit_call = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        if self._call(setup, ctypes.c_long(depth), ctypes.byref(self._context)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"io_setup: {os.strerror(number)}")

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        slots = np.array([self._free.pop() for _ in range(len(sizes))], np.int64)
        requests = self._requests
        requests["descriptor"][slots] = descriptors
        requests["offset"][slots] = offsets
        requests["address"][slots] = addresses
        requests["size"][slots] = sizes
        pointers = self._pointers[slots]
        begun = 0
        while begun < len(slots):
            rest = pointers[begun:]
            count = self._call(
                self._submit_call,
                self._context,
                ctypes.c_long(len(rest)),
                ctypes.c_void_p(rest.ctypes.data),
            )
            if count < 0:
                # The first of the rest has failed; the others may still succeed.
                self._refused.append((int(slots[begun]), ctypes.get_errno()))
                count = 1
            begun += count
        return slots

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        """See `BlockEngine.finish`; does not wait if the kernel has refused reads."""
        if self._refused:
            slots, errors = np.array(self._refused, np.int64).T
            self._refused, results = [], -errors
        else:
            limits = ctypes.c_long(at_least), ctypes.c_long(self.depth)
            events = ctypes.c_void_p(self._events.ctypes.data)
            wait = self._patience
            count = self._call(self._getevents_call, self._context, *limits, events, wait)
            if count < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "io_getevents failed")
            ended = self._events[: max(count, 0)]
            slots, results = ended["data"].astype(np.int64), ended["result"].copy()
        self._free.extend(slots.tolist())
        return slots, results

    def close(self) -> None:
        self._call(self._destroy_call, self._context)


class ThreadEngine:
    """Reads with one thread per read in flight."""

    name = "threads"

    def __init__(
        self,
        depth: int,
        read: Callable[[int, int, memoryview], None] = read_exactly,
        max_threads: int = MAX_THREADS,
    ) -> None:
        """`read` fills memory from a descriptor and an offset."""
        self.depth = depth = min(depth, max_threads)
        self._read = read
        self._queue: queue.SimpleQueue[tuple[int, int, int, int, int] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._next = 0
        # Daemons: the end of the process must not wait for a disk that hangs.
        names = [f"impress-read-{number}" for number in range(depth)]
        self._threads = [threading.Thread(target=self._run, name=n, daemon=True) for n in names]
        for thread in self._threads:
            thread.start()

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        numbers = np.arange(self._next, self._next + len(sizes))
        self._next += len(sizes)
        columns = (numbers, descriptors, offsets, addresses, sizes)
        for read in zip(*(column.tolist() for column in columns), strict=True):
            self._queue.put(read)
        return numbers

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        ended = list[tuple[int, int]]()
        with contextlib.suppress(queue.Empty):
            while len(ended) < at_least or not self._ended.empty():
                ended.append(self._ended.get(timeout=WAIT_SECONDS))
        numbers, results = np.array(ended, np.int64).reshape(-1, 2).T
        return numbers, results

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            number, descriptor, offset, address, size = read
            target = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            try:
                self._read(descriptor, offset, target)
            except EOFError:
                size = 0
            except OSError as error:
                size = -(error.errno or errno.EIO)
            self._ended.put((number, size))


def make_engine(name: str, depth: int) -> BlockEngine:
    """Make the engine for `--impress-io-engine`; auto is AIO if the kernel supports it.

    Raises:
        ConfigError: aio was requested, and the kernel does not support it.
    """
    if name == "threads":
        return ThreadEngine(depth)
    try:
        return AioEngine(depth)
    except OSError as error:
        if name == "aio":
            raise ConfigError(
                f"--impress-io-engine aio is not available here ({error.strerror}); use threads"
            ) from error
        logger.warning("reads go through threads: %s", error.strerror)
        return ThreadEngine(depth)
