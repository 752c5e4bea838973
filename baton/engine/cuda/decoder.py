"""Decoder on CUDA: weights, a paged pool, and one forward pass for everything.

T rows of a step, E hidden size, H query heads, K KV heads, D head dim, V vocabulary,
S block table rows, N tiles

It needs only torch and triton. With ``TRITON_INTERPRET=1`` it runs on the CPU (slowly), so its
results can be compared with ``baton/engine/cpu/decoder.py`` without a GPU.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as x_TE give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.cuda.kernels.attention import Span, Tiles, Workspace, paged_attention, tile_tables
from baton.engine.cuda.kernels.configs import AttentionConfig, attention_config
from baton.engine.cuda.kernels.products import Products, Weight, to_fp8
from baton.engine.cuda.kernels.rows import add_norm, add_to, gate_mul, rope_write
from baton.engine.cuda.upload import upload
from baton.engine.models.layer import Deltas, LayerVectors, take_vectors

SPREAD_QUERIES = 8
"""Up to so many queries (decode, verification), a sequence's keys are spread over programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Numbers of a model.

    Attributes:
        windows: Keys that a query sees in each layer, its own included; 0 = all. Empty: no layer
            has a window.
        gelu: Whether the gate's activation is GELU in its tanh form instead of SiLU.
        query_scale: Factor of scores, if not ``1 / sqrt(head_dim)``; only for a model that norms
            its heads.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_context_tokens: int
    windows: tuple[int, ...] = ()
    gelu: bool = False
    embed_scale: float = 1.0
    query_scale: float | None = None

    @property
    def qkv_width(self) -> int:
        """Outputs of the first product of a layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step, on the device.

    Attributes:
        tokens_T: Token ids, int64.
        positions_T: Positions, int32.
        sequences_T: Row of the block tables, int32; -1 = a padding row.
        tables_SB: Block ids by sequence, int32.
        launches: Tiles of the step's attention, and the configuration of each launch.
        places_S: Numbers of the rows that are sampled, int64.
        deltas: LoRA deltas of the products; not in captured steps.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    sequences_T: torch.Tensor
    tables_SB: torch.Tensor
    launches: tuple[tuple[Tiles, AttentionConfig], ...]
    places_S: torch.Tensor
    deltas: Deltas | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    vectors: LayerVectors
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    window: int
    rotation: torch.Tensor  # [positions, D / 2, 2]


class CudaDecoder:
    """Packed weights, the pool, and the forward pass.

    Args:
        weights: Tensors by canonical name (``baton.engine.models.families.weight_table``); Q and K
            with adjacent pairs. Emptied while packing. They determine the parts of a layer.
        ropes: Angle per position of each pair, ``[D / 2]`` fp32, and factor of rotated pairs; a
            second item is for the layers with a window.
        dtype: Dtype of weights, activations and KV.
        device: ``cuda``, or ``cpu`` for the interpreter.
        exact: Whether a row's bits must not depend on the other rows.
        fp8: Whether the layers' matrices are kept in fp8, with a scale per output.

    Raises:
        ValueError: The kernels do not support the shape.
        RuntimeError: The device cannot multiply in fp8.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: dict[str, torch.Tensor],
        ropes: Sequence[tuple[torch.Tensor, float]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_tokens: int = 16,
        exact: bool = True,
        fp8: bool = False,
    ) -> None:
        s = shape
        self.fp8 = fp8
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.exact = exact
        self.block_tokens = block_tokens
        self.decode_config = attention_config("decode", s.head_dim, exact=exact)
        self.prefill_config = attention_config("prefill", s.head_dim, exact=exact)
        for config in (self.decode_config, self.prefill_config):
            config.queries(self._group)
        self.product = Products(exact=exact)
        self.workspace = Workspace(device)
        pool = (s.num_layers, 2, num_blocks, block_tokens, s.num_kv_heads, s.head_dim)
        self.pool = torch.zeros(pool, dtype=dtype, device=device)
        self._rotations = [self._rotation(*rope) for rope in ropes]
        self._embed = weights.pop("embed").to(device, dtype).contiguous()
        self._final_norm = weights.pop("final_norm").to(device, torch.float32)
        head = weights.pop("head", None)
        self._head = self._embed if head is None else head.to(device, dtype).contiguous()
        self._layers = [self._layer(i, weights) for i in range(s.num_layers)]
        first = self._layers[0]
        for weight in (first.qkv, first.o, first.gate_up, first.down, self._head):
            self.product.prepare(weight, dtype)

    def _rotation(self, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
        positions = torch.arange(self.shape.max_context_tokens, dtype=torch.float32).view(-1, 1)
        angles = positions * frequencies.float().cpu()
        turned = torch.stack((angles.cos(), angles.sin()), dim=-1) * magnitude
        return turned.to(self.device)

    def _layer(self, index: int, weights: dict[str, torch.Tensor]) -> _Layer:
        s = self.shape

        def matrix(*names: str) -> Weight:
            parts = [weights.pop(f"layers.{index}.{n}").to(self.device, self.dtype) for n in names]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            return to_fp8(whole) if self.fp8 else whole

        def place(vector: torch.Tensor) -> torch.Tensor:
            return vector.to(self.device, torch.float32).contiguous()

        window = s.windows[index] if s.windows else 0
        return _Layer(
            vectors=take_vectors(weights, index, s, place),
            qkv=matrix("q", "k", "v"),
            o=matrix("o"),
            gate_up=matrix("gate", "up"),
            down=matrix("down"),
            window=window,
            rotation=self._rotations[-1 if window else 0],
        )

    @torch.inference_mode()
    def forward(
        self, batch: Batch, on_layers_done: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Return ``[T, E]`` fp32 sums before the final norm, and store K and V.

        ``on_layers_done`` gets 1, 2, ... when that many layers' KV is *enqueued*: wait for the
        device before reading it elsewhere.
        """
        eps = self.shape.rms_norm_eps
        x_TE = F.embedding(batch.tokens_T, self._embed).float()
        if self.shape.embed_scale != 1.0:
            x_TE *= self.shape.embed_scale
        s = self.shape
        # zeroed, because padding rows belong to no tile; used by one layer after the other
        a_THD = torch.zeros(
            (len(x_TE), s.num_heads, s.head_dim), dtype=self.dtype, device=self.device
        )
        delta_TE: torch.Tensor | None = None
        post_E: torch.Tensor | None = None  # norm of the delta that is added next
        for index, layer in enumerate(self._layers):
            vectors = layer.vectors
            h_TE = add_norm(x_TE, delta_TE, vectors.attn_norm, eps, self.dtype, post_E)
            self._attend(batch, index, layer, h_TE, a_THD)
            if on_layers_done is not None:
                on_layers_done(index + 1)
            delta_TE = self._project(batch, index, "o", layer.o, a_THD.view(len(x_TE), -1))
            post_E = vectors.attn_post_norm
            h_TE = add_norm(x_TE, delta_TE, vectors.mlp_norm, eps, self.dtype, post_E)
            gate_up = self._project(batch, index, "gate_up", layer.gate_up, h_TE)
            act_TF = gate_mul(gate_up, gelu=self.shape.gelu)
            delta_TE = self._project(batch, index, "down", layer.down, act_TF)
            post_E = vectors.mlp_post_norm
        if delta_TE is not None:
            add_to(x_TE, delta_TE, eps, post_E)
        return x_TE

    def _attend(
        self, batch: Batch, index: int, layer: _Layer, h_TE: torch.Tensor, a_THD: torch.Tensor
    ) -> None:
        """Store K and V of a layer, and write its heads to ``a_THD``."""
        s = self.shape
        qkv = self._project(batch, index, "qkv", layer.qkv, h_TE)
        rope_write(
            qkv,
            s.num_heads,
            batch.positions_T,
            batch.sequences_T,
            layer.rotation,
            batch.tables_SB,
            self.pool[index],
            bias=layer.vectors.qkv_bias,
            norm=layer.vectors.head_norm,
            eps=s.rms_norm_eps,
        )
        q_THD = qkv.view(len(qkv), -1, s.head_dim)[:, : s.num_heads]
        for tiles, config in batch.launches:
            paged_attention(
                q_THD,
                self.pool[index],
                batch.tables_SB,
                tiles,
                a_THD,
                config,
                self.workspace,
                window=layer.window,
            )

    def _project(
        self, batch: Batch, index: int, name: str, weight: Weight, x_TE: torch.Tensor
    ) -> torch.Tensor:
        """Apply one product of layer ``index``, with the rows' LoRA deltas."""
        y_TN = self.product(x_TE, weight)
        if batch.deltas is not None:
            batch.deltas.apply(index, name, x_TE, y_TN)
        return y_TN

    @torch.inference_mode()
    def logits(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Return ``[S, V]`` fp32 logits of some rows of ``forward``'s result (contiguous)."""
        h_SE = add_norm(x_SE, None, self._final_norm, self.shape.rms_norm_eps, self.dtype)
        return self.product(h_SE, self._head, torch.float32)

    @torch.inference_mode()
    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to rows of ``forward``'s result (contiguous): ``[S, E]`` fp32."""
        return add_norm(x_SE, None, self._final_norm, self.shape.rms_norm_eps, torch.float32)

    def batch(
        self,
        tokens: Sequence[int],
        spans: Sequence[Span],
        tables: Sequence[Sequence[int]],
        deltas: Deltas | None = None,
        places: Sequence[int] = (),
    ) -> Batch:
        """Put a step on the device, by one copy. Sequences with few queries are spread over keys.

        Args:
            tokens: Tokens of all spans.
            spans: Queries of each sequence.
            tables: Block ids by sequence.
            deltas: LoRA deltas.
            places: Rows that are sampled.

        Raises:
            ValueError: A position is beyond the context, where the device has no rotations.
        """
        last = max(span.start + span.count for span in spans) - 1
        self.check_position(last)
        width = max(len(table) for table in tables)
        padded = [list(table) + [0] * (width - len(table)) for table in tables]
        positions = [p for span in spans for p in range(span.start, span.start + span.count)]
        sequences = [span.sequence for span in spans for _ in range(span.count)]
        parts = {
            "tokens": torch.tensor(tokens, dtype=torch.int64),
            "positions": torch.tensor(positions, dtype=torch.int32),
            "sequences": torch.tensor(sequences, dtype=torch.int32),
            "tables": torch.tensor(padded, dtype=torch.int32),
            "places": torch.tensor(places, dtype=torch.int64),
        }
        few = [span for span in spans if span.count <= SPREAD_QUERIES]
        many = [span for span in spans if span.count > SPREAD_QUERIES]
        launches: list[tuple[str, int, AttentionConfig]] = []
        if few:
            config = self.decode_config
            queries = min(config.queries(self._group), max(span.count for span in few))
            launches.append(("few", queries, config))
            table_5N, items_2I = tile_tables(few, queries, split=config.split, aligned=False)
            parts["few"] = table_5N
            if items_2I is not None:
                parts["few items"] = items_2I
        if many:
            config = self.prefill_config
            queries = config.queries(self._group)
            launches.append(("many", queries, config))
            parts["many"], _ = tile_tables(many, queries)
        on_device = upload(self.device, parts)
        return Batch(
            on_device["tokens"],
            on_device["positions"],
            on_device["sequences"],
            on_device["tables"],
            tuple(
                (Tiles(on_device[name], on_device.get(f"{name} items"), queries), config)
                for name, queries, config in launches
            ),
            on_device["places"],
            deltas,
        )

    def check_position(self, position: int) -> None:
        """Raise ``ValueError`` for a position beyond the context."""
        limit = self.shape.max_context_tokens
        if position >= limit:
            raise ValueError(f"position {position} is beyond the context of {limit} tokens")

    @property
    def _group(self) -> int:
        return self.shape.num_heads // self.shape.num_kv_heads
