"""The tables of docs/performance.md: results files as Markdown, and the targets as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from targets import TARGETS, Target, shown, verdicts

NOT_MEASURED = "not yet measured"
CUT_SHORT = "Cut short by the time it was given: what is missing above was not measured."
_MACHINE = ("processor", "cores", "gpu", "python", "torch", "cuda", "numpy", "numba", "mpinspect")


def markdown(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table, the first column left-aligned, the others right-aligned."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def how_to_measure(benchmark: str, gpu: bool) -> str:
    """Return the command that measures a missing result."""
    return "`make gpu`, with a CUDA GPU" if gpu else f"`make bench ARGS={benchmark}`"


def not_yet_measured(documents: dict[str, Any], left_out: dict[str, str]) -> str:
    """List the unmeasured targets, then the omitted sections. ``left_out``: titles by the name of their results file."""
    promised = [
        (target.what, target.promise, how_to_measure(target.benchmark, target.gpu))
        for target in unanswered(documents).values()
    ]
    parts = [markdown(("promised", "bound", "measured by"), promised)] if promised else []
    parts += ["\n".join(f"- {title}: {how_to_measure(*_of_file(file))}" for file, title in left_out.items())]
    return "\n\n".join(filter(None, parts))


def _of_file(file: str) -> tuple[str, bool]:
    """Return the benchmark that writes a results file, and whether it needs a GPU."""
    name, _, device = file.rpartition("-")
    return name, device == "gpu"


# -- targets ----------------------------------------------------------------------------------------------------------------


def checked_rows(documents: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every measured target, as ``targets.checked`` wrote it."""
    several = (document["results"] for document in documents.values())
    return [row for results in several if isinstance(results, dict) for row in results.get("checked", ())]


def unanswered(documents: dict[str, Any]) -> dict[str, Target]:
    """Return the unmeasured targets."""
    answered = {row["key"] for row in checked_rows(documents)}
    return {key: target for key, target in TARGETS.items() if key not in answered}


def promises(documents: dict[str, Any]) -> str:
    rows = [
        (row["what"], row["target"], shown(row["value"], row["unit"]), "met" if row["met"] else "**missed**")
        for row in checked_rows(documents)
    ]
    return markdown(("what", "promised", "measured", "kept?"), rows)


def promises_text(documents: dict[str, Any]) -> str:
    """Format all targets for a terminal."""
    answered = checked_rows(documents)
    lines = [verdicts(answered)] if answered else []
    return "\n".join([*lines, *(f"{target.what:90} {NOT_MEASURED}" for target in unanswered(documents).values())])


def machines(documents: dict[str, Any], shown_files: set[str]) -> str:
    """Format the machine and date of each results file on the page."""
    rows = []
    for file in sorted(shown_files & set(documents)):
        machine = documents[file]["machine"]
        rows.append((f"`{file}.json`", documents[file]["date"], *(_or_dash(machine.get(name)) for name in _MACHINE)))
    return markdown(("results", "date", *_MACHINE), rows)


# -- one benchmark each ---------------------------------------------------------------------------------------------------


def counting(results: dict[str, Any]) -> str:
    rows = results["rows"]
    by_size = [row for row in rows if row["dtype"] == "float32" and row["data"] == "dense"]
    sizes = list(dict.fromkeys(row["elements"] for row in by_size))
    promised = max((row["elements"] for row in rows if row["data"] != "dense"), default=sizes[-1])
    same_size = [row for row in rows if row["elements"] == promised]
    return "\n\n".join(
        (
            *results["notes"],
            "float32 by the number of elements: nanoseconds per value, and the time over `sum()`'s.",
            _pivot(
                by_size,
                "way",
                "elements",
                lambda row: f"{shown(row['ns_per_value'], 'ns')}, {row['over_sum']:.2f}x",
                _thousands,
            ),
            f"{_thousands(promised)} dense values of each dtype: gigabytes per second, and the time over `sum()`'s.",
            _pivot(
                [row for row in same_size if row["data"] == "dense"],
                "way",
                "dtype",
                lambda row: f"{row['gb_per_s']:.2f} GB/s, {row['over_sum']:.2f}x",
            ),
            f"{_thousands(promised)} values that are harder: the time of mpinspect over dense ones.",
            _pivot(
                [row for row in same_size if row["way"] == "mpinspect"],
                "data",
                "dtype",
                lambda row: f"{row['over_dense']:.2f}x",
            ),
        )
    )


def overhead(results: dict[str, Any]) -> str:
    def cell(row: dict[str, Any]) -> str:
        if row["name"] == "bare":
            return shown(row["step_ms"], "ms")
        inside = row["callbacks_fraction"]
        return f"{row['wall_ratio']:.2f}x" if inside is None else f"{inside:.2%}, {row['wall_ratio']:.2f}x"

    table = _pivot(results["rows"], "name", "subject", cell)
    missing = results["not_available"]
    return f"{table}\n\nNot to be had where this was measured: {', '.join(missing)}." if missing else table


