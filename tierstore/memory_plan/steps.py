"""Real steps of the user's, measured, that leave no trace: gradients, buffers, modes and generators are put back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError, ConfigTypeError
from ..hooks.in_place import Around, around_calls_of, call_plainly, put_around_calls
from ..tensors.torch_names import tree_leaves
from .block_state import GENERATORS, OF_TORCH, copied, devices_of, remembered
from .call_tree import Through
from .meter import Meter


class MeasuredStep(NamedTuple):
    """Seconds of a forward and backward, the most memory in use, and how much was returned to the system meanwhile."""

    seconds: float
    peak_bytes: int
    returned_bytes: int = 0


class Steps:
    """Takes steps of `run` and backward; `num_taken`: how many. Raises ConfigError: something is called after each
    gradient of a parameter, such as an optimizer."""

    def __init__(self, model: nn.Module, run: Callable[[], torch.Tensor], meter: Meter) -> None:
        for name, parameter in model.named_parameters():
            _refuse_hooks("model", name, parameter)
        self._model, self._run, self._meter = model, run, meter
        self.num_taken = 0
        self._put_back = [_put_back_of(member) for member in model.modules()]

    def take(
        self,
        around: Mapping[str, Around],
        *,
        scope: AbstractContextManager[Any] | None = None,
        has_backward: bool = True,
    ) -> MeasuredStep:
        """Take a step, with the calls of modules through `around` and forward inside `scope`, and measure it. Raises
        ConfigError: `run` computes no loss; or something is called after each gradient of a leaf that it reaches."""
        with self._left_as_found() as take_gradients, with_calls(self._model, around):
            self.num_taken += 1
            self._meter.reset()
            began = time.perf_counter()
            with scope or nullcontext():
                loss = _loss_of(self._run())
            if has_backward:
                looked = time.perf_counter()
                take_gradients(_leaves_of(loss))
                began += time.perf_counter() - looked
                loss.backward()  # type: ignore[no-untyped-call]
            peak_bytes = self._meter.peak()  # waits for the device
            return MeasuredStep(time.perf_counter() - began, peak_bytes)

    @contextmanager
    def _left_as_found(self) -> Iterator[Callable[[Iterable[torch.Tensor]], None]]:
        """Gives what takes away gradients, of the model's parameters already, until all is put back."""
        own = [value for member in self._model.modules() for value in vars(member).values()]
        restore = remembered(devices_of(self._model), [value for value in own if isinstance(value, GENERATORS)])
        taken: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

        def take(leaves: Iterable[torch.Tensor]) -> None:
            for leaf in leaves:
                taken.setdefault(id(leaf), (leaf, leaf.grad))
                leaf.grad = None

        try:
            take(self._model.parameters())
            yield take
        finally:
            restore()
            for leaf, gradient in taken.values():
                leaf.grad = gradient
            for put_back in self._put_back:
                put_back()


def _put_back_of(module: nn.Module) -> Callable[[], None]:
    """A call that puts back what a step may change in a module itself: its mode, attributes, and buffers."""
    attributes = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
    buffers = dict(module._buffers)
    values = {name: copied(buffer) for name, buffer in buffers.items() if buffer is not None}

    @torch.no_grad()
    def put_back() -> None:
        now = vars(module)
        for name in now.keys() - OF_TORCH - attributes.keys():
            del now[name]
        now.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for name, value in values.items():
            buffer = module.get_buffer(name)
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    return put_back


def _leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """What backward gives gradients to, as far as no reentrant checkpoint hides it: of the model, other modules, and
    inputs."""
    if loss.grad_fn is None:
        return [loss]
    leaves: list[torch.Tensor] = []
    seen, pending = {loss.grad_fn}, [loss.grad_fn]
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]
            _refuse_hooks("run", f"reaches a leaf of shape {list(leaves[-1].shape)}", leaves[-1])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves


def _refuse_hooks(option: str, name: str, leaf: torch.Tensor) -> None:
    if leaf._post_accumulate_grad_hooks:
        what = (
            "it has hooks that are called after each gradient, and may step an optimizer: planning must train nothing"
        )
        raise ConfigError(option, name, f"{what}. Plan before register_post_accumulate_grad_hook")


@contextmanager
def with_calls(model: nn.Module, around: Mapping[str, Around]) -> Iterator[None]:
    """Inside it the calls of the named modules go through what is given."""
    modules = [(model.get_submodule(name), through) for name, through in around.items()]
    try:
        for module, through in modules:
            put_around_calls(module, through)
        yield
    finally:
        for module, _ in modules:
            call_plainly(module)


def check_is_plain(name: str, module: nn.Module) -> None:
    """Raise ConfigError: the module, of that name in a model, is offloaded or planned."""
    if around_calls_of(module) is not None:
        raise ConfigError("model", name or type(module).__name__, "it is offloaded or planned already: undo that")


def _loss_of(value: object) -> torch.Tensor:
    what = "give a function that computes the loss: a tensor of one element that has a gradient"
    if not isinstance(value, torch.Tensor):
        raise ConfigTypeError("run", value, what)
    if value.numel() != 1 or not value.requires_grad:
        raise ConfigError("run", f"a tensor of shape {list(value.shape)}", what)
    return value


class StepTimeline(AbstractContextManager[Any]):
    """The most memory in each call of a block, forward and backward, by the call's number; `names` of the blocks
    called; and the `order` in which their backward began. `first_bytes`: before the first call. Entered for a step.

    A moment lasts from the beginning of a call to the beginning of the next one. Backward of a call begins when the
    gradient of one of its results is known; a leaf does not tell of that. Where a moment ends, `tidy` is called, so
    that only what is alive is counted, without what is `not_counted`."""

    def __init__(self, meter: Meter, tidy: Callable[[], None], not_counted: Callable[[], int]) -> None:
        self.names: list[str] = []
        self.order: list[int] = []
        self.forward_bytes: dict[int, int] = {}
        self.backward_bytes: dict[int, int] = {}
        self.first_bytes = 0
        self._meter, self._tidy, self._not_counted = meter, tidy, not_counted
        self._now: tuple[dict[int, int], int] | None = None
        self._hooks: list[RemovableHandle] = []

    def __exit__(self, error: object, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is None:
            self._next({}, 0)

    def around(self, name: str, through: Around) -> Around:
        inside: list[str] = []

        def run(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if inside or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            number = len(self.names)
            self.names.append(name)
            self._next(self.forward_bytes, number)
            inside.append(name)
            try:
                result = through.run(call, args, kwargs)
            finally:
                inside.clear()
            self._hooks += hooks_on(result, lambda _: self._begin_backward(number))
            return result

        return Through(run)

    def _begin_backward(self, number: int) -> None:
        if number not in self.backward_bytes:
            self.order.append(number)
            self.backward_bytes[number] = 0
            self._next(self.backward_bytes, number)

    def _next(self, moment: dict[int, int], number: int) -> None:
        peak_bytes = self._meter.peak() - self._not_counted()
        if self._now is None:
            self.first_bytes = peak_bytes
        else:
            self._now[0][self._now[1]] = peak_bytes
        self._tidy()
        self._meter.reset()
        self._now = moment, number


def hooks_on(result: Any, call: Callable[[object], None]) -> Iterator[RemovableHandle]:
    """Have `call` called with the gradient of each tensor in a result; not of leaves."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf.register_hook(call)  # type: ignore[no-untyped-call]
