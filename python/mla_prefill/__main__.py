"""``python -m mla_prefill``: the command line without an installed script."""

from mla_prefill.cli import main

main()
