"""Caches that attention reads in place, and the reuse of their prefixes."""
