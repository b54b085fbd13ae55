"""From a dense model to a block-sparse one, and back."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pumice.errors import UserError, nearest
from pumice.sparse.distribution import Distribution, active_blocks, check_density, matching
from pumice.sparse.layout import BlockGrid, as_matrix, blank, grid_norms, real_entries, unpack
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.selection import largest, random_scores
from pumice.sparse.sharding import gathered

Keep = Literal["magnitude", "random"]


class _Dense(NamedTuple):
    """A linear layer to convert."""

    name: str
    module: nn.Module

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as [in, out], as transformers' Conv1D does."""
        return not isinstance(self.module, nn.Linear)

    @property
    def weight(self) -> Tensor:
        """The matrix [out, in]."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.detach().t() if self.transposed else weight.detach()


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float,
    block_shape: tuple[int, int] = (1, 64),
    distribution: Distribution = "uniform",
    targets: str | Sequence[str] | None = None,
    seed: int = 0,
    keep: Keep = "magnitude",
    rescale: bool = False,
) -> nn.Module:
    """Replace linear layers by block-sparse ones, in place.

    Do it before the optimizer is built and before the model is wrapped (DistributedDataParallel, FSDP2, PEFT). To load
    the state_dict of a sparse model, sparsify a model with the same density, blocks and targets and load it: the active
    blocks come from the state_dict.

    Args:
        model: A model of plain PyTorch or transformers, dense. On the meta device, random blocks are chosen.
        density: Share of the entries that stay active, in (0, 1].
        block_shape: (block rows, block cols): (1, 1) single entries, (1, B) runs along a row, (b, b) tiles.
        distribution: ``"uniform"``, ``"erk"`` (Erdős–Rényi kernel), or a mapping of regular expression to density for
            layers that need their own. See :func:`pumice.sparse.distribution.active_blocks` for the exact counts.
        targets: Regular expressions, searched for in the names of linear layers, that choose the layers. Default: every
            nn.Linear, and every transformers Conv1D, but the output head: what a (sub)model returns from
            ``get_output_embeddings()``, a layer tied to an nn.Embedding, and the model's last nn.Linear if it has as
            many outputs as the first nn.Embedding has rows.
        seed: Of random choices, which depend on (seed, name of the layer) alone.
        keep: Which blocks stay: ``"magnitude"``: those with the largest mean |w|, for a trained model; ``"random"``.
        rescale: For training from scratch: multiply what stays in each layer by √(‖W‖² / ‖what stays‖²), so that its
            outputs have the variance they had. For random blocks this is about density^(−1/2).

    Returns:
        The model itself, or the new layer if ``model`` is a linear layer. A frozen weight or bias stays frozen.

    Raises:
        UserError: A setting is out of range, matches no layer or does not fit a layer; or a layer cannot be converted:
            the model is sparse already, the weight is shared, quantised, sharded, computed from other parameters, or
            wrapped by an adapter. The model is then unchanged.
    """
    check_density(density, "density")
    if keep not in ("magnitude", "random"):
        raise UserError(f"unknown keep '{keep}'; {nearest(str(keep), ('magnitude', 'random'))}")
    if not (isinstance(block_shape, Sequence) and len(block_shape) == 2):
        raise UserError(f"block_shape must be (rows, columns) of a block, got {block_shape}")
    chosen = _chosen(model, [targets] if isinstance(targets, str) else targets)
    grids = {}
    for layer in chosen:
        rows, cols = layer.weight.shape
        try:
            grids[layer.name] = BlockGrid(rows, cols, block_shape[0], block_shape[1])
        except UserError as error:
            raise UserError(f"cannot sparsify '{layer.name}': {error}") from error
    counts = active_blocks(grids, density, distribution)

    for layer in chosen:
        grid, count = grids[layer.name], counts[layer.name]
        if keep == "magnitude" and not layer.weight.is_meta:
            scores = _magnitudes(layer.weight, grid)
        else:
            scores = random_scores(grid.blocks, seed, layer.name, update=0)
        model = _replace(model, layer.name, _sparse(layer, largest(scores, count), grid, rescale))
    return model


@torch.no_grad()
def densify(model: nn.Module) -> nn.Module:
    """Replace block-sparse layers by the dense layers that they came from, in place; inactive weights are exactly zero.

    Args:
        model: A model that :func:`sparsify` has returned. If it is sharded (FSDP2), every rank gets the whole matrices,
            for saving; it must not be trained any more.

    Returns:
        The model itself, or the new layer if ``model`` is a block-sparse layer. Frozen parameters stay frozen.

    Raises:
        UserError: The model has no block-sparse layer.
    """
    sparse = {name: module for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)}
    if not sparse:
        raise UserError("the model has no block-sparse layer to densify; call sparsify first")
    for name, layer in sparse.items():
        dense = _skeleton(layer.origin or nn.Linear(layer.in_features, layer.out_features, device="meta"))
        weight = unpack(gathered(layer.values.detach()), layer.ids, layer.grid)
        weight = weight if isinstance(dense, nn.Linear) else weight.t()
        dense.weight = nn.Parameter(weight.contiguous(), requires_grad=layer.values.requires_grad)
        bias = layer.bias
        if isinstance(bias, DTensor):
            bias = nn.Parameter(gathered(bias.detach()), requires_grad=bias.requires_grad)
        dense.register_parameter("bias", bias)
        model = _replace(model, name, dense.train(layer.training))
    return model


# --- which layers ----------------------------------------------------------------------------------------------------


def _chosen(model: nn.Module, targets: Sequence[str] | None) -> list[_Dense]:
    for name, module in model.named_modules():
        if isinstance(module, BlockSparseLinear):
            raise UserError(f"the model is sparse already ('{name}' is block-sparse); call densify first")
    layers = {name: _Dense(name, module) for name, module in model.named_modules() if _is_linear(module)}
    heads = set(_output_heads(model))
    names = [name for name, layer in layers.items() if layer.module not in heads]
    if targets is not None:
        matched = {name for expression in targets for name in matching(expression, layers)}
        names = [name for name in layers if name in matched]
    _refuse_unseen(model, names, targets is None)
    if not names:
        raise UserError("the model has no linear layer to sparsify besides its output head; name layers in targets")
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append(path)
    for name in names:
        if reason := _unfit(layers[name].module, users):
            raise UserError(f"cannot sparsify '{name}': {reason}")
    return [layers[name] for name in names]


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    weight = module._parameters.get("weight")  # transformers' Conv1D, known by its attributes
    return weight is not None and tuple(weight.shape) == (getattr(module, "nx", None), getattr(module, "nf", None))


def _output_heads(model: nn.Module) -> Iterator[nn.Module]:
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if embeddings and linears and linears[-1].out_features == embeddings[0].num_embeddings:
        yield linears[-1]
    yield from (linear for linear in linears if any(linear.weight is table.weight for table in embeddings))
    for module in modules:
        if callable(get := getattr(module, "get_output_embeddings", None)):
            try:
                head = get()
            except (NotImplementedError, AttributeError):  # transformers: a (sub)model without one
                continue
            if isinstance(head, nn.Module):
                yield head


def _refuse_unseen(model: nn.Module, names: Sequence[str], every: bool) -> None:
    """Refuse adapters around chosen layers, and quantised layers, which are no nn.Linear, if every layer is meant."""
    for path, module in model.named_modules():
        inside = [name for name in names if name.startswith(path + ".")]
        if inside and isinstance(getattr(module, "base_layer", None), nn.Module):
            raise UserError(
                f"cannot sparsify '{inside[0]}': '{path}' is an adapter ({type(module).__name__}) around a layer; "
                "merge or remove the adapters first"
            )
        sized = isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")
        weight = module._parameters.get("weight")
        if every and sized and not isinstance(module, nn.Linear) and (weight is None or not weight.is_floating_point()):
            raise UserError(
                f"cannot sparsify '{path}': {type(module).__name__} has no floating-point weight of its own (quantised "
                "or custom); load the model unquantised, or choose other layers with targets"
            )


def _unfit(module: nn.Module, users: dict[int, list[str]]) -> str | None:
    """Why a linear layer cannot be converted; None if it can."""
    kind, weight = type(module).__name__, module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters (a parametrization); remove that first"
    if len(sharing := users[id(weight)]) > 1:
        return f"its weight is shared by {' and '.join(repr(name) for name in sharing)}; exclude them with targets"
    if not weight.is_floating_point() or type(weight.data) is not Tensor or weight.ndim != 2:
        return (
            f"its weight is {type(weight.data).__name__} of {weight.dtype} and shape {tuple(weight.shape)} (quantised "
            "or sharded), not a plain floating-point matrix; sparsify before quantising or sharding"
        )
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"{kind} computes more than a linear layer; exclude it with targets"
    return None


# --- one layer -------------------------------------------------------------------------------------------------------


def _magnitudes(weight: Tensor, grid: BlockGrid) -> Tensor:
    """Mean |w| of every block over its real entries: float32, (blocks,)."""
    buffer = blank(grid, weight.dtype, weight.device)
    as_matrix(buffer, grid).copy_(weight)
    ids = torch.arange(grid.blocks, dtype=torch.int32, device=weight.device)
    return grid_norms(buffer, grid, 1).div_(real_entries(ids, grid))


def _sparse(layer: _Dense, ids: Tensor, grid: BlockGrid, rescale: bool) -> BlockSparseLinear:
    old = layer.module
    block_shape = (grid.block_rows, grid.block_cols)
    new = BlockSparseLinear.from_dense(layer.weight, ids, block_shape, old._parameters.get("bias"))
    if rescale and not layer.weight.is_meta:
        kept, whole = (torch.linalg.vector_norm(w, dtype=torch.float64) for w in (new.values, layer.weight))
        new.values.mul_((whole / kept).nan_to_num(nan=1.0, posinf=1.0).to(new.values.dtype))
    new.__dict__["origin"] = _skeleton(old)
    for mine, theirs in ((new.values, "weight"), (new.bias, "bias")):
        if mine is not None and (given := old._parameters[theirs]) is not None:
            mine.requires_grad_(given.requires_grad)
    return new.train(old.training)


def _skeleton(layer: nn.Module) -> nn.Module:
    """A copy of a layer without its parameters: its class, its attributes and hooks."""
    skeleton = copy(layer)
    skeleton._parameters = dict.fromkeys(layer._parameters)
    return skeleton


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
    return model
