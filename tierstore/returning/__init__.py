"""Memory that the process's allocator keeps after it was freed, and when it goes back to the system.

Not in here: the store's own memory, which its slab returns itself. Start at `returner`.
"""
