"""Traces of training steps: recorded beside a store (`recorder.py`, `recordings.py`), read again and drawn without one.
The hooks tell what is saved, the rules tell an `Observer` the moves. Start with `events.py`."""
