"""The arithmetic of torch's optimizers, on single parameters and on flat tensors.

The rules step flat tensors with torch's fused kernels and bits. A kernel's threads split a tensor
at cache lines, so a cut there does not change the bits. Only the last elements, which do not fill a
vector, may be rounded differently.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, Protocol

import torch
from torch.optim.sgd import sgd

from ddp_from_scratch.common.memory import dense_strides

# In bytes. A multiple of the vector size of every CPU that torch has kernels for.
CACHE_LINE = 64
# Of step counts, as torch's fused kernels take them. In 16 bits a count would stop at 256.
STEP_DTYPE = torch.float32
# Below this number of elements, cutting a tensor takes longer than to step it with separate calls.
_SMALL = 2**13

ParamGroup = dict[str, Any]
# A parameter, its gradient, and its state in the order of `state_names`, without "step".
Tensors = Sequence[torch.Tensor]
Columns = Sequence[list[torch.Tensor]]  # the same, for several parameters


class UpdateRule(Protocol):
    """The arithmetic of one of torch's optimizers.

    `state_names` are the keys of a parameter's state; all but "step" have the parameter's shape.
    `update` steps a parameter and its state, and keeps the gradient. `update_flat` steps contiguous
    parts, which begin at cache lines unless the rule is exact anywhere. `num_steps` is the
    number of earlier steps of a state. Without a "step" that counts them it is 0 or 1.
    """

    settings: tuple[str, ...]  # the keys of a parameter group that a step depends on
    required: tuple[str, ...]  # those that a group must have; torch's class adds the others
    fused: bool | None  # torch's class has the same bits with this `fused`
    takes_complex: bool
    exact_anywhere: bool  # an element's bits do not depend on its position in a tensor

    def state_names(self, group: ParamGroup) -> tuple[str, ...]: ...
    def update(self, tensors: Tensors, num_steps: int, group: ParamGroup) -> None: ...
    def update_flat(self, columns: Columns, num_steps: int, group: ParamGroup) -> None: ...

    def _update_contiguous(self, tensors: Tensors, num_steps: int, group: ParamGroup) -> None:
        strides = dense_strides(tensors[0])  # the kernel ignores strides
        in_order = all(tensor.stride() == strides for tensor in tensors)
        dense = tensors if in_order else [tensor.contiguous() for tensor in tensors]
        self.update_flat([[tensor] for tensor in dense], num_steps, group)
        for tensor, stepped in zip(tensors, dense, strict=True):
            if stepped is not tensor:
                tensor.copy_(stepped)

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: ParamGroup,
    ) -> None:
        """Steps one parameter. Like torch, it allocates the state in the first step."""
        names = self.state_names(group)
        check_state(parameter, state, names)
        num_steps = int(all(state.get(name) is not None for name in names))
        like = gradient if gradient.is_sparse else parameter
        for name in names:
            if state.get(name) is None:
                # As in torch, momentum has the dtype of the gradient (`grad_dtype`).
                zeros = torch.zeros_like(like, dtype=gradient.dtype)
                count = torch.zeros((), dtype=STEP_DTYPE, device="cpu")
                state[name] = count if name == "step" else zeros
        if "step" in names:
            num_steps = int(state["step"])
        values = (state[name] for name in names if name != "step")
        self.update([parameter, gradient, *values], num_steps, group)
        if "step" in names:
            state["step"] += 1


class SGDRule(UpdateRule):
    """torch.optim.SGD: on a GPU with the bits of `fused=True`, on a CPU of the other forms.

    On a CPU, torch's `fused=True` differs from them only in the momentum of a parameter's last
    elements (at most 7 in float32, 3 in float64), which it rounds once less. Here the operations of
    `foreach=True` step these elements, and the fused kernel steps all others.
    """

    _of_kernel = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    settings: tuple[str, ...] = ("lr", *_of_kernel)
    required: tuple[str, ...] = ("lr", "momentum", "dampening", "weight_decay")
    fused: bool | None = None
    takes_complex = True
    exact_anywhere = True

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def update(self, tensors: Tensors, num_steps: int, group: ParamGroup) -> None:
        parameter, gradient, *state = tensors
        has_kernel = parameter.dtype == gradient.dtype and not gradient.is_sparse
        if parameter.is_cuda and parameter.is_floating_point() and has_kernel:
            self._update_contiguous(tensors, num_steps, group)
            return
        momentum = [state[0] if state and num_steps else None]
        sgd([parameter], [gradient], momentum, foreach=False, fused=False, **_sgd_settings(group))
        if num_steps == 0 and momentum[0] is not None:
            state[0].copy_(momentum[0])

    def update_flat(self, columns: Columns, num_steps: int, group: ParamGroup) -> None:
        first = columns[0][0]
        if first.is_cuda and first.is_floating_point():
            _fused_sgd(columns, num_steps, group)
        elif fused_kernel_is_exact(first.dtype, first.device.type):
            line = CACHE_LINE // first.itemsize
            # In most steps nothing is left over. No Python call for each part.
            if not any(map(line.__rmod__, map(torch.Tensor.numel, columns[0]))):
                _fused_sgd(columns, num_steps, group)
                return
            whole, rest = _cut_at_lines(columns)
            if whole[0]:
                _fused_sgd(whole, num_steps, group)
            if rest[0]:
                _foreach_sgd(rest, num_steps, group)
        else:
            for tensors in zip(*columns, strict=True):
                self.update(tensors, num_steps, group)


class AdamRule(UpdateRule):
    """torch.optim.Adam and AdamW with the bits of `fused=True`."""

    _of_kernel = ("eps", "weight_decay", "amsgrad", "maximize")
    settings: tuple[str, ...] = ("lr", "betas", *_of_kernel, "decoupled_weight_decay")
    required: tuple[str, ...] = ("lr", "betas", "eps", "weight_decay")
    fused: bool | None = True
    takes_complex = False  # torch's fused kernel has none
    exact_anywhere = False

    def state_names(self, group: ParamGroup) -> tuple[str, ...]:
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("step", "exp_avg", "exp_avg_sq", *largest)

    def update(self, tensors: Tensors, num_steps: int, group: ParamGroup) -> None:
        if tensors[1].is_sparse:
            raise RuntimeError(
                "Adam does not support sparse gradients, please consider SparseAdam instead"
            )
        if tensors[0].dtype != tensors[1].dtype:
            raise RuntimeError(
                f"Adam takes gradients of the dtype of their parameter, got {tensors[1].dtype} for "
                f"{tensors[0].dtype}: leave grad_dtype out, or step this parameter with SGD"
            )
        self._update_contiguous(tensors, num_steps, group)

    def update_flat(self, columns: Columns, num_steps: int, group: ParamGroup) -> None:
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        parameters, gradients, first, second, *largest = columns
        # Filled on the device, because a copy would make the host wait for a GPU.
        step = torch.full((), num_steps + 1, dtype=STEP_DTYPE, device=parameters[0].device)
        beta1, beta2 = group["betas"]
        steps, settings = [step] * len(parameters), {name: group[name] for name in self._of_kernel}
        settings |= {"lr": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2)}
        maximum = largest[0] if largest else []
        kernel(parameters, gradients, first, second, maximum, steps, **settings)


SGD_RULE, ADAM_RULE = SGDRule(), AdamRule()


def check_state(
    parameter: torch.Tensor, state: Mapping[str, Any], names: Sequence[str], part: int | None = None
) -> None:
    """Raises a ValueError if a parameter's state is another optimizer's, or of another shape.

    Without a state it has the keys `names` all None. `part` is the number of elements of which a
    rank may have the state alone.
    """
    shape, held = tuple(parameter.shape), [key for key, value in state.items() if value is not None]
    missing = [name for name in names if state.get(name) is None]
    # Momentum alone may be missing: a step without momentum keeps no state.
    if held and missing and "step" in names:
        raise ValueError(
            f"the state of a parameter of shape {shape} has {', '.join(map(str, held))} and lacks "
            f"{', '.join(missing)}: load the state_dict() of the same kind of optimizer"
        )
    for name in names if not missing else ():
        found = state[name].shape if torch.is_tensor(state[name]) else torch.Size()
        if name == "step":
            fits = found.numel() == 1
        else:
            fits = found == parameter.shape or (len(found) == 1 and found[0] == part)
        if not fits:
            raise ValueError(
                f"{name} in the state of a parameter of shape {shape} has shape {tuple(found)}: "
                f"load the state of the same model"
            )


def _sgd_settings(group: ParamGroup) -> dict[str, Any]:
    settings = {name: group[name] for name in SGDRule.settings}
    return settings | {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}


def _fused_sgd(columns: Columns, num_steps: int, group: ParamGroup) -> None:
    parameters, gradients, *momentum = columns
    buffers = momentum[0] if momentum else []
    first = bool(momentum) and num_steps == 0  # a GPU's kernel warns of the flag without momentum
    torch._fused_sgd_(
        parameters,
        gradients,
        buffers,
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=float(group["weight_decay"]),
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=first,
    )


def _foreach_sgd(columns: Columns, num_steps: int, group: ParamGroup) -> None:
    parameters, gradients, *momentum = columns
    if group["nesterov"]:  # it would write into the gradients
        gradients = [gradient.clone() for gradient in gradients]
    held: list[Any] = [*momentum[0]] if momentum and num_steps else [None] * len(parameters)
    sgd(parameters, gradients, held, foreach=True, fused=False, **_sgd_settings(group))
    if momentum and num_steps == 0:
        for buffer, first in zip(momentum[0], held, strict=True):
            buffer.copy_(first)


def _cut_at_lines(columns: Columns) -> tuple[Columns, Columns]:
    """Returns the whole cache lines of each row's tensors, and what is left of them at the end.

    A small tensor of another size than whole lines is left altogether.
    """
    line = CACHE_LINE // columns[0][0].itemsize
    whole, rest = [[] for _ in columns], [[] for _ in columns]  # type: tuple[Any, Any]
    for row in zip(*columns, strict=True):
        numel = row[0].numel()
        over = numel % line
        for k, tensor in enumerate(row):
            if over == 0:
                whole[k].append(tensor)
            elif numel < _SMALL:
                rest[k].append(tensor)
            else:
                flat = tensor.as_strided((numel,), (1,))
                whole[k].append(flat[:-over])
                rest[k].append(flat[-over:])
    return whole, rest


@cache
def fused_kernel_is_exact(dtype: torch.dtype, device: str) -> bool:
    """True if a CPU's fused SGD has the bits of its separate operations. Tried once."""
    # The build of torch decides: its compiler may fuse a product and a sum, which rounds once.
    if not dtype.is_floating_point or device != "cpu":
        return False
    numbers = torch.linspace(-1.7, 1.3, 512, dtype=dtype, device=device)
    start = [numbers, numbers.flip(0).sin(), numbers.cos()]
    switches = product((0.0, 0.9), (0.0, 0.3), (0.0, 0.01), (False, True), (False, True), (0, 1))
    equal = []
    for momentum, dampening, decay, nesterov, maximize, num_steps in switches:
        group = {"lr": 0.03, "momentum": momentum, "dampening": dampening}
        group |= {"weight_decay": decay, "nesterov": nesterov, "maximize": maximize}
        one, other = ([tensor.clone() for tensor in start[: 2 + (momentum > 0)]] for _ in range(2))
        _fused_sgd([[tensor] for tensor in one], num_steps, group)
        SGD_RULE.update(other, num_steps, group)
        equal += [(a == b).all() for a, b in zip(one, other, strict=True)]
    return bool(torch.stack(equal).all())
