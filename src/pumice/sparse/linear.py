"""A linear layer whose weight is stored as the entries of its active blocks.

The dense matrix exists inside the forward operator and again inside the backward operators, for one layer at a time.
They are opaque custom operators because torch.compile would otherwise look inside and save the dense matrix of the
forward pass for the backward pass. What autograd saves is the input, `values` and `ids`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pumice.errors import UserError
from pumice.sparse.layout import BlockGrid, as_matrix, blank, gather, grid_norms, mark, pack, real_entries, unpack

# --- operators: the only place where a dense matrix is made in training ----------------------------------------------


@torch.library.custom_op("pumice::block_sparse_linear", mutates_args=())
def _linear(
    x: Tensor, values: Tensor, ids: Tensor, bias: Tensor | None, norms: Tensor | None, rows: int, cols: int
) -> Tensor:
    """y = x Wᵀ + b in the dtype of x; ``norms`` (blocks,) is not read: its gradient carries the norms of dL/dW."""
    weight = unpack(values, ids, BlockGrid(rows, cols, *values.shape[1:]), x.dtype)
    return nn.functional.linear(_rows(x), weight, None if bias is None else bias.to(x.dtype)).view(*x.shape[:-1], rows)


@torch.library.custom_op("pumice::block_sparse_linear_input_grad", mutates_args=())
def _input_grad(grad: Tensor, values: Tensor, ids: Tensor, cols: int) -> Tensor:
    """dL/dx = dL/dy W."""
    weight = unpack(values, ids, BlockGrid(grad.shape[-1], cols, *values.shape[1:]), grad.dtype)
    return (_rows(grad) @ weight).view(*grad.shape[:-1], cols)


@torch.library.custom_op("pumice::block_sparse_linear_values_grad", mutates_args=())
def _values_grad(
    grad: Tensor, x: Tensor, ids: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, norms: int
) -> tuple[Tensor, Tensor]:
    """The active blocks of dL/dW = (dL/dy)ᵀ x in ``dtype``, and the squared norms of all its blocks or of none."""
    grid = BlockGrid(grad.shape[-1], x.shape[-1], block_rows, block_cols)
    buffer = blank(grid, x.dtype, x.device)
    torch.mm(_rows(grad).t(), _rows(x), out=as_matrix(buffer, grid))
    squares = grid_norms(buffer, grid, 2).square_() if norms else buffer.new_empty(0, dtype=torch.float32)
    return gather(buffer, ids).to(dtype), squares


def _rows(x: Tensor) -> Tensor:
    """(..., features) as (tokens, features), also of no tokens or no leading axis."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@_linear.register_fake
