"""Published rectangles of a prompt's KV; looking one up costs no more than its own blocks.

One row per layer and range of heads, one byte per block of the prompt: its valid tokens, or zero.
"""

from baton.types.geometry import KvGeometry
from kvtransfer.kv_slice import KvSlice


class Coverage:
    """Rectangles that do not overlap, in the order in which they were added.

    Args:
        prompt_tokens: Length of the prompt; its last block may be partial.
    """

    def __init__(self, geometry: KvGeometry, prompt_tokens: int) -> None:
        self.kv_slices: list[KvSlice] = []
        self.payload_bytes = 0
        self._geometry = geometry
        self._prompt_tokens = prompt_tokens
        self._blocks = -(-prompt_tokens // geometry.block_tokens)
        self._rows: dict[tuple[int, int, int], bytearray] = {}
        self._known: set[KvSlice] = set()

    def __contains__(self, kv_slice: KvSlice) -> bool:
        return kv_slice in self._known

    def __len__(self) -> int:
        return len(self.kv_slices)

    def fits(self, kv_slice: KvSlice) -> bool:
        """Return whether a rectangle lies inside the model and inside the prompt."""
        begin_token = kv_slice.block_begin * self._geometry.block_tokens
        return (
            kv_slice.fits(self._geometry)
            and kv_slice.block_begin + kv_slice.block_count <= self._blocks
            and begin_token + kv_slice.valid_tokens <= self._prompt_tokens
        )

    def add(self, kv_slice: KvSlice) -> bool:
        """Add a rectangle; if any of it is there already, change nothing and return False."""
        valid = self._valid(kv_slice)
        begin = kv_slice.block_begin
        end = kv_slice.block_begin + kv_slice.block_count
        rows = [self._row(layer, kv_slice) for layer in _layers(kv_slice)]
        if any(any(row[begin:end]) for row in rows):
            return False
        for row in rows:
            row[begin:end] = valid
        self._known.add(kv_slice)
        self.kv_slices.append(kv_slice)
        self.payload_bytes += kv_slice.payload_bytes(self._geometry)
        return True

    def covers(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice was published as a whole; a part of published heads counts."""
        if not self.fits(kv_slice):
            return False
        tail = self._valid(kv_slice)[-1]
        begin = kv_slice.block_begin
        end = kv_slice.block_begin + kv_slice.block_count
        for layer in _layers(kv_slice):
            held = self._covering_row(layer, kv_slice)[begin:end]
            if len(held) < kv_slice.block_count or not all(held) or held[-1] < tail:
                return False
        return True

    def complete(self, skip_blocks: int) -> bool:
        """Return whether all blocks after ``skip_blocks`` are there, for every layer and head."""
        tokens = self._geometry.block_tokens
        head_ranges = sorted({key[1:] for key in self._rows})
        whole = bytes([tokens]) * (self._blocks - 1)
        last = self._prompt_tokens - (self._blocks - 1) * tokens
        wanted = (bytes(skip_blocks) + (whole + bytes([last]))[skip_blocks:])[: self._blocks]
        if not any(wanted):
            return not self.kv_slices
        next_head = 0
        for begin, count in head_ranges:
            if begin != next_head:
                return False
            next_head = begin + count
        return next_head == self._geometry.num_kv_heads and all(
            bytes(self._rows.get((layer, *heads), b"")) == wanted
            for layer in range(self._geometry.num_layers)
            for heads in head_ranges
        )

    def _row(self, layer: int, kv_slice: KvSlice) -> bytearray:
        key = (layer, kv_slice.head_begin, kv_slice.head_count)
        return self._rows.setdefault(key, bytearray(self._blocks))

    def _covering_row(self, layer: int, kv_slice: KvSlice) -> bytearray:
        """Return the row of the published range of heads that contains those of ``kv_slice``."""
        exact = self._rows.get((layer, kv_slice.head_begin, kv_slice.head_count))
        if exact is not None:
            return exact
        end = kv_slice.head_begin + kv_slice.head_count
        for (row_layer, begin, count), row in self._rows.items():
            if row_layer == layer and begin <= kv_slice.head_begin and end <= begin + count:
                return row
        return bytearray()

    def _valid(self, kv_slice: KvSlice) -> bytes:
        tokens = self._geometry.block_tokens
        tail = kv_slice.valid_tokens - (kv_slice.block_count - 1) * tokens
        return bytes([tokens]) * (kv_slice.block_count - 1) + bytes([tail])


def _layers(kv_slice: KvSlice) -> range:
    return range(kv_slice.layer_begin, kv_slice.layer_begin + kv_slice.layer_count)