def where_it_goes(results: dict[str, Any]) -> str:
    rows = [
        (
            f"`{row['function']}`",
            f"{row['calls_per_step']:.1f}",
            f"{row['own_ms_per_step']:.2f}",
            f"{row['fraction']:.1%}",
        )
        for row in results["rows"]
    ]
    total = f"All functions of the package together: {results['total_ms']:.1f} ms a step, under the profiler."
    return f"{markdown(('function', 'calls a step', 'ms a step', 'share'), rows)}\n\n{total}"


def gpu_tests(results: dict[str, Any]) -> str:
    """Format the number of passed tests, and each other test with the last line of its output."""
    counted = ", ".join(f"{number} {outcome}" for outcome, number in results["outcomes"].items())
    others = [
        (f"`{row['test']}`", row["outcome"], row["said"].strip().rpartition("\n")[2])
        for row in results["rows"]
        if row["outcome"] != "passed"
    ]
    return f"{counted}.\n\n{markdown(('test', 'outcome', 'said'), others)}" if others else f"{counted}."


def gpu_overhead(results: dict[str, Any]) -> str:
    heading = (
        "",
        "step",
        "over bare",
        "first ten",
        "callbacks",
        "GPU time added",
        "launches",
        "memory added",
        "synchronisations added",
    )
    rows = [
        (
            f"{row['subject']}: {row['name']}",
            f"{row['step_ms']:.2f} ms",
            f"{row['step_ratio']:.3f}x",
            f"{row['first_steps_ratio']:.3f}x",
            "" if row["callbacks_ms"] is None else f"{row['callbacks_ms']:.2f} ms",
            "" if row["added_gpu_ms"] is None else f"{row['added_gpu_ms']:.2f} ms",
            "" if row["added_launches"] is None else f"{row['added_launches']:.0f}",
            "" if row["added_memory_mib"] is None else f"{row['added_memory_mib']:.0f} MiB",
            f"{row['added_synchronisations_per_step']:.1f}",
        )
        for row in results["rows"]
    ]
    return markdown(heading, rows)


def traces(results: dict[str, Any]) -> str:
    trace = results["trace"]
    sentence = f"A trace of {trace['events']:,} events, {trace['bytes'] / 1e6:.0f} MB."
    rows = [
        (name, *(values[key] for key in ("median_s", "min_s", "peak_mb")))
        for name, values in results["readers"].items()
    ]
    return f"{sentence}\n\n{markdown(('reader', 'median s', 'least s', 'peak MB'), rows)}"


#: The figures of a run in the table of session files, with their labels.
_SESSION_FIGURES = {
    "file_mb": "file, MB",
    "import_s": "import, s",
    "load_s": "load, s",
    "analyse_s": "analyse, s",
    "text_s": "text, s",
    "command_s": "`mpinspect report`, s",
    "command_peak_rss_mb": "its peak memory, MB",
    "median_call_ms": "handing a window over, median, ms",
    "longest_call_ms": "handing a window over, longest, ms",
    "longest_operation_ms_while_written": "longest operation of the training thread beside the writing, ms",
    "longest_operation_ms_alone": "the same without, ms",
}


def session(results: dict[str, Any]) -> str:
    """Format a table with a line per figure and a column per run."""
    runs = results["runs"]
    heading = [f"{run['layers'] * run['kinds']:,} tensors, {run['samples']:,} samples" for run in runs]
    lines = [
        (label, *(_figure(run.get(name)) for run in runs))
        for name, label in _SESSION_FIGURES.items()
        if any(name in run for run in runs)
    ]
    return markdown(("", *heading), lines)


def anything(results: Any) -> str:
    """Format results of any form: numbers in one table, each list of records as a table; without the targets."""
    if isinstance(results, list):
        return _records(results)
    plain = [(key, _figure(value)) for key, value in results.items() if not isinstance(value, (list, dict))]
    parts = [markdown(("", ""), plain)] if plain else []
    for key, value in results.items():
        if key != "checked" and isinstance(value, (list, dict)) and value:
            parts.append(f"{key}:\n\n{anything(value)}" if isinstance(value, dict) else _records(value))
    return "\n\n".join(parts)


# -- inside -----------------------------------------------------------------------------------------------------------------


def _pivot(rows: list[dict[str, Any]], down: str, across: str, cell: Any, heading: Any = str) -> str:
    """Format a table with a line per value of ``down`` and a column per value of ``across``, in order of appearance."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    cells = {(row[down], row[across]): cell(row) for row in rows}
    lines = [
        (name, *(cells.get((name, column), "") for column in columns))
        for name in dict.fromkeys(row[down] for row in rows)
    ]
    return markdown(("", *map(heading, columns)), lines)


def _records(records: list[Any]) -> str:
    if not all(isinstance(record, dict) for record in records):
        return ", ".join(map(_figure, records))
    keys = list(dict.fromkeys(key for record in records for key in record if not isinstance(record[key], (list, dict))))
    return markdown(keys, [[_figure(record.get(key)) for key in keys] for record in records])


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _or_dash(value)
    return f"{value:,}" if isinstance(value, int) else shown(value, "")


def _thousands(number: int) -> str:
    for unit, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:g}{name}"
    return str(number)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
