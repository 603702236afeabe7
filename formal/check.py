"""Runs the model with spin: every mode must hold in every run, every mutant must fail.

Exits with 1 where a mode has an error or was not searched to its end, or where a mutant survives;
with 2 where spin or gcc is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

MODEL = Path(__file__).with_name("oncely.pml")
MODES = ("at most once", "at least once", "effectively once")
ALL = (0, 1, 2)
ANY = (2,)
"""What is broken is the same in all modes: one of them shows it."""
LEASED_AGAIN = (1, 2)
"""At most once never grants a record twice."""
COUNTED = (0, 2)
"""At least once allows an effect to be repeated."""

MUTANTS: Mapping[str, Sequence[int]] = {
    "ACKNOWLEDGED_EARLY": ALL,
    "ATTEMPTS_COUNTED_ON_FAILURE": LEASED_AGAIN,
    "BUSY_ACKNOWLEDGED": ANY,
    "COMPLETED_BEFORE_SENT": ANY,
    "EFFECT_WITHOUT_CLAIM": (2,),
    "FAILED_IS_DUPLICATE": LEASED_AGAIN,
    "GRANT_KEEPS_BIRTH": ALL,
    "HANDLED_IS_PURGED": ALL,
    "HANDLED_RUNS_AGAIN": ANY,
    "LIVE_LEASE_IGNORED": ALL,
    "LOSER_ACKNOWLEDGES": ALL,
    "MARKED_BEFORE_SENT": ANY,
    "NO_BIRTH_CHECK": ALL,
    "NO_FENCE_CHECK": ALL,
    "RECEIVER_DOES_NOT_DEDUPLICATE": ANY,
    "RELAY_FINISHES_EARLY": ANY,
    "RELEASE_KEEPS_BIRTH": LEASED_AGAIN,
    "RELEASE_RESTORES_FENCE": LEASED_AGAIN,
    "RETENTION_SHORTER_THAN_QUEUE": COUNTED,
    "RETENTION_SHORTER_THAN_STALL": COUNTED,
    "RETRY_UNDER_HOLD": (0,),
    "SENDING_KEEPS_FENCE": ANY,
    "SENT_IN_HANDLER": ANY,
    "SPLIT_TRANSACTION": (2,),
    "START_WIPES_CLAIMS": ALL,
}
"""Each with the modes in which it must be caught."""

ENDLESS_MUTANTS: Mapping[str, Sequence[int]] = {"PUT_BACK_AT_ONCE": ANY}
"""Those that break nothing but never come to an end."""

_FEW_FAULTS = 3
_MEMORY_MB = 8_000
_DEPTH = re.compile(r"depth reached (\d+), errors: (\d+)")
_STATES = re.compile(r"([\d.e+]+) states, stored")
_BROKEN_LINE = re.compile(r":(\d+), Error: assertion violated")
_WHY = re.compile(
    r"^pan:\d+: (assertion violated|invalid end state|non-progress cycle)", re.MULTILINE
)
_CUT_SHORT = ("Search not completed", "search depth too small", "out of memory")


class CheckError(Exception):
    """The model, or the verifier that spin makes of it, cannot be run."""


@dataclass(frozen=True)
class Search:
    """One thing that spin can look for."""

    what: str
    define: str
    options: tuple[str, ...] = ()


BROKEN = Search("nothing breaks", "-DSAFETY")
"""A property that does not hold, or an end that is none."""
ENDLESS = Search("all runs end", "-DNP", ("-l", "-A"))
"""Nothing in the model is marked as progress: any cycle is an error, and broken properties are not
looked for."""


@dataclass(frozen=True)
class Case:
    """One run of the model."""

    mode: int
    search: Search
    faults: int
    workers: int
    bug: str | None = None

    @property
    def name(self) -> str:
        """What breaks, or what must hold."""
        return self.bug or self.search.what

    @property
    def defines(self) -> list[str]:
        """What the model is compiled with."""
        bug = [f"-DBUG_{self.bug}"] if self.bug else []
        return [
            f"-DMODE={self.mode}",
            f"-DFAULTS={self.faults}",
            f"-DWORKERS={self.workers}",
            *bug,
        ]


@dataclass(frozen=True)
class Result:
    """The result of a case."""

    case: Case
    states: int
    depth: int
    took_s: float
    error: str | None
    is_exhaustive: bool

    @property
    def is_good(self) -> bool:
        """A mode holds wherever one looks; a mutant does not."""
        if self.case.bug:
            return self.error is not None
        return self.error is None and self.is_exhaustive

    @property
    def verdict(self) -> str:
        """In words."""
        if self.case.bug:
            return f"caught: {self.error}" if self.error else "SURVIVES"
        if self.error:
            return f"BROKEN: {self.error}"
        return "holds" if self.is_exhaustive else "NOT EXHAUSTIVE"


def main() -> int:
    """Run what the arguments ask for; return the code to exit with."""
    arguments = _arguments()
    if missing := [name for name in ("spin", "gcc") if shutil.which(name) is None]:
        _say(f"{' and '.join(missing)} missing; type: apt-get install spin gcc libc6-dev")
        return 2
    try:
        _check_names()
        results = _run_all(_cases(arguments))
    except CheckError as error:
        _say(str(error))
        return 1
    _show(results)
    return 0 if all(result.is_good for result in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the model with spin.")
    parser.add_argument("--faults", type=int, default=4, help="of all kinds in one run (4)")
    parser.add_argument("--workers", type=int, default=2, choices=(2, 3), help="2 or 3 (2)")
    parser.add_argument(
        "--small",
        action="store_true",
        help="modes with two faults less, and each mutant in one of its modes",
    )
    parser.add_argument("--mutants", nargs="+", metavar="NAME", help="only these, not all")
    return parser.parse_args()


def _check_names() -> None:
    """Every mutant of the model has a case here: one without a case shows nothing."""
    written = set(re.findall(r"\bBUG_(\w+)", MODEL.read_text()))
    listed = MUTANTS.keys() | ENDLESS_MUTANTS.keys()
    if written != listed:
        raise CheckError(f"in the model or in the list, not in both: {sorted(written ^ listed)}")


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """The longest first, so that no core waits for the last."""
    workers, is_small = arguments.workers, arguments.small
    # With fewer a mutant would survive, however small the rest is.
    fewer = max(arguments.faults - 1, 1)
    held = max(arguments.faults - 2, 1) if is_small else arguments.faults
    modes = [Case(mode, BROKEN, held, workers) for mode in reversed(ALL)]
    # Looking for cycles visits every state twice.
    modes += [Case(mode, ENDLESS, max(held - 1, 1), workers) for mode in reversed(ALL)]
    mutants = [
        Case(mode, search, fewer, workers, bug)
        for search, bugs in ((BROKEN, MUTANTS), (ENDLESS, ENDLESS_MUTANTS))
        for bug, where in bugs.items()
        if arguments.mutants is None or bug in arguments.mutants
        for mode in (where[-1:] if is_small else where)
    ]
    return modes + mutants


def _run_all(cases: Sequence[Case]) -> list[Result]:
    """In the order of `cases`."""
    results: dict[Case, Result] = {}
    with (
        TemporaryDirectory(prefix="oncely-model-") as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        running = [pool.submit(_run, case, Path(folder)) for case in cases]
        try:
            for n, future in enumerate(as_completed(running), 1):
                result = future.result()
                results[result.case] = result
                case = result.case
                _say(f"{n}/{len(cases)} {case.name}, {MODES[case.mode]}: {result.verdict}")
        finally:
            pool.shutdown(cancel_futures=True)
    return [results[case] for case in cases]


def _run(case: Case, parent: Path) -> Result:
    with TemporaryDirectory(dir=parent) as folder:
        began = time.monotonic()
        _call(folder, "spin", *case.defines, "-a", str(MODEL))
        # For a mutant, or for few faults, the search takes less time than compiling an optimized
        # verifier.
        optimize = "-O2" if case.faults > _FEW_FAULTS and not case.bug else "-O0"
        table = "-w20" if case.bug else "-w24"
        memory = f"-DMEMLIM={_MEMORY_MB}"
        _call(folder, "gcc", "-w", optimize, case.search.define, memory, "-o", "pan", "pan.c")
        said = _call(folder, "./pan", table, *case.search.options)
        depth, states = _DEPTH.search(said), _STATES.search(said)
        if depth is None or states is None:
            raise CheckError(f"{case}: the verifier says\n{said}")
        error = None if depth[2] == "0" else _error(case, said, folder)
        is_whole = "Full statespace search" in said and not any(sign in said for sign in _CUT_SHORT)
        took_s = time.monotonic() - began
        return Result(case, int(float(states[1])), int(depth[1]), took_s, error, is_whole)


def _error(case: Case, said: str, folder: str) -> str:
    """The property that does not hold, as the model names it; or another error."""
    why = _WHY.search(said)
    if why is None:
        raise CheckError(f"{case}: the verifier says\n{said}")
    if why[1] != "assertion violated":
        return why[1]
    trail = f"{MODEL.name}.trail"
    replayed = _call(folder, "spin", *case.defines, "-k", trail, str(MODEL))
    line = _BROKEN_LINE.search(replayed)
    return MODEL.read_text().splitlines()[int(line[1]) - 1].strip(" ;:") if line else why[1]


def _call(folder: str, *command: str) -> str:
    """The output of a command. Raises CheckError if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _show(results: Sequence[Result]) -> None:
    rows = [("", "mode", "states", "depth", "seconds", "verdict"), *_rows(results)]
    for row in rows:
        name, mode, states, depth, took, verdict = row
        print(f"{name:<30} {mode:<16} {states:>11} {depth:>6} {took:>7}  {verdict}")
    bad = sum(not result.is_good for result in results)
    print(f"{len(results)} runs, {bad} not as they must be")


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, str, str, str, str, str]]:
    for result in results:
        yield (
            result.case.name,
            MODES[result.case.mode],
            f"{result.states:,}",
            f"{result.depth:,}",
            f"{result.took_s:.1f}",
            result.verdict,
        )


def _say(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
