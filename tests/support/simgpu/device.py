"""A simulated GPU: tensors that say `cuda:0` and hold real numbers, computed at once on the CPU.

Each operation is logged with the bytes that it reads and writes and its stream, and by `guard.cpp`
the events that order streams. `trace.py` finds what a real GPU could run in another order.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.simgpu.build import guard

GUARD = guard()
# The first number of a communicator's stream on each device, which has a million.
COMMUNICATORS = 900000


class Span(NamedTuple):
    """Bytes in memory, from begin up to end."""

    begin: int
    end: int


class Operation(NamedTuple):
    name: str
    reads: list[Span]
    writes: list[Span]
    place: str  # in ddp_from_scratch, or "program"


OPERATIONS: list[Operation] = []
HOST_WAITS: list[tuple[str, str]] = []  # (operation, place)


class SimTensor(torch.Tensor):
    """A tensor of the simulated GPU. `on_host` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor, index: int) -> "SimTensor":
        where = {"dtype": on_host.dtype, "device": torch.device("cuda", index)}
        if not on_host.is_sparse:
            where |= {"strides": on_host.stride(), "storage_offset": on_host.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, on_host.size(), **where)
        if not on_host.is_sparse:
            storage = on_host.untyped_storage()
            GUARD.own(made, storage.data_ptr(), storage.nbytes())
        made.on_host = on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def tolist(self) -> Any:
        log("tolist", spans(self.on_host), [], GUARD.current(self.device.index))
        _host_waits("tolist", self.device.index)
        return self.on_host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copy = self.detach().clone().requires_grad_(self.requires_grad)
        return copy

    # torch's C++ code takes a sparse one for a dense one.
    @property
    def is_sparse(self) -> bool:
        return self.on_host.is_sparse

    @property
    def layout(self) -> torch.layout:
        return self.on_host.layout

    def coalesce(self) -> torch.Tensor:
        if self.is_coalesced():
            return self
        return _run(torch.ops.aten._coalesce.default, (self,), {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: "SimTensor") -> None:
        torch.Tensor.data.__set__(self, new)
        self.on_host = new.on_host


def place() -> str:
    """The line of the library that runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("ddp_from_scratch/")
        if found and not path.startswith("launch/"):  # ranks are forked inside of it
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "program"


def log(name: str, reads: list[Span], writes: list[Span], stream: int) -> None:
    GUARD.operation(len(OPERATIONS), stream)
    OPERATIONS.append(Operation(name, reads, writes, place()))


def _host_waits(what: str, index: int) -> None:
    GUARD.host_waits(GUARD.current(index))
    HOST_WAITS.append((what, place()))


# For these the host waits for a result.
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op._schema.name
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    index = next(x.device.index for x in given if isinstance(x, SimTensor))
    if name == "aten::record_stream":
        GUARD.keep(args[0].on_host.untyped_storage().data_ptr(), args[1].stream_id)
        return None
    if name == "aten::resize_":
        # Only `data` can give a wrapper another shape. torch.distributed resizes what it has sent.
        args[0].data = SimTensor(args[0].on_host.resize_(*args[1:]), index)
        return args[0]
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if device is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    wrappers = {id(x.on_host): x for x in given if isinstance(x, SimTensor)}
    bare_args, bare_kwargs = tree_map(
        lambda x: x.on_host if isinstance(x, SimTensor) else x, (args, kwargs)
    )
    copies_to_host = name == "aten::copy_" and not isinstance(args[0], SimTensor)
    before = args[0].clone() if copies_to_host else None
    out = op(*bare_args, **bare_kwargs)
    stays_on_host = to_host or copies_to_host or name in _READS

    def as_given(x: Any) -> Any:
        if stays_on_host or not isinstance(x, torch.Tensor):
            return x
        found = wrappers.get(id(x))
        if found is None:
            return SimTensor(x, index)
        assert found.shape == x.shape, f"{name} changed the shape of a simulated tensor"
        return found

    made = tree_map(as_given, out)
    _log_call(op, bare_args, bare_kwargs, out, wrappers, index)
    non_blocking = kwargs.get("non_blocking") or (copies_to_host and True in args[2:])
    if stays_on_host and non_blocking:
        # The host sees the old bytes until it waits, or asks an event.
        GUARD.arrives_later(out, out.clone())
        out.copy_(torch.zeros_like(out) if before is None else before)
    elif stays_on_host:
        _host_waits("copy to the host" if copies_to_host else name, index)
    if stays_on_host:
        return made
    return return_and_correct_aliasing(op, args, kwargs, made)


def spans(tensor: torch.Tensor) -> list[Span]:
    """The bytes of a tensor on the host, from its first element to its last."""
    if tensor.layout != torch.strided:
        return spans(tensor._indices()) + spans(tensor._values())
    if tensor.numel() == 0:
        return []
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in shape)
    begin = tensor.data_ptr()
    return [Span(begin, begin + (last + 1) * tensor.element_size())]


def _log_call(
    op: Any, args: Any, kwargs: Any, out: Any, wrappers: dict[int, Any], index: int
) -> None:
    schema = op._schema
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return  # a view
    reads: list[Span] = []
    writes: list[Span] = []
    named = [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    for argument, value in [*zip(schema.arguments, args, strict=False), *named]:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value):
            # A copy to or from the host is an operation on the host's memory, too.
            if isinstance(tensor, torch.Tensor):
                (writes if written else reads).extend(spans(tensor))
    for tensor in tree_leaves(out):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in wrappers:
            writes += spans(tensor)
    log(schema.name, reads, writes, GUARD.current(index))


def _factory(op: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        index = torch.device(kwargs["device"]).index
        index = torch.accelerator.current_device_index() if index is None else index
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        made = SimTensor(op(*args, **kwargs), index)
        if "empty" not in op._schema.name:
            log(op._schema.name, [], spans(made.on_host), GUARD.current(index))
        return made

    return make


_FACTORIES = ("empty.memory_format", "empty_strided", "eye", "eye.m", "linspace", "randperm")
_FACTORIES += ("arange", "arange.start", "arange.start_step", "randperm.generator")
_library: torch.library.Library | None = None


@contextmanager
def on(stream: int, index: int = 0) -> Iterator[None]:
    before = GUARD.set_current(stream, index)
    try:
        yield
    finally:
        GUARD.set_current(before, index)


def clear() -> None:
    """Forgets all operations, and gives freed memory back."""
    OPERATIONS.clear()
    HOST_WAITS.clear()
    GUARD.clear()


def install() -> None:
    """Puts the simulated GPU in the place of CUDA in this process, for good."""
    global _library
    GUARD.install()
    _library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in _FACTORIES:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        _library.impl(name, _factory(op), allow_override=True)
    # torch.tensor copies where no subclass's dispatch is called.
    copy = torch.ops.aten.copy_.default
    _library.impl("copy_", lambda *args: _run(copy, args, {}), allow_override=True)
    # A simulated parameter is another object than the one on the host.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: GUARD.DEVICES
    torch.cuda.get_device_properties = lambda which=None: SimpleNamespace(
        uuid=f"simulated-{torch.device(which).index}", name="simulated", major=8, minor=0
    )
    torch.cuda._exchange_device = torch._C._accelerator_exchangeDevice
    torch.cuda._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
    torch.cuda.current_device = torch.accelerator.current_device_index
    torch.cuda.set_device = torch.accelerator.set_device_index
    torch.cuda.current_stream = torch.accelerator.current_stream
    torch.cuda.synchronize = torch.accelerator.synchronize
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream, torch.cuda.Event = torch.Stream, torch.Event  # type: ignore[misc]
    torch.cuda.stream = lambda stream: stream  # a torch.Stream is its own context
