"""What may be packed inside a compiled forward, and how the two graphs change for it.

AOTAutograd divides what was traced into a forward graph, whose outputs end with all that is saved, and a backward
graph, whose inputs begin with that. `pack_inside` changes both: a large saved tensor is packed where the forward graph
needs it no more, and the backward graph begins with a placeholder, which it unpacks before the first use.

NOTE [Certainly fresh]
What is packed loses its memory, so nobody else may have it: not the caller, as an input or an output, and no later part
of the graph. A compiler works on both graphs after they were changed, and it no longer sees that a tensor is saved. So
it may find that a tensor need not be copied, and use the memory of the source. Hence only the result of an operator
that certainly has memory of its own is packed (`_is_fresh`). Every other operator is taken to give
the memory of its arguments. What could share memory, in that sense, with an output, with the argument of an operator
that writes, or with something saved in another way, stays saved as it is, which is always right.

Views of one packed tensor are not saved. The backward graph makes them again."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from tierstore.tensors.torch_names import FakeTensor

from .placeholders import pack_operator, unpack_operator

_KERNELS = {
    "aten.addmm.default",
    "aten.baddbmm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "aten.mm.default",
}
"""Each is one kernel of its own in every compiler, so a view of the result is a view of memory."""

_OUTPUTS_OF_KERNELS = {"aten._scaled_dot_product_flash_attention_for_cpu.default": {0, 1}}

_POINTWISE = {
    f"aten.{name}"
    for name in """
        abs.default clamp_min.default cos.default elu.default erf.default exp.default gelu.default hardswish.default
        hardtanh.default leaky_relu.default log.default log1p.default maximum.default minimum.default neg.default
        reciprocal.default relu.default rsqrt.default sigmoid.default silu.default sin.default softplus.default
        sqrt.default tanh.default where.self eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar ne.Scalar
    """.split()  # noqa: SIM905 - thirty lines of names
}

_ARITHMETIC = {"aten.add.Tensor", "aten.div.Tensor", "aten.mul.Tensor", "aten.pow.Tensor_Scalar", "aten.sub.Tensor"}
"""Fresh unless the second argument is 0 or 1: a compiler may leave out what changes nothing."""

_OTHERS = {
    "aten._log_softmax.default",
    "aten._softmax.default",
    "aten.embedding.default",
    "aten.mean.dim",
    "aten.sum.dim_IntList",
}

_OUTPUTS_OF_OTHERS = {
    "aten._native_batch_norm_legit_functional.default": {0, 1, 2, 3, 4},
    "aten.max_pool2d_with_indices.default": {0, 1},
    "aten.native_dropout.default": {0, 1},
    "aten.native_group_norm.default": {0, 1, 2},
    "aten.native_layer_norm.default": {0, 1, 2},
    "aten.var_mean.correction": {0, 1},
}

_CONVERSIONS = {"aten._to_copy.default", "prims.convert_element_type.default"}
"""Fresh if they change the dtype."""

_CONTIGUOUS_VIEWS = {
    "aten._unsafe_view.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.unsqueeze.default",
    "aten.view.default",
}
_OTHER_VIEWS = {
    "aten.expand.default",
    "aten.permute.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.t.default",
    "aten.transpose.int",
}
_SEVERAL_VIEWS = {"aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int"}

_JOINS = {"aten.cat.default", "aten.stack.default"}
"""Inductor may compute what is joined in the place where the result has it."""

_LARGEST_UNPADDED = 1024
_ALIGNMENT_BYTES = 128
"""Inductor may pad strides of more elements that are no multiples of so many bytes (`Layout._pad_strides`)."""

_NAMESPACES = ("aten", "prims")
"""Of operators that do what their schema says. An operator of others may use an argument after it has returned."""

_Operator = type(torch.ops.aten.mm.default)


class Rules(NamedTuple):
    """How graphs are changed.

    Attributes:
        min_bytes: smaller tensors stay saved.
        for_inductor: it orders operators itself, and may compute no memory for what is not an output. So tensors are
            packed at the end of the graph, and moved up later (`inductor.py`).
    """

    min_bytes: int
    for_inductor: bool


class _Group(NamedTuple):
    """A tensor to pack, and what is saved of it: each output's index, and the views that lead to it."""

    base: fx.Node
    saved: list[tuple[int, list[fx.Node]]]


