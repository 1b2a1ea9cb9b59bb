"""`specdec report`: result files as one page of plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..extras import require
from .output import check_outputs, write_file
from .parser import usage_error

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
        "--pictures",
        metavar="DIR",
        help="make this folder, with every plot as an SVG file",
    )
    parser.add_argument("--title", default="specdec report", help="heading of the page")


def run(args: argparse.Namespace) -> int:
    from ..report.page import render_page, render_pictures
    from ..report.read import read_result

    require("matplotlib", "specdec report")
    page = args.output
    if page is None and args.pictures is None:
        page = "report.html"
    _check(args, page)
    results = [read_result(Path(name).expanduser()) for name in args.results]
    count = sum(len(result.figures) for result in results)
    files: dict[Path, str] = {}
    where = []
    if args.pictures is not None:
        where.append(args.pictures)
        folder = Path(args.pictures).expanduser()
        folder.mkdir(exist_ok=True)
        files |= {folder / name: text for name, text in render_pictures(results).items()}
    if page is not None:
        where.append(page)
        files[Path(page)] = render_page(args.title, results)
    for path, text in files.items():
        write_file(args, path, text)
    read = "1 file" if len(results) == 1 else f"{len(results)} files"
    print(f"{count} plots of {read}: {', '.join(where)}")
    return 0


def _check(args: argparse.Namespace, page: str | None) -> None:
    """Where the page and the pictures go. Raises SystemExit(2)."""
    check_outputs(args, {"--output": page}, args.results)
    if args.pictures is None:
        return
    folder = Path(args.pictures).expanduser()
    if not folder.parent.is_dir():
        usage_error(args, f"--pictures {args.pictures!r}: no such folder {str(folder.parent)!r}; "
                    "make it first")  # fmt: skip
    if folder.exists() and not folder.is_dir():
        usage_error(args, f"--pictures {args.pictures!r} is no folder; give another name")
