"""The command: runs many seeds, or shows one."""

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.running import simulated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; return 1 if a guarantee is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--show", action="store_true", help="print what happened, event by event")
    parser.add_argument("--most", type=int, default=5, help="stop after so many failing seeds")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    began, failing, count = time.monotonic(), 0, 0
    for count, seed in enumerate(seeds, 1):  # noqa: B007 - it is told in the end.
        simulation = simulated(seed)
        if asked.show:
            sys.stdout.write(f"{simulation.scenario}\n{simulation.history.text()}\n")
        if simulation.wrongs:
            failing += 1
            sys.stdout.write(f"{simulation.told()}\n")
            if failing == asked.most:
                break
    took_s = time.monotonic() - began
    sys.stdout.write(f"{count} seeds, {failing} failing, {took_s:.1f} s\n")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
