"""What knows nothing of tensors, tiers or sockets, and serves all packages: options, threads, interrupts, files.

Everybody may import it; it imports nothing of tierstore but `tierstore.errors`. No order to read it in.
"""
