"""R14: A tensor that cannot be stored stays where it is, comes back right, and is counted."""

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_subclass_that_answers_nobody_is_not_asked": {
        "subclasses stay": never("OffloadScope.pack", "kind is not torch.Tensor and kind is not Parameter"),
    },
    "test_unsupported_kind_saved_right_value_and_counted": {
        "sparse tensors stay": replace(
            "OffloadScope.pack",
            "return self.keep(tensor, 'unsupported')",
            "raise",
            inside="try: ...\nexcept RuntimeError: ...",
        ),
        "zeros without memory stay": never("OffloadScope.pack", "nbytes and not address"),
        "quantized tensors stay": drop("OffloadScope.pack", "tensor.is_quantized"),
        "what stays is counted by reason": drop(
            "OffloadScope.keep", "self._newly_kept.adder(reason)(bytes_of(tensor))"
        ),
    },
    "test_transform_under_a_scope_is_refused_with_advice": {
        "the refusal of torch.func says what to do": drop("advise", "error.add_note(advice)"),
    },
    "test_nested_tensors_same_bits": {
        "nested tensors stay": drop("OffloadScope.pack", "tensor.is_nested"),
    },
    "test_put_of_an_inference_tensor_as_it_was_then": {
        "inference tensors are copied when put": drop("TierStore.put", "tensor = tensor.clone()"),
    },
    "test_transform_inside_keep_resident_without_hooks_gives_the_same": {
        "keep_resident(hooks=False) lets torch.func run": replace(
            "take_off_all", "top_hooks(False) is not None", "False and top_hooks(False) is not None"
        ),
    },
    "test_all_hooks_are_back_where_they_were": {
        "afterwards the hooks are back": replace("put_back", "starmap(push_hooks, ...)", "zip(...)"),
    },
    "test_leaf_with_an_attribute_comes_back_as_without_hooks_of_ours": {
        "a kept tensor of a subclass comes back itself": always(
            "Kept.__init__", "not tensor.is_leaf or may_become_an_output(tensor)"
        ),
        "a tensor whose attributes would be lost is not stored": never(
            "OffloadScope.pack", "not tensor.requires_grad and attributes_of(tensor) is not None"
        ),
    },
}

UNSHOWN = {
    "tensors of other devices stay": "those of meta lie nowhere either; no other can be made here",
    "wrappers of functional transforms stay": "hooks are given what they wrap: a second line of defence",
}
