"""The memory that emulated lanes see; what a GPU would do in silence is an error here."""

import ctypes

import numpy as np


class Global:
    """Some pieces of this process's memory, by address, as a launch uses them.

    Args:
        tensors: on the CPU, without gaps; their memory.
        threads: of one program.
    """

    def __init__(self, tensors, threads):
        pieces = []
        for first, last in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
            if pieces and first < pieces[-1][1]:
                # A view of what is known already.
                pieces[-1][1] = max(pieces[-1][1], last)
            elif first:
                pieces.append([first, last])
        self._first, self._last = np.array(pieces, np.uint64).T
        self._base = int(self._first[0]) // 16 * 16
        room = (int(self._last[-1]) - self._base + 15) // 16 * 16
        self._memory = (ctypes.c_uint8 * room).from_address(self._base)
        self._threads = threads
        # Where the bytes of each piece are among those of all pieces, and which program has written
        # each of them: its number and 1.
        sizes = (self._last - self._first).astype(np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        self._writers = np.zeros(sizes.sum(), np.int32)

    def load(self, lanes, addresses, size, count):
        """``count`` unsigned integers for each lane that lie one after the other.

        Args:
            lanes: which ask; their numbers in the launch.
            addresses: uint64, of the first one for each lane.
            size: of an integer, in bytes.
            count: how many one access takes.
        """
        at = self._place(lanes, addresses, size, count, writes=False)
        numbers = self._numbers(size)
        return [numbers[at + place] for place in range(count)]

    def store(self, lanes, addresses, values):
        """Write unsigned integers of one size, of which each lane has as many as ``values``."""
        size = values[0].itemsize
        at = self._place(lanes, addresses, size, len(values), writes=True)
        numbers = self._numbers(size)
        for place, each in enumerate(values):
            numbers[at + place] = each

    def add(self, lanes, addresses, values):
        """Add to unsigned integers; several lanes may to one."""
        at = self._place(lanes, addresses, values.itemsize, 1, writes=False)
        at, which = np.unique(at, return_inverse=True)
        sums = np.zeros(len(at), values.dtype)
        np.add.at(sums, which, values)
        self._numbers(values.itemsize)[at] += sums

    def _place(self, lanes, addresses, size, count, *, writes):
        which = np.searchsorted(self._first, addresses, "right").astype(np.int64) - 1
        beyond = addresses + np.uint64(size * count) > self._last[which]
        assert not ((which < 0) | beyond).any(), "an access outside of all tensors and tables"
        assert not (addresses % np.uint64(size * count)).any(), "an access that is not aligned"
        self._check_writers(lanes // self._threads + 1, which, addresses, writes)
        return ((addresses - np.uint64(self._base)) // np.uint64(size)).astype(np.int64)

    def _check_writers(self, programs, which, addresses, writes):
        """Programs run at once here, and in any order on a GPU: none may use another's results."""
        bytes_ = self._offsets[which] + (addresses - self._first[which]).astype(np.int64)
        known = self._writers[bytes_]
        if writes:
            self._writers[bytes_[known == 0]] = programs[known == 0]
            known = self._writers[bytes_]
        assert ((known == 0) | (known == programs)).all(), "two programs at one number"

    def _numbers(self, size):
        return np.frombuffer(self._memory, f"u{size}")


class Shared:
    """The shared memory of each program, and which warp has used which word since a barrier.

    Methods are as for :class:`Global`; addresses are in the memory of the lane's program.
    """

    def __init__(self, programs, n_bytes, threads):
        self._bytes = -(-n_bytes // 16) * 16
        self._memory = np.full(len(programs) * self._bytes, 0xA5, np.uint8)
        self._first, self._threads = programs[0] * threads, threads
        # A bit for each warp.
        self._writers, self._readers = np.zeros((2, len(programs), self._bytes // 4), np.int64)

    def barrier(self, programs):
        """Let these programs begin anew: all that was written is seen by all."""
        self._writers[programs] = self._readers[programs] = 0

    def load(self, lanes, addresses, size, count):
        at, numbers = self._place(lanes, addresses, size, count), self._memory.view(f"u{size}")
        for place in range(count):
            word, mine = self._word(lanes, (at + place) * size)
            assert not (self._writers[word] & ~mine).any(), _RACE
            np.bitwise_or.at(self._readers, word, mine)
        return [numbers[at + place] for place in range(count)]

    def store(self, lanes, addresses, values):
        size = values[0].itemsize
        at = self._place(lanes, addresses, size, len(values))
        numbers = self._memory.view(f"u{size}")
        for place, each in ((at + number, each) for number, each in enumerate(values)):
            word, mine = self._word(lanes, place * size)
            others = (self._writers[word] | self._readers[word]) & ~mine
            # Warps that hold the same numbers may all write them.
            assert (numbers[place] == each)[others != 0].all(), _RACE
            numbers[place] = each
            assert (numbers[place] == each).all(), _RACE
            np.bitwise_or.at(self._writers, word, mine)

    def _place(self, lanes, addresses, size, count):
        addresses = addresses.astype(np.int64)
        assert not (addresses % (size * count)).any(), "an access that is not aligned"
        assert (addresses + size * count <= self._bytes).all(), "an access beyond shared memory"
        return ((lanes - self._first) // self._threads * self._bytes + addresses) // size

    def _word(self, lanes, place):
        """Which word a byte is in, by program, and the bit of each lane's warp."""
        program, byte = np.divmod(place, self._bytes)
        return (program, byte // 4), 1 << lanes % self._threads // 32


_RACE = "two warps at one word of shared memory without a barrier in between"
