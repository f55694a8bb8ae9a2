"""``KeptTensors``: counts the bytes of tensors that autograd keeps for a backward."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class KeptTensors:
    """Collects tensors that a backward keeps, each storage once; tensors given to ``leave_out`` count elsewhere."""

    def __init__(self) -> None:
        self._tensors: dict[StorageWeakRef, Tensor] = {}
        self._left_out: dict[StorageWeakRef, Tensor] = {}

    def add(self, *tensors: Tensor) -> None:
        """Count these tensors."""
        self._tensors |= {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors}

    def leave_out(self, *tensors: Tensor) -> None:
        """Do not count these tensors, even if they are added."""
        self._left_out |= {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors}

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which everything that autograd saves is added."""

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def size(self) -> int:
        """Return the number of bytes that the tensors take."""
        return sum(
            tensor.untyped_storage().nbytes() for key, tensor in self._tensors.items() if key not in self._left_out
        )
