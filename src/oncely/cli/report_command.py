"""`oncely report`: a page of plots."""

import argparse
import json
from pathlib import Path

from oncely.cli.ledger_arguments import located
from oncely.cli.progress import Progress
from oncely.report.page import check_writable, write_page
from oncely.spark.operations.ledger_frames import check_archive
from oncely.spark.operations.measures import measure


def run(parsed: argparse.Namespace) -> int:
    """Measure, and write the page."""
    to = Path(parsed.to)
    check_writable(to)
    check_archive(parsed.archive)
    place = located(parsed)
    with Progress("measuring on Spark"):
        measures = measure(place, parsed.consumer, parsed.archive)
        write_page(to, measures, parsed.consumer)
    if parsed.json:
        counts = {"records": measures.records, "duplicates": measures.duplicates}
        print(json.dumps({"file": str(to), **counts, "standings": measures.standings}))
    else:
        print(f"{to}: {measures.records:,} records, {measures.duplicates:,} duplicates")
    return 0
