"""Inductor as the compiler of divided graphs: what it has to know about the operator that packs.

NOTE [Packed buffers]
To Inductor, `pack` changes its argument in place. So it runs after everything that reads the buffer. Then the buffer
is empty, and Inductor may not give its memory to another one (`never_reuse_buffers`, as for its own
`resize_storage_bytes_`). A graph packs at its end, so that all is computed as without a store: what reads a buffer
that is changed earlier is computed before that, and perhaps not fused with what follows. While Inductor fuses, it is
not told of the change (`_hide_changes`): it never fuses what fills a buffer that is changed with what reads it, and
only what is fused reads bfloat16 before it is rounded. After fusion each pack is moved up, to behind the last node
that it depends on. Inductor's own ordering for the peak of memory comes after that.

Where a buffer is not what the division saw (an input, since Inductor left out an operator, or a part of another one),
what is packed is a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from tierstore.tensors.compiler_names import compiler_names

from .division import Rules, pack_inside
from .placeholders import pack_operator


def compile_with_inductor(
    module: fx.GraphModule,
    inputs: list[Any],
    rules: Rules,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile what Dynamo has traced. `mode` and `options` are those of `torch.compile`."""
    names = compiler_names(inductor=True)
    _teach()
    settings = {} if mode is None else names.list_mode_options(mode)
    settings |= options or {}
    settings["custom_partitioner_fn"] = _partitioner(rules)
    settings["_pre_fusion_custom_pass"] = _scheduler_pass(_hide_changes)
    settings["_post_fusion_custom_pass"] = _scheduler_pass(_moved_up)
    compiled: Callable[..., Any] = names.compile_fx(module, inputs, config_patches=settings)
    return compiled


def _partitioner(rules: Rules) -> Any:
    names = compiler_names(inductor=True)

    class Partitioner(names.CustomPartitioner):  # type: ignore[misc,name-defined]
        def __call__(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
            forward, backward = names.min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)
            pack_inside(forward, backward, num_fwd_outputs, rules)
            return forward, backward

        def uuid(self) -> object:
            return _hash_of_sources(), rules

        def __reduce__(self) -> Any:  # Inductor's cache has it in its keys
            return _partitioner, (rules,)

    return Partitioner()


def _scheduler_pass(function: Callable[[list[Any]], list[Any]]) -> Any:
    names = compiler_names(inductor=True)

    class Pass(names.CustomSchedulerPass):  # type: ignore[misc,name-defined]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return function(nodes)

        def uuid(self) -> object:
            return _hash_of_sources()

        def __reduce__(self) -> Any:
            return _scheduler_pass, (function,)

    return Pass()


def _hide_changes(nodes: list[Any]) -> list[Any]:
    """Forget that buffers have other names once they are packed, until `_moved_up` tells it again."""
    for renames, old, new in _changes(nodes):
        if list(renames.values()).count(new) == 1:  # nothing else changes that buffer
            del renames[old]
    return nodes


def _changes(nodes: list[Any]) -> list[tuple[dict[str, str], str, str]]:
    """What packs change: Inductor's table of new names, and a buffer's old name and its new one."""
    return [
        (pack.scheduler.mutation_renames, old, each.get_name())
        for pack in _packs(nodes)
        for each in pack.get_outputs()
        for old in each.get_mutations()
    ]


def _packs(nodes: list[Any]) -> list[Any]:
    return [node for node in nodes if getattr(node.node, "op_overload", None) is pack_operator]


def _moved_up(nodes: list[Any]) -> list[Any]:
    """The nodes of a schedule, with each one that packs behind the last one that it depends on."""
    names = compiler_names(inductor=True)
    packs = _packs(nodes)
    for renames, old, new in _changes(nodes):
        renames[old] = new
    changed = {each.get_name() for node in packs for each in node.get_outputs() if each.get_mutations()}
    for node in nodes:
        if any(each.name in changed and not isinstance(each, names.WeakDep) for each in node.unmet_dependencies):
            raise RuntimeError(f"{node.get_name()} would read what is in the store by then; please report this graph")
    moved = list(nodes)
    for pack in packs:
        moved.remove(pack)
        needed = {each.name for each in pack.unmet_dependencies}
        places = (place for place, node in enumerate(moved, 1) if not needed.isdisjoint(node.get_buffer_names()))
        moved.insert(max(places, default=0), pack)
    return moved


@cache
def _hash_of_sources() -> object:
    sources = [str(Path(__file__).with_name(name)) for name in ("division.py", "inductor.py", "placeholders.py")]
    return compiler_names(inductor=True).files_hash(tuple(sources))


@cache
def _teach() -> None:
    """Have Inductor lower the operator that packs. See NOTE [Packed buffers]."""
    names = compiler_names(inductor=True)
    fallback = names.fallback_handler(pack_operator, add_to_fallback_set=False)

    @names.register_lowering(pack_operator, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def lower(tensor: Any) -> Any:
        _compute_all()
        tensor.realize()
        if not _has_memory(tensor):
            tensor = names.TensorBox.create(names.copy_input(tensor))
            tensor.realize()
        buffer = tensor.data.data
        buffer.decide_layout()
        names.graph.graph.never_reuse_buffers.add(buffer.get_name())
        return fallback(tensor)


def _compute_all() -> None:
    """Have memory computed for all that the graph still packs or returns: it might read what is packed before."""
    names = compiler_names(inductor=True)
    graph = names.graph.graph
    nodes = graph.current_node.graph.nodes
    values = [graph.env.get(node) for user in nodes if _ends_with(user) for node in user.all_input_nodes]
    for value in (*values, *graph.graph_inputs.values()):
        if isinstance(value, names.TensorBox):
            value.realize()


def _ends_with(node: fx.Node) -> bool:
    return node.op == "output" or node.target is pack_operator


def _has_memory(tensor: Any) -> bool:
    """Whether a tensor of Inductor's is a buffer of this graph, and all of it."""
    names = compiler_names(inductor=True)
    graph = names.graph.graph
    if not isinstance(tensor.data, names.StorageBox) or not isinstance(tensor.data.data, names.Buffer):
        return False
    buffer = tensor.data.data
    name = buffer.get_name()
    return (
        type(buffer.layout) in (names.FixedLayout, names.FlexibleLayout)
        and not buffer.layout.offset
        and name not in graph.graph_inputs
        and name not in graph.constants
        and not buffer.get_inputs_that_alias_output()
    )
