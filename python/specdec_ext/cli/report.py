"""`specdec report`: result files as one page of plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..extras import require
from .output import write_file

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", nargs="+", metavar="RESULT.json",
        help="what bench, tune, summarize or trace wrote with --output-json, or a file of "
        "benchmarks/results",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the page to write (default: report.html)"
    )
    parser.add_argument(
        "--pictures", metavar="DIR", help="write every plot as an SVG file into this folder"
    )
    parser.add_argument("--title", default="specdec report", help="heading of the page")


def run(args: argparse.Namespace) -> int:
    from ..report.page import render_page, render_pictures
    from ..report.read import read_result

    require("matplotlib", "specdec report")
    results = [read_result(Path(name).expanduser()) for name in args.results]
    count = sum(len(result.figures) for result in results)
    files: dict[Path, str] = {}
    where = []
    if args.pictures is not None:
        where.append(args.pictures)
        folder = Path(args.pictures).expanduser()
        files |= {folder / name: text for name, text in render_pictures(results).items()}
    if args.output is not None or args.pictures is None:
        page = Path(args.output or "report.html").expanduser()
        where.append(str(page))
        files[page] = render_page(args.title, results)
    for path, text in files.items():
        write_file(args, path, text)
    read = "1 file" if len(results) == 1 else f"{len(results)} files"
    print(f"{count} plots of {read}: {', '.join(where)}")
    return 0
