"""A backward in two halves: gradients of inputs at once, those of weights when the schedule says.

This is the split of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR
2024, section 2). The input half runs autograd up to the stage's input, without accumulating
anything. Megatron's own linear layers are asked, by the switch that Megatron has for its deferred
embedding gradients, to leave their weight gradient out; what it takes is stored. An embedding has
no input to give a gradient to, so autograd stops before it. The weight half computes what was
stored through the same code of Megatron's, and hands every gradient to autograd's accumulation:
hooks of data-parallel buckets run then, once per parameter, as they do after a whole backward.

Layers of TransformerEngine store their weight gradients by themselves, where the model was
built with `delay_wgrad_compute`; their `backward_dw` belongs to the weight half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import layers
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.limits import EMBEDDINGS, delays

_LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication
_ENGINE = torch.autograd.Variable._execution_engine
_TOGETHER = 16 * 2**20  # bytes of gradients for one call: it costs, and so does keeping them


class _Linear(NamedTuple):
    """A _Linear describes a weight gradient that is still to be computed."""

    context: Any
    output_gradient: torch.Tensor


@dataclass
class WeightGradStore:
    """A store keeps what the input half of one microbatch leaves to its weight half."""

    linears: dict[int, list[_Linear]] = field(default_factory=dict)  # by the weight's address
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by the parameter's address
    edges: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)  # and gradient

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that are kept, for the count of bytes."""
        for linears in self.linears.values():
            for linear in linears:
                yield linear.context.saved_tensors[0]
                yield linear.output_gradient
        yield from self.gradients.values()
        for _, gradient in self.edges:
            yield gradient


def _like(context: Any, **changed: Any) -> Any:
    """Copy a `context` for Megatron's backward without its hold on the graph, and set `changed`."""
    return SimpleNamespace(**{**vars(context), **changed})


