"""The coded form of V: a signed Hadamard rotation, one norm per block, a Lloyd-Max code per value."""