def pack_inside(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, rules: Rules) -> None:
    """Change both graphs. `num_outputs`: how many of the forward graph's outputs are not saved tensors."""
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    groups = _groups(forward.graph, inputs, num_outputs, rules)
    if not groups:
        return
    dropped: set[int] = set()
    outputs: list[Any] = list(_output_of(forward.graph).args[0])  # type: ignore[arg-type]
    for group in groups:
        names = [outputs[index].name for index, _ in group.saved]
        outputs[group.saved[0][0]] = _put_pack(forward.graph, group.base, rules)
        dropped.update(index for index, _ in group.saved[1:])
        _put_unpack(backward.graph, [inputs[name] for name in names], group)
    _set_outputs(_output_of(forward.graph), outputs, dropped)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _output_of(graph: fx.Graph) -> fx.Node:
    node: fx.Node
    (node,) = graph.find_nodes(op="output")
    return node


def _set_outputs(node: fx.Node, outputs: list[Any], dropped: set[int]) -> None:
    """Without those that were dropped. AOTAutograd keeps a description for each one."""
    node.args = (tuple(each for index, each in enumerate(outputs) if index not in dropped),)
    if "desc" in node.meta:
        node.meta["desc"] = [each for index, each in enumerate(node.meta["desc"]) if index not in dropped]


# --- what may be packed --------------------------------------------------------------------------------------------


def _groups(graph: fx.Graph, inputs: dict[str, fx.Node], num_outputs: int, rules: Rules) -> list[_Group]:
    outputs: list[Any] = list(_output_of(graph).args[0])  # type: ignore[arg-type]
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    refused: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            break
        if rules.for_inductor and _name(node) == "aten.convolution.default":
            return []  # it saves what belongs to images, views too, with other strides than the graph has
        around = frozenset().union(*(sources[each] for each in node.all_input_nodes))
        sources[node] = frozenset((node,)) if _is_fresh(node) else around | {node}
        if _may_write(node) or (rules.for_inductor and _name(node) in _JOINS):
            refused |= around
    for each in outputs[:num_outputs]:
        if isinstance(each, fx.Node):
            refused |= sources[each]
    groups: dict[fx.Node, _Group] = {}
    for index, each in enumerate(outputs[num_outputs:], num_outputs):
        if not isinstance(each, fx.Node):
            continue
        base, views = _chain(each)
        if (
            _can_pack(base, rules)
            and not (rules.for_inductor and _may_be_laid_out_anew(base))
            and each.name in inputs
            and _can_repeat(each, base, views, inputs, rules)
        ):
            groups.setdefault(base, _Group(base, [])).saved.append((index, views))
        else:
            refused |= sources[each]
    return [group for base, group in groups.items() if base not in refused]


def _name(node: fx.Node) -> str:
    """Of its operator; "": it has none."""
    return str(node.target) if isinstance(node.target, _Operator) else ""


def _source_of_item(node: fx.Node) -> str:
    """The operator of several results, of which a node takes one; "": it does not."""
    return _name(node.args[0]) if node.target is operator.getitem else ""  # type: ignore[arg-type]


def _is_fresh(node: fx.Node) -> bool:
    """See NOTE [Certainly fresh]."""
    name, source, args = _name(node), _source_of_item(node), node.args
    if source:
        return args[1] in _OUTPUTS_OF_KERNELS.get(source, ()) or args[1] in _OUTPUTS_OF_OTHERS.get(source, ())
    if name in _ARITHMETIC:
        return not node.kwargs and (isinstance(args[1], fx.Node) or args[1] not in (0, 1))
    if name in _CONVERSIONS:
        return bool(node.meta["val"].dtype != args[0].meta["val"].dtype)  # type: ignore[union-attr]
    if name == "aten.clone.default":
        strides = node.meta["val"].stride(), args[0].meta["val"].stride()  # type: ignore[union-attr]
        return all(type(step) is int for each in strides for step in each) and strides[0] != strides[1]
    return name in _KERNELS or name in _POINTWISE or name in _OTHERS


def _may_write(node: fx.Node) -> bool:
    """Whether a node may change an argument, or use its memory later: unless an operator's schema says no."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return False
    if isinstance(node.target, _Operator):
        return node.target.namespace not in _NAMESPACES or bool(node.target._schema.is_mutable)
    return any(isinstance(each.meta.get("val"), torch.Tensor) for each in node.all_input_nodes)


def _chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a saved tensor is a view of, and the views in between, in order, itself included."""
    views: list[fx.Node] = []
    while _is_view(node):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views[::-1]


