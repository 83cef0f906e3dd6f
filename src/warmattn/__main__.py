"""``python -m warmattn`` is the ``warmattn`` command."""

from warmattn.cli import main

main()