def _(
    x: Tensor, values: Tensor, ids: Tensor, bias: Tensor | None, norms: Tensor | None, rows: int, cols: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@_input_grad.register_fake
def _(grad: Tensor, values: Tensor, ids: Tensor, cols: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


@_values_grad.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, norms: int
) -> tuple[Tensor, Tensor]:
    values = x.new_empty(ids.shape[0], block_rows, block_cols, dtype=dtype)
    return values, x.new_empty(norms, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, ids, bias, norms, _, ctx.cols = inputs
    ctx.norms = 0 if norms is None else norms.shape[0]
    need_x, need_values = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_values else None, values if need_x else None, ids)
    ctx.block, ctx.values_dtype, ctx.bias_dtype = values.shape[1:], values.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, values, ids = ctx.saved_tensors
    need_x, need_values, _, need_bias = ctx.needs_input_grad[:4]
    grad_x = grad_values = grad_bias = norms = None
    if need_x:
        grad_x = _input_grad(grad, values, ids, ctx.cols)
    if need_values:
        grad_values, norms = _values_grad(grad, x, ids, *ctx.block, ctx.values_dtype, ctx.norms)
    if need_bias:
        grad_bias = _rows(grad).sum(0).to(ctx.bias_dtype)
    return grad_x, grad_values, None, grad_bias, norms if ctx.norms else None, None, None


_linear.register_autograd(_backward, setup_context=_save)


# --- module ----------------------------------------------------------------------------------------------------------


class BlockSparseLinear(nn.Module):
    """A linear layer y = x Wᵀ + b of which only some blocks of W exist.

    Under autocast it computes in autocast's dtype like nn.Linear; otherwise input and values must have the same dtype.

    Args:
        in_features: Size of the last axis of the input, the columns of W.
        out_features: Size of the last axis of the output, the rows of W.
        ids: The active blocks: integer, (slots,), each at least 0 and below the number of blocks, each once. Their
            number is fixed for the life of the layer.
        block_shape: (block rows, block cols).
        bias: Whether to add a bias, which is dense and trains.
        device: Of parameters and buffers.
        dtype: Of parameters; default: torch's default dtype.

    Attributes:
        values: Parameter (slots, block rows, block cols): the entries of the active blocks. In a short edge block, the
            entries outside the matrix are padding: zero, with zero gradient.
        ids: int32 buffer (slots,): the block that each slot holds, in no order; the number of blocks if it is empty.
        birth: int32 buffer (slots,): the optimizer step at which the slot took up its block, 0 for a block that was
            there at the start. The age of a block is the number of optimizer steps taken minus this.
        ever_active: uint8 buffer (⌈blocks / 8⌉,): a bit for each block, whether it has been active at any time.
        bias: Parameter (out_features,) or None.
        origin: The layer that was sparsified, without its parameters, for :func:`pumice.sparse.densify`; None if there
            was none. Not a submodule.

    Raises:
        UserError: The block does not fit, or ids are not distinct numbers of blocks.
    """

    values: nn.Parameter
    ids: Tensor
    birth: Tensor
    ever_active: Tensor
    origin: nn.Module | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ids: Tensor,
        block_shape: tuple[int, int] = (1, 64),
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.block_shape = (block_shape[0], block_shape[1])
        if problem := _wrong_ids(ids, self.grid, empty=False):
            raise UserError(f"cannot make a block-sparse layer: {problem}")
        slots = ids.shape[0]
        self.values = nn.Parameter(torch.empty(slots, *self.block_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.register_buffer("ids", ids.to(device=self.values.device, dtype=torch.int32, copy=True))
        self.register_buffer("birth", torch.zeros(slots, device=self.values.device, dtype=torch.int32))
        self.register_buffer("ever_active", _bits(ids, self.grid).to(self.values.device))
        self.__dict__["origin"] = None  # past nn.Module's attribute, which would make it a submodule
        self._norms: Tensor | None = None
        self._density: tuple[tuple[int, int], float] | None = None  # of the ids that it was counted from
        self.reset_parameters()

    @classmethod
    def from_dense(
        cls, weight: Tensor, ids: Tensor, block_shape: tuple[int, int] = (1, 64), bias: Tensor | None = None
    ) -> "BlockSparseLinear":
        """Make a layer from blocks of a matrix.

        Args:
            weight: (out_features, in_features); gives device and dtype. Copied.
            ids: As in the constructor.
            block_shape: (block rows, block cols).
            bias: (out_features,) or None. Copied.

        Returns:
            A layer whose ``values`` and ``bias`` train.
        """
        rows, cols = weight.shape
        layer = cls(cols, rows, ids, block_shape, bias is not None, device="meta", dtype=weight.dtype)
        layer.to_empty(device=weight.device)
        with torch.no_grad():
            layer.ids.copy_(ids)
            layer.birth.zero_()
            layer.ever_active.copy_(_bits(ids, layer.grid))
            layer.values.copy_(pack(weight, layer.ids, layer.grid))
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        return layer

    def reset_parameters(self) -> None:
        """Draw values and bias uniformly from ±1/√in_features, as nn.Linear does; padding is zero."""
        bound = self.in_features**-0.5
        with torch.no_grad():
            nn.init.uniform_(self.values, -bound, bound)
            self.values.copy_(pack(unpack(self.values, self.ids, self.grid), self.ids, self.grid))
            if self.bias is not None:
                nn.init.uniform_(self.bias, -bound, bound)

    @property
    def grid(self) -> BlockGrid:
        """The block grid of the weight."""
        return BlockGrid(self.out_features, self.in_features, *self.block_shape)

    @property
    def weight(self) -> Tensor:
        """The dense matrix (out_features, in_features), made anew at each access; writing to it changes nothing.

        Gradients flow through it, for code that computes with the weight of a layer instead of calling the layer. That
        code then keeps the dense matrix for its backward pass.
        """
        return unpack(self.values, self.ids, self.grid)

    @property
    def density(self) -> float:
        """Share of the matrix's entries that lie in active blocks; waits for the device if ``ids`` have changed."""
        seen = (id(self.ids), self.ids._version)
        if self._density is None or self._density[0] != seen:
            self._density = seen, int(real_entries(self.ids.long(), self.grid).sum()) / self.grid.entries
        return self._density[1]

    @property
    def record_block_norms(self) -> bool:
        """Whether backward passes add the squared block norms of the dense gradient to :attr:`block_norms`.

        Set to True it starts from zero, and to False it forgets them. A number for each block of the grid is needed
        while it is on; it is not part of the state_dict.
        """
        return self._norms is not None

    @record_block_norms.setter
    def record_block_norms(self, on: bool) -> None:
        # As the gradient of an input that nothing else reads, the norms are summed over micro-batches by autograd
        # itself, compiled or not, and activation checkpointing does not count a layer twice.
        self._norms = None
        if on:
            device = self.values.device
            self._norms = torch.zeros(self.grid.blocks, dtype=torch.float32, device=device, requires_grad=True)

    @property
    def block_norms(self) -> Tensor | None:
        """Squared norms of the blocks of dL/dW, summed over backward passes: float32 (blocks,), or None if none."""
        return None if self._norms is None else self._norms.grad

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in_features) to (..., out_features).

        Raises:
            ValueError: The last axis of ``x`` is not ``in_features``.
            TypeError: ``x`` has another dtype than ``values``, outside autocast.
        """
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"expected an input of shape (..., {self.in_features}), got {tuple(x.shape)}")
        kind = x.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        if autocast and torch.float64 not in (x.dtype, self.values.dtype):
            x = x.to(torch.get_autocast_dtype(kind))  # values are cast inside the operator, so that no copy is saved
        elif x.dtype != self.values.dtype:
            raise TypeError(f"expected an input of the layer's dtype, {self.values.dtype}, got {x.dtype}")
        out: Tensor = _linear(x, self.values, self.ids, self.bias, self._norms, self.out_features, self.in_features)
        return out

    def extra_repr(self) -> str:
        """Sizes and blocks, for printing."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_shape={self.block_shape}, active={self.ids.shape[0]} of {self.grid.blocks}"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> "BlockSparseLinear":
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._norms is not None and self._norms.device != self.values.device:
            self.record_block_norms = True
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        error_msgs: list[str] = args[-1]
        for name in ("ids", "birth", "ever_active"):
            loaded = state_dict.get(prefix + name)
            if loaded is None:
                continue
            problem = f"they are {loaded.dtype}, no longer exact integers" if loaded.is_floating_point() else None
            if name == "ids" and loaded.shape == self.ids.shape:
                problem = problem or _wrong_ids(loaded, self.grid, empty=True)
            if problem:
                error_msgs.append(f"cannot load '{prefix}{name}': {problem}.")
                return
            # its own dtype also where load_state_dict(assign=True) takes the tensor as it is
            state_dict[prefix + name] = loaded.to(getattr(self, name).dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _bits(ids: Tensor, grid: BlockGrid) -> Tensor:
    """A bit for each block, set for those of ``ids``."""
    bits = torch.zeros(-(-grid.blocks // 8), dtype=torch.uint8, device=ids.device)
    if not ids.is_meta:
        mark(bits, ids, grid)
    return bits


def _wrong_ids(ids: Tensor, grid: BlockGrid, empty: bool) -> str | None:
    """What is wrong with ids, in words; None if nothing is, or if they are on the meta device."""
    if ids.ndim != 1 or ids.shape[0] == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        return f"ids must be a vector of at least one integer, got {tuple(ids.shape)} of {ids.dtype}"
    if ids.is_meta:
        return None
    if int(ids.min()) < 0 or int(ids.max()) >= grid.blocks + empty:
        return f"ids must be from 0 to {grid.blocks - 1}, got {int(ids.min())} to {int(ids.max())}"
    if bool((ids[ids < grid.blocks].sort().values.diff() == 0).any()):
        return "ids name a block twice"
    return None
