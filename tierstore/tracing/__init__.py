"""Traces of training steps: recorded beside a store, read again and drawn without one.

In here: the events (`events.py`), what records them (`recorder.py`, `recordings.py`), what reads and draws them. Not
here: the hooks, which tell what is saved (`tierstore.hooks.recorded`), and the moves, which the rules tell to an
`Observer`. The store, the hooks and the commands `trace` and `tune` call it. Start with `events.py`.
"""