class SplitBackward:
    """A SplitBackward runs backwards of one `model` chunk in halves.

    `order`: that of `filling_order`. Replicas whose last backward is whole start to reduce their
    data-parallel buckets in that order.
    """

    def __init__(self, model: torch.nn.Module, order: Collection[torch.nn.Parameter] = ()) -> None:
        place = {parameter: i for i, parameter in enumerate(order)}
        backwards = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self._parameters = sorted(backwards, key=lambda p: place.get(p, len(place)))
        self._has_checkpoints = False  # that some forward has run, see `whole`
        self._delaying = [m for m in model.modules() if delays(m)]
        self._embedded: list[GradientEdge] = []
        self._embeddings = [m for m in model.modules() if isinstance(m, EMBEDDINGS)]
        held_back = {id(m.weight) for m in self._embeddings}
        self._tables = tuple(p for p in self._parameters if id(p) in held_back)
        self._others = tuple(p for p in self._parameters if id(p) not in held_back)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record, while forwards run, where embeddings are in graphs, and torch's checkpoints."""
        hooks = [m.register_forward_hook(self._record) for m in self._embeddings]
        original = CheckpointFunction.forward

        def forward(*args: Any) -> Any:
            self._has_checkpoints = True
            return original(*args)

        try:
            with patch("user-checkpoints", forward=forward):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._embedded = []

    def embedded(self) -> list[GradientEdge]:
        """Return the edges where autograd is to stop, for the microbatch whose forward has run."""
        edges, self._embedded = self._embedded, []
        return edges

    def whole(self, output: torch.Tensor) -> bool:
        """Return whether a microbatch with this `output` can only run a whole backward.

        That is so with reentrant checkpoints of a user's own (torch.utils.checkpoint), which run a
        backward of their own without halves. The graph is searched only where one has run.
        """
        return self._has_checkpoints and _checkpoints(output)

    def backward_input(
        self,
        received: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        embedded: Sequence[GradientEdge],
    ) -> tuple[torch.Tensor | None, WeightGradStore]:
        """Compute the gradient of `received`, the stage's input, and what the weight half needs.

        `output` may have been freed by Megatron's deallocation; `gradient` is its gradient, None
        means ones; `embedded`: what `embedded()` returned after the forward.
        """
        store = WeightGradStore()
        first: list[Any] = [] if received is None else [received]
        wanted = (*first, *embedded, *self._others)
        with _storing_into(store):
            found = list(_run_backward(output, gradient, wanted))
        result = found.pop(0) if first else None
        for edge in embedded:
            through = found.pop(0)
            if through is not None:
                store.edges.append((edge, through))
        for parameter, grad in zip(self._others, found, strict=True):
            if grad is not None:
                store.gradients[parameter.data_ptr()] = grad
        return result, store

    def backward_weight(self, store: WeightGradStore, together: bool) -> None:
        """Compute what `store` has, once; accumulate every parameter's gradient.

        `together`: small ones in one call of autograd's engine, which chooses their order. Where
        buckets are reduced the order has to be the same on all replicas: one after the other.
        """
        batch, held = _TOGETHER if together else 0, 0
        tables: dict[int, torch.Tensor] = {}
        for edge, gradient in store.edges:
            found = _run_backward(edge, gradient, self._tables)
            for parameter, grad in zip(self._tables, found, strict=True):
                if grad is not None:
                    tables[id(parameter)] = grad
        ready: dict[torch.nn.Parameter, torch.Tensor] = {}
        for parameter in self._parameters:
            address = parameter.data_ptr()
            grad = tables.pop(id(parameter), None)
            if grad is None:
                grad = store.gradients.pop(address, None)
            for linear in store.linears.pop(address, ()):
                more = _weight_gradient(linear, parameter)
                grad = more if grad is None else grad + more
            if grad is not None:
                ready[parameter] = grad
                held += grad.nbytes
            if held >= batch:
                _accumulate(ready)
                held = 0
        _accumulate(ready)
        self.backward_dw()

    def backward_dw(self) -> None:
        """Compute the weight gradients that TransformerEngine has stored, of one backward."""
        for module in self._delaying:
            module.backward_dw()

    def _record(self, module: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            self._embedded.append(get_gradient_edge(output))


@contextlib.contextmanager
def filling_order(models: Sequence[torch.nn.Module]) -> Iterator[dict[torch.nn.Parameter, None]]:
    """Record the order in which whole backwards complete the gradients of `models`.

    Autograd goes by when forwards used a weight, not by when a model's constructor made it.
    """
    order: dict[torch.nn.Parameter, None] = {}

    def filled(parameter: torch.nn.Parameter) -> None:
        order.pop(parameter, None)
        order[parameter] = None

    hooks = [
        p.register_post_accumulate_grad_hook(filled)
        for model in models for p in model.parameters() if p.requires_grad
    ]  # fmt: skip
    try:
        yield order
    finally:
        for hook in hooks:
            hook.remove()


def _checkpoints(output: torch.Tensor) -> bool:
    """Return whether the graph of an `output` has a node of torch's reentrant checkpoints."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        nodes += [more for more, _ in node.next_functions]
    return False


def _run_backward(
    root: Any, gradient: torch.Tensor | None, inputs: Sequence[Any]
) -> Sequence[torch.Tensor | None]:
    """Run autograd's engine itself: the output's shape is gone once Megatron has freed it."""
    if gradient is None:
        gradient = torch.ones_like(root, memory_format=torch.preserve_format)
    if not inputs:
        return ()
    found: Sequence[torch.Tensor | None] = _ENGINE.run_backward(
        (root,), (gradient,), False, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=False,
    )  # fmt: skip
    return found


def _accumulate(ready: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    """Hand gradients to autograd's accumulation, and forget them."""
    if ready:
        _ENGINE.run_backward(
            tuple(ready), tuple(ready.values()), False, False, (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
    ready.clear()


@contextlib.contextmanager
def _storing_into(store: WeightGradStore) -> Iterator[None]:
    """Make Megatron's linears leave their weight gradients to `store`, in a `with`: the seam."""
    original = _LINEAR.backward

    def backward(context: Any, output_gradient: torch.Tensor) -> Any:
        received, weight = context.saved_tensors
        if context.grad_output_buffer is not None or not context.needs_input_grad[1]:
            return original(context, output_gradient)  # Megatron defers it, or there is none
        half = _like(
            context,
            saved_tensors=(received, weight.detach()),
            main_grad=None,
            use_bias=False,
            gradient_accumulation_fusion=True,  # only with it does Megatron defer, ...
            grad_output_buffer=[],  # ... into this list, ...
            wgrad_deferral_limit=0,  # ... without end
        )
        found = list(original(half, output_gradient))
        if context.use_bias:
            flat, _ = layers.prepare_input_tensors_for_wgrad_compute(output_gradient, received)
            found[2] = flat.sum(dim=0)
        kept = _like(context, saved_tensors=(received.detach(), weight))
        queue = store.linears.setdefault(weight.data_ptr(), [])
        queue.append(_Linear(kept, output_gradient))
        return tuple(found)

    with patch("weight-gradients", backward=backward):
        yield


def _weight_gradient(linear: _Linear, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Compute the weight's gradient by Megatron's own backward.

    It gets a weight without columns, so that the gradient of the input costs nothing this time.
    """
    context = linear.context
    received, weight = context.saved_tensors
    if context.sequence_parallel:
        size = [received.shape[0] * context.tp_group.size(), *received.shape[1:]]
        total = torch.empty(size, dtype=received.dtype, device=received.device)
        with torch.no_grad():
            layers.dist_all_gather_func(total, received, group=context.tp_group)
        received = total
    narrow = weight.detach()[:, :0]
    rest = _like(
        context,
        saved_tensors=(received, narrow),
        use_bias=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        grad_output_buffer=None,
    )
    with torch.no_grad():
        _, grad, *_ = _LINEAR.backward(rest, linear.output_gradient)
    if grad is None:  # a fused kernel has added it to main_grad; the hooks have to run still
        parameter.grad_added_to_main_grad = True
        new = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
        grad = new(parameter.shape, dtype=received.dtype, device=received.device)
    assert isinstance(grad, torch.Tensor)
    return grad
