"""``python -m benchmarks COMMAND``: mla_prefill and its peers in the same run."""

from __future__ import annotations

import argparse

from benchmarks import bandwidth, cpu, cuda, host, plan, step, trace


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="cpu | cuda | step | trace | bandwidth | plan | host")
    for module in (cpu, cuda, step, trace, bandwidth, plan, host):
        command = commands.add_parser(module.__name__.rpartition(".")[2], description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
