"""Offloading in the trainers that people use. Each file imports its library, and is imported only by who uses that.

In here: `offload_trainer` for transformers and TRL (`transformers.py`), a callback for Lightning (`lightning.py`).
Not in here: offloading itself (`tierstore.hooks`). Other trainers need no code: see docs/how_to/trainers.md.
Callers: programs. Start with `training.py`: the store and the scope of one training, whichever library runs it.
"""
