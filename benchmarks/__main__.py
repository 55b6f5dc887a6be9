"""``python -m benchmarks cpu | cuda``: mla_prefill against what else computes the same, in the same run."""

from __future__ import annotations

import argparse

from benchmarks import cpu, cuda


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="cpu | cuda")
    for module in (cpu, cuda):
        command = commands.add_parser(module.__name__.rpartition(".")[2], description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
