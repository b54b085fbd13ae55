"""Bytes of tensors as they come and go: a dispatch mode that sees every storage and, by a weak reference, its end."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "logits", "transient")


@dataclass(frozen=True)
class Event:
    """Bytes that come (positive) or go.

    Attributes:
        category: One of ``CATEGORIES``.
        size: Bytes.
        becomes: The category to which ``size`` bytes of ``category`` belong from here on; None: they come or go.
        name: Of the parameter, where its gradient becomes whole.
    """

    category: str
    size: int
    becomes: str | None = None
    name: str = ""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of the storages that operators make, and of their ends.

    Args:
        tell: Called for each event.
        category: Called for each new storage: what it is.
    """

    def __init__(self, tell: Callable[[Event], None], category: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell, self._category = tell, category
        self._live: dict[int, tuple[str, int, weakref.ref[Any]]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile compile below it: optimizers may be compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.see(tensor, self._category())
        return result

    def see(self, tensor: Tensor, category: str) -> None:
        """Count the storage of a tensor, unless it is known already."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._live and (size := storage.nbytes()):
                self._live[key] = (category, size, weakref.ref(storage, partial(self._end, key)))
                self._tell(Event(category, size))

    def move(self, tensor: Tensor, becomes: str, name: str = "") -> None:
        """Count the storage of a tensor to another category from here on."""
        self.see(tensor, becomes)
        for part in _parts(tensor):
            key = part.untyped_storage()._cdata
            if key in self._live:
                category, size, reference = self._live[key]
                self._live[key] = (becomes, size, reference)
                self._tell(Event(category, size, becomes, name))

    def _end(self, key: int, _: Any) -> None:
        category, size, _ = self._live.pop(key)
        self._tell(Event(category, -size))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a subclass wraps (quantised state, shards), or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor]
