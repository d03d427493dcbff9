"""Memory that the process's allocator keeps after it was freed, and when it goes back to the system. Start at
`advice`."""
