"""What knows nothing of tensors, tiers or sockets, and serves all packages. It imports nothing but
`tierstore.errors`."""