def _is_view(node: fx.Node) -> bool:
    name = _name(node)
    return (
        _source_of_item(node) in _SEVERAL_VIEWS
        or name in _CONTIGUOUS_VIEWS
        or name in _OTHER_VIEWS
        or name in _SEVERAL_VIEWS
    )


def _can_pack(base: fx.Node, rules: Rules) -> bool:
    value: Any = base.meta.get("val")
    if not _is_fresh(base) or type(value) is not FakeTensor:
        return False
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_complex():
        return False
    nbytes: int = value.itemsize
    for size in value.shape:
        hint = size if type(size) is int else size.node.hint
        if hint is None:
            return False
        nbytes *= hint
    return nbytes >= rules.min_bytes


def _may_be_laid_out_anew(base: fx.Node) -> bool:
    """Whether Inductor may save a tensor with other strides than the graph has, which it must not be kept from."""
    value = base.meta["val"]
    if not all(type(each) is int for each in (*value.shape, *value.stride())):
        return _name(base) not in _KERNELS
    return any(step > _LARGEST_UNPADDED and step * value.itemsize % _ALIGNMENT_BYTES for step in value.stride())


def _can_repeat(
    saved: fx.Node, base: fx.Node, views: Iterable[fx.Node], inputs: dict[str, fx.Node], rules: Rules
) -> bool:
    """Whether the backward graph can make the views again, and gets the strides that it would get otherwise."""
    if saved.meta.get("saved_tensor_with_no_vc_check", False):
        return False
    is_memory = _name(base) in _KERNELS or _source_of_item(base) in _OUTPUTS_OF_KERNELS
    for view in views:
        if rules.for_inductor and not is_memory and _name(view) not in _CONTIGUOUS_VIEWS:
            return False
        numbers = [each for each in view.all_input_nodes if each is not view.args[0]]
        if not all(each.name in inputs for each in numbers):
            return False
    return True


# --- the graphs ----------------------------------------------------------------------------------------------------


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """A new node, where the graph inserts now, with a value without bytes, as AOTAutograd's nodes have one."""
    node = graph.call_function(target, args, kwargs or {})
    given, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    node.meta["val"] = target(*given, **named)
    return node


def _put_pack(graph: fx.Graph, base: fx.Node, rules: Rules) -> fx.Node:
    if rules.for_inductor:  # it computes memory for what it returns, with these strides; as this is not returned:
        base.meta["inductor_realize_to_strides"] = True
    place = _output_of(graph).prev if rules.for_inductor else _last_use(graph, base)
    with graph.inserting_after(place), base.meta["val"].fake_mode:
        return _call(graph, pack_operator, (base,))


def _last_use(graph: fx.Graph, base: fx.Node) -> fx.Node:
    """The last node that uses a tensor or what may share its memory."""
    sharing, last = {base}, base
    for node in graph.nodes:
        if node.op != "output" and not sharing.isdisjoint(node.all_input_nodes):
            last = node
            if not _is_fresh(node):
                sharing.add(node)
    return last


def _put_unpack(graph: fx.Graph, saved: list[fx.Node], group: _Group) -> None:
    users = {user for each in saved for user in each.users}
    first = next(node for node in graph.nodes if node in users or node.op == "output")
    placeholder, *others = saved
    base_value = group.base.meta["val"]
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    with graph.inserting_before(first), base_value.fake_mode:
        placeholder.meta["val"] = pack_operator(base_value)
        made = {group.base: _call(graph, unpack_operator, (placeholder,))}
        unpacked = made[group.base]
        for each, (_, views) in zip(saved, group.saved, strict=True):
            for view in views:
                if view not in made:
                    args, kwargs = fx.map_arg(
                        (view.args, view.kwargs), lambda node: made[node] if node in made else inputs[node.name]
                    )
                    made[view] = _call(graph, view.target, args, kwargs)
            result = made[views[-1]] if views else unpacked
            each.replace_all_uses_with(result, delete_user_cb=lambda user: user is not unpacked)
    placeholder.meta.pop("tensor_meta", None)
    for each in others:
        graph.erase_node(each)
