"""Turn the requests of a trace into token identities, for a radix tree that works on tokens.

A trace says which blocks two prompts share, not what is in them. A token's identity is therefore
its block and its place in that block; three ranges of int64 never meet:

    range                identity of
    [0, 2**62)           a prompt token in a hashed block: dense block number * block + offset
    [2**62, 2**63)       a prompt token of a request without blocks: 2**62 + (index << 31 | place)
    [-2**62, 0)          a generated token: ~(index << 31 | place)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvdefrag.errors import ConfigError, TraceError
from kvdefrag.sim.readers import TraceRequest

Int64Array = npt.NDArray[np.int64]

_PLACE_BITS = 31
_PRIVATE = 1 << 62
_MASK = (1 << 64) - 1


class BlockVocabulary:
    """Numbers hash ids 0, 1, 2 ... in order of first appearance.

    Ids may take all 64 bits, signed or unsigned; the dense numbers leave room for an offset.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, ids: Sequence[int]) -> list[int]:
        """Return the number of each id, giving new ids the next free ones."""
        known = self._numbers
        return [known.setdefault(block_id, len(known)) for block_id in ids]


class Workload:
    """Gives the tokens of prompts; one object serves every arm of a run.

    With `prefix_jitter` J every distinct hash id has a length in [block - J, block] that depends
    on the id and the seed alone, so shared prefixes end off page boundaries and every request
    that shares a block agrees on its length. A prompt is the concatenation of its blocks; the last
    block of a prompt, if partial with r tokens in the trace, has min(r, the id's length). J = 0
    gives the trace's own lengths. Requests without blocks keep their length.

    Args:
        block: Tokens per hash id, the same as the trace was read with.
        prefix_jitter: J in tokens, 0 <= J < block, so that no block vanishes.
        seed: Any int; changes the jittered lengths and nothing else.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(self, *, block: int = 512, prefix_jitter: int = 0, seed: int = 0) -> None:
        if block < 1:
            raise ConfigError(f"--block {block} must be at least 1")
        if not 0 <= prefix_jitter < block:
            raise ConfigError(f"--prefix-jitter {prefix_jitter} must be in 0..{block - 1}")
        self.block = block
        self.prefix_jitter = prefix_jitter
        self.vocabulary = BlockVocabulary()
        self._salt = _splitmix64(seed & _MASK)
        self._lengths = array("q")
        self._offsets = np.arange(block, dtype=np.int64)

    def prompt_length(self, request: TraceRequest) -> int:
        """Return the number of prompt tokens, without making them; errors as prompt_tokens."""
        if request.blocks is not None:
            self._check(request, request.blocks)
        if not self.prefix_jitter or not request.blocks:
            return request.input_tokens
        return int(self._block_lengths(request, request.blocks).sum())

    def prompt_tokens(self, request: TraceRequest) -> Int64Array:
        """Return the identities of a prompt's tokens: int64 [prompt_length(request)].

        Raises:
            TraceError: The number of blocks disagrees with the prompt's length.
        """
        if request.blocks is None:
            return _private_tokens(request)
        self._check(request, request.blocks)
        numbers = np.array(self.vocabulary.numbers(request.blocks), dtype=np.int64)
        tokens = numbers[:, None] * self.block + self._offsets
        if not self.prefix_jitter:
            return tokens.reshape(-1)[: request.input_tokens]
        lengths = self._block_lengths(request, request.blocks)
        kept: Int64Array = tokens[self._offsets < lengths[:, None]]
        return kept

    def _block_lengths(self, request: TraceRequest, blocks: Sequence[int]) -> Int64Array:
        numbers = self.vocabulary.numbers(blocks)
        known = self._lengths
        for number, block_id in zip(numbers, blocks, strict=True):
            if number >= len(known):
                known.append(self._jittered_length(block_id))
        lengths = np.array([known[number] for number in numbers], dtype=np.int64)
        if len(lengths):
            lengths[-1] = min(lengths[-1], request.input_tokens - self.block * (len(lengths) - 1))
        return lengths

    def _jittered_length(self, block_id: int) -> int:
        return self.block - _splitmix64((block_id & _MASK) ^ self._salt) % (self.prefix_jitter + 1)

    def _check(self, request: TraceRequest, blocks: Sequence[int]) -> None:
        expected = -(-request.input_tokens // self.block)
        if len(blocks) != expected:
            raise TraceError(
                f"expected {expected} blocks of {self.block} for {request.input_tokens} tokens, "
                f"got {len(blocks)}",
                row=request.row,
            )


def output_tokens(request_index: int, start: int, count: int) -> Int64Array:
    """Return the identities of generated tokens start .. start + count of a request.

    int64 [count], negative, and unlike every other request's and every prompt's.
    """
    first = request_index << _PLACE_BITS | start
    return ~np.arange(first, first + count, dtype=np.int64)


def _private_tokens(request: TraceRequest) -> Int64Array:
    first = _PRIVATE + (request.index << _PLACE_BITS)
    return np.arange(first, first + request.input_tokens, dtype=np.int64)


def _splitmix64(value: int) -> int:
    """Return a well mixed 64-bit hash (Steele, Lea and Flood, OOPSLA 2014), alike everywhere."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
