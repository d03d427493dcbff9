"""Memory that the process's allocator keeps after it was freed, and when it goes back to the system.

In here: which allocator is in charge (`allocator`), how much memory is left (`room`), when to return some (`policy`,
pure), and the thread that does it (`returner`); also code that is resident though nobody runs it (`code_pages`). Not in
here: the store's own memory, which its slab returns itself. A store starts one `Returner` and asks it for its figures;
memory plans ask for the rest. Start at `returner`.
"""
