"""A decoder of Llama's shape on CUDA: weights, a paged pool, and one forward pass for everything.

T rows of a step, E hidden size, H query heads, K KV heads, D head dim, V vocabulary,
S block table rows, N tiles

Needs torch and triton, nothing else. Under ``TRITON_INTERPRET=1`` it runs on the CPU (slowly), so
that its results can be compared with ``engine/models/decoder.py`` without a GPU.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as x_TE give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from engine.kernels.attention import Span, Tiles, Workspace, paged_attention, tiles_of
from engine.kernels.configs import AttentionConfig, attention_config
from engine.kernels.products import Products
from engine.kernels.rows import add_norm, rope_write, silu_mul

SPREAD_QUERIES = 8
"""Up to so many queries (decode, verification) a sequence's keys are spread over programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The numbers of a model. ``window``: keys a query sees, 0 = all."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_context_tokens: int
    window: int = 0

    @property
    def qkv_width(self) -> int:
        """Outputs of the first product of a layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of the four matrices of one layer."""
        attention = self.qkv_width + self.num_heads * self.head_dim
        return self.hidden_size * (attention + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, on the device.

    Attributes:
        tokens_T: int64.
        positions_T: int32.
        sequences_T: int32 row of the block tables; -1 = a row that only pads.
        tables_SB: int32 block ids by sequence.
        launches: The tiles of the step's attention, and how each launch is cut.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    sequences_T: torch.Tensor
    tables_SB: torch.Tensor
    launches: tuple[tuple[Tiles, AttentionConfig], ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class CudaDecoder:
    """Packed weights, the pool, and the forward pass.

    Args:
        shape: The model's numbers.
        weights: By canonical name (``engine.models.families.weight_table``); Q and K with adjacent
            pairs. Emptied while packing.
        frequencies: Angle per position of each pair, ``[D / 2]`` fp32.
        magnitude: What rotated pairs are multiplied with.
        dtype: Of weights, activations and KV.
        device: ``cuda``, or ``cpu`` for the interpreter.
        num_blocks: Size of the pool.
        block_tokens: Tokens of a block.
        exact: A row's bits never depend on the other rows.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: dict[str, torch.Tensor],
        frequencies: torch.Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_tokens: int = 16,
        exact: bool = True,
        magnitude: float = 1.0,
    ) -> None:
        s = shape
        self.shape, self.dtype, self.device, self.exact = shape, dtype, device, exact
        self.block_tokens = block_tokens
        self.decode_config = attention_config("decode", s.head_dim, exact=exact)
        self.prefill_config = attention_config("prefill", s.head_dim, exact=exact)
        self._product = Products(exact=exact)
        self.workspace = Workspace(device)
        pool = (s.num_layers, 2, num_blocks, block_tokens, s.num_kv_heads, s.head_dim)
        self.pool = torch.zeros(pool, dtype=dtype, device=device)

        def take(*names: str) -> torch.Tensor:
            parts = [weights.pop(name).to(device, dtype) for name in names]
            return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

        def norm(name: str) -> torch.Tensor:
            return weights.pop(name).to(device, torch.float32).contiguous()

        self._embed = take("embed")
        self._final_norm = norm("final_norm")
        self._head = take("head") if "head" in weights else self._embed
        self._layers = [
            _Layer(
                attn_norm=norm(f"layers.{i}.attn_norm"),
                qkv=take(*(f"layers.{i}.{name}" for name in ("q", "k", "v"))),
                o=take(f"layers.{i}.o"),
                mlp_norm=norm(f"layers.{i}.mlp_norm"),
                gate_up=take(*(f"layers.{i}.{name}" for name in ("gate", "up"))),
                down=take(f"layers.{i}.down"),
            )
            for i in range(s.num_layers)
        ]
        positions = torch.arange(s.max_context_tokens, dtype=torch.float32).view(-1, 1)
        angles = positions * frequencies.float().cpu()
        turned = torch.stack((angles.cos(), angles.sin()), dim=-1) * magnitude
        self._rotation = turned.to(device)
        first = self._layers[0]
        for weight in (first.qkv, first.o, first.gate_up, first.down, self._head):
            self._product.prepare(weight)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, on_layers_done: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """``[T, E]`` fp32 sums after the last layer, before the final norm; writes K and V.

        Args:
            batch: What to compute.
            on_layers_done: Called with 1, 2, ... when that many layers' KV is *enqueued* (wait for
                the device before reading it elsewhere).
        """
        s, product = self.shape, self._product
        rows, heads, dim = batch.tokens_T.shape[0], s.num_heads, s.head_dim
        x_TE = F.embedding(batch.tokens_T, self._embed).float()
        # zeroed: rows that only pad belong to no tile
        a_THD = torch.zeros(rows, heads, dim, dtype=self.dtype, device=self.device)
        delta_TE: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            h_TE = add_norm(x_TE, delta_TE, layer.attn_norm, s.rms_norm_eps, self.dtype)
            qkv = product(h_TE, layer.qkv)
            rope_write(
                qkv,
                heads,
                batch.positions_T,
                batch.sequences_T,
                self._rotation,
                batch.tables_SB,
                self.pool[index],
            )
            if on_layers_done is not None:
                on_layers_done(index + 1)
            q_THD = qkv.view(rows, -1, dim)[:, :heads]
            for tiles, config in batch.launches:
                paged_attention(
                    q_THD,
                    self.pool[index],
                    batch.tables_SB,
                    tiles,
                    a_THD,
                    config,
                    self.workspace,
                    window=s.window,
                )
            delta_TE = product(a_THD.view(rows, -1), layer.o)
            h_TE = add_norm(x_TE, delta_TE, layer.mlp_norm, s.rms_norm_eps, self.dtype)
            delta_TE = product(silu_mul(product(h_TE, layer.gate_up)), layer.down)
        return x_TE if delta_TE is None else x_TE.add_(delta_TE)

    @torch.inference_mode()
    def logits(self, x_SE: torch.Tensor) -> torch.Tensor:
        """``[S, V]`` fp32 logits of some rows of ``forward``'s result (contiguous)."""
        h_SE = add_norm(x_SE, None, self._final_norm, self.shape.rms_norm_eps, self.dtype)
        return self._product(h_SE, self._head, torch.float32)

    @torch.inference_mode()
    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        """``[S, E]`` fp32: some rows of ``forward``'s result (contiguous) behind the final norm."""
        return add_norm(x_SE, None, self._final_norm, self.shape.rms_norm_eps, torch.float32)

    def batch(
        self, tokens: Sequence[int], spans: Sequence[Span], tables: Sequence[Sequence[int]]
    ) -> Batch:
        """Put a step on the device. Sequences with few queries are spread over their keys.

        Args:
            tokens: Of all rows.
            spans: Which rows are which sequence's, in the order of the rows.
            tables: Block ids by sequence.

        Raises:
            ValueError: A position is beyond the context: the device would read what is not there.
        """
        last = max(span.start + span.count for span in spans) - 1
        self.check_position(last)
        width = max(len(table) for table in tables)
        padded = [list(table) + [0] * (width - len(table)) for table in tables]
        positions = [p for span in spans for p in range(span.start, span.start + span.count)]
        sequences = [span.sequence for span in spans for _ in range(span.count)]
        few = [span for span in spans if span.count <= SPREAD_QUERIES]
        many = [span for span in spans if span.count > SPREAD_QUERIES]
        launches = []
        if few:
            fitting = self.decode_config.queries(self._group)
            queries = min(fitting, max(span.count for span in few))
            longest = max(span.start + span.count for span in few)
            splits = -(-longest // self.decode_config.split)
            found = tiles_of(few, queries, aligned=False)
            launches.append((Tiles(self._int32(found).t().contiguous(), splits, queries),
                             self.decode_config))  # fmt: skip
        if many:
            queries = self.prefill_config.queries(self._group)
            found = tiles_of(many, queries)
            launches.append((Tiles(self._int32(found).t().contiguous(), 0, queries),
                             self.prefill_config))  # fmt: skip
        return Batch(
            self._to_device(torch.tensor(tokens)),
            self._int32(positions),
            self._int32(sequences),
            self._int32(padded),
            tuple(launches),
        )

    def check_position(self, position: int) -> None:
        """Raise ``ValueError`` for a position beyond the context."""
        limit = self.shape.max_context_tokens
        if position >= limit:
            raise ValueError(f"position {position} is beyond the context of {limit} tokens")

    @property
    def _group(self) -> int:
        return self.shape.num_heads // self.shape.num_kv_heads

    def _int32(self, values: object) -> torch.Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.int32))

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device: from pinned memory of its own."""
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)
