"""How records are encoded. Start at `policy.py` (the option), then `choice.py` (the decision), then `codec.py`."""
