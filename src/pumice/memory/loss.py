"""Cross-entropy of a linear head without the logits of all tokens at once.

Logits of 2,048 tokens over 128,256 words take 0.5 GiB in bfloat16, and their loss several times as much in float32.
Here a chunk of tokens has its logits at a time, once in the forward and once more in the backward pass, where their
gradients are added into one buffer. It is plain PyTorch and runs on any device and version: torch's own
``linear_cross_entropy`` came with 2.13, and Liger's kernels need Triton.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pumice.errors import UserError

IGNORED = -100  # label of tokens that do not count


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses; saves inputs and one number a token."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        log_sums = torch.empty_like(labels, dtype=total.dtype)
        for part in _slices(len(labels), chunk):
            logits = _logits(hidden[part], weight, bias)
            torch.logsumexp(logits, -1, out=log_sums[part])
            counted, targets = _targets(labels[part])
            chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            total += torch.where(counted, log_sums[part] - chosen, 0.0).sum()
            del logits
        ctx.save_for_backward(hidden, weight, bias, labels, log_sums)
        ctx.chunk = chunk
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        several = len(labels) > ctx.chunk
        grad_weight = torch.zeros_like(weight) if need_weight and several else None
        grad_bias = torch.zeros_like(bias, dtype=log_sums.dtype) if bias is not None and need_bias else None
        for part in _slices(len(labels), ctx.chunk):
            d = _logits(hidden[part], weight, bias).sub_(log_sums[part].unsqueeze(-1)).exp_()
            counted, targets = _targets(labels[part])
            d.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(targets, -1, dtype=d.dtype).unsqueeze(-1))
            d *= (counted * grads[0]).unsqueeze(-1)
            if grad_bias is not None:
                grad_bias += d.sum(0)
            d = d.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(d, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(d.t(), hidden[part])
            elif need_weight:
                grad_weight = d.t() @ hidden
            del d
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, chunk: int = 1024
) -> Tensor:
    """Return the sum over tokens of the cross-entropy of ``hidden @ weight.T + bias``.

    Args:
        hidden: (tokens, features), any floating dtype.
        weight: (words, features), of the same dtype.
        labels: int64 (tokens,): words, or -100 for a token that does not count.
        bias: (words,) or None.
        chunk: Tokens whose logits exist at a time, at least 1.

    Returns:
        A scalar, float32 at least, equal to ``cross_entropy(logits.float(), labels, reduction="sum")`` to rounding. It
        can be differentiated once.

    Raises:
        ValueError: ``chunk`` is less than 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    return cast(Tensor, _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk))  # type: ignore[no-untyped-call]


def _slices(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    counted = labels != IGNORED
    return counted, torch.where(counted, labels, 0)


def use_chunked_loss(model: nn.Module, chunk: int = 1024, *, check: bool = True) -> None:
    """Make a causal language model of transformers compute its training loss in chunks.

    In training mode, with ``labels``, the model returns ``loss`` and no logits; otherwise it is as before. The loss of
    a few tokens is compared with the model's own, so a model that does more between its last layer and its loss
    (scaled or capped logits, a loss of its routers) is refused.

    Args:
        model: Has a base model and ``get_output_embeddings``; changed in place. On the meta device nothing is
            compared.
        chunk: Tokens whose logits exist at a time, at least 1.
        check: Whether to compare losses.

    Raises:
        UserError: The model has no such parts, or another loss.
    """
    if chunk < 1:
        raise UserError(f"the chunk of the loss must be at least 1 token, got {chunk}")
    plain = model.forward
    find = cast("Callable[[], Any] | None", getattr(model, "get_output_embeddings", None))
    head = find() if find is not None else None
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if not isinstance(head, nn.Linear) or not isinstance(base, nn.Module) or not hasattr(model, "loss_function"):
        raise UserError(f"{type(model).__name__} has no linear output head whose loss could be computed in chunks")

    @functools.wraps(plain)  # Trainer reads the signature
    def forward(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None or not model.training:
            return plain(*args, labels=labels, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        return LossOutput(loss=_loss(base(*args, **kwargs)[0], head, labels, count, chunk))

    if check and not any(parameter.is_meta for parameter in model.parameters()):
        _compare(model, base, head, chunk)
    model.forward = forward


class LossOutput(dict[str, Tensor]):
    """What a model with a chunked loss returns in training: a mapping and an object with ``loss`` alone."""

    @property
    def loss(self) -> Tensor:
        """The mean loss of the tokens that count."""
        return self["loss"]


def _loss(hidden: Tensor, head: nn.Linear, labels: Tensor, count: Any, chunk: int) -> Tensor:
    """Return the loss of predicting each next label from hidden states (batch, tokens, features)."""
    following = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten().to(hidden.device)
    total = chunked_cross_entropy(hidden.flatten(0, -2), head.weight, following, head.bias, chunk=chunk)
    return total / ((following != IGNORED).sum() if count is None else count)


@torch.no_grad()
def _compare(model: nn.Module, base: nn.Module, head: nn.Linear, chunk: int) -> None:
    """Raise ``UserError`` if the loss of a few tokens is not the model's own."""
    training = {module: module.training for module in model.modules()}
    model.eval()  # without dropout
    try:
        ids = torch.arange(8, device=head.weight.device).unsqueeze(0) % head.weight.shape[0]
        theirs = float(model(input_ids=ids, labels=ids).loss)
        ours = float(_loss(base(input_ids=ids)[0], head, ids, None, chunk))
    finally:
        for module, flag in training.items():
            module.training = flag
    if abs(ours - theirs) > 0.01 * max(1.0, abs(theirs)):
        raise UserError(
            f"the loss of {type(model).__name__} is {theirs:.4f} where that of its output head is {ours:.4f}: it does "
            "more than a cross-entropy, so it cannot be computed in chunks"
        )
