"""What an optimizer step changes, kept so that the step can be undone to the last bit.

The inverse of a step is not exact in floating point, so the values from before it are copied. The
gradients are not: they stay where they are until the verdict on the step is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_adaptra.adapter.replace import put


class OptimizerCopy:
    """Of one Megatron optimizer, chained ones included: parameters, their state, loss scale.

    Costs the memory of the parameters that are stepped and of their state; the buffers are reused.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizers = [o for o in leaves(optimizer) if not getattr(o, "is_stub_optimizer", 0)]
        self._whole = optimizer
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._scalars: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._gradients: list[tuple[Any, Any]] = []
        self._scales: list[Any] = []

    def take(self) -> None:
        """Copy everything. Gradients are looked at later: `hold_gradients`."""
        tensors: list[torch.Tensor] = []
        self._scalars = []
        for inner in self._inner():
            for group in inner.param_groups:
                plain = {k: v for k, v in group.items() if k != "params"}
                self._scalars.append((group, plain))
                for parameter in group["params"]:
                    state = inner.state.get(parameter, {})
                    tensors += [parameter.data, *(v for v in state.values() if _is_tensor(v))]
                    plain = {k: v for k, v in state.items() if not _is_tensor(v)}
                    self._scalars.append((state, plain))
        if [_shape(t) for t in tensors] != [_shape(t) for t in self._copies]:
            self._copies = [torch.empty_like(t) for t in tensors]
        self._tensors = tensors
        with torch.no_grad():
            torch._foreach_copy_(self._copies, tensors)

    def take_scales(self) -> None:
        """Copy the state of the loss scale, which is small."""
        self._scales = [s.state_dict() for s in self._scalers()]

    def hold_gradients(self) -> None:
        """Keep what the step has used, though Megatron lets go of it before the next iteration."""
        parameters = [p for o in self._inner() for g in o.param_groups for p in g["params"]]
        self._gradients = [(p, p.grad) for p in parameters]

    def let_go(self) -> None:
        self._gradients = []

    def restore(self) -> None:
        """As it was when the copy was taken, less the loss scale; gradients are back."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._copies)
        for mapping, plain in self._scalars:
            mapping.update(plain)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def overflow(self) -> None:
        """The loss scale hears of an overflow, instead of none."""
        for scaler, scale in zip(self._scalers(), self._scales, strict=True):
            scaler.load_state_dict(scale)
            scaler.update(True)

    def skip(self) -> None:
        """Undo the step: an overflow means that there is none."""
        self.restore()
        self.overflow()
        with contextlib.ExitStack() as stack:  # copies main parameters back into the model's
            for inner in self._inner():
                stack.callback(put(inner, "step", lambda *_, **__: None))
            self._whole.step_with_ready_grads()

    def step_again(self, step: Any) -> Any:
        """Megatron's own step, from gradients that have been made ready before.

        Learning rates that a scheduler has set since are left as they are.
        """
        now = [(g, g["lr"], g.get("weight_decay")) for o in self._inner() for g in o.param_groups]
        self.restore()
        with contextlib.ExitStack() as stack:
            for optimizer in {id(o): o for o in (self._whole, *self.optimizers)}.values():
                stack.callback(put(optimizer, "prepare_grads", lambda: False))
            result = step()
        for group, rate, decay in now:
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay
        return result

    def _inner(self) -> Iterator[Any]:
        """torch's optimizers."""
        return (optimizer.optimizer for optimizer in self.optimizers)

    def _scalers(self) -> list[Any]:
        found = [getattr(o, "grad_scaler", None) for o in self.optimizers]
        return list({id(s): s for s in found if s is not None}.values())


def leaves(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
