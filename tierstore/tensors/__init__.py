"""What torch's tensors are made of: their geometry, host memory for them, and copies between it and accelerators.

Nothing in here knows a record. Start with `layout.py`, `slab.py` and `copies.py`; every name of torch that is not
public is in `torch_names.py`. Who decides what is copied where is `tierstore.residency`."""
