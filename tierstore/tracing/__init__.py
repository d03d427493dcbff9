"""Traces of training steps: recorded beside a store, read again and drawn without one."""
