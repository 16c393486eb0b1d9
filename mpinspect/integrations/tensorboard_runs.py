"""Finds the session files below TensorBoard's log directories, and reads them for the page "Ranges". Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpinspect.reporting.streams import printable

if TYPE_CHECKING:
    from mpinspect.ranges.session import Session

#: The session file's name: ``ranges.store.FILE_NAME``, which imports NumPy.
FILE_NAME = "session.mpinspect"
#: The files of a run directory with its models' shapes and kernels, under their names in ``run.record``.
BESIDE = ("run.json", "report.json", "trace.json.gz")
#: Folder of the sum of a job's ranks, which rank 0 writes; it has the same name in ``run.directory``.
ALL_RANKS = "all-ranks"
#: Most runs that are listed: a longer page is slow and hard to search.
MOST_RUNS = 2_000
#: A listing is reused for so many seconds, or for so many times the seconds that it took, whichever is longer.
_LISTING_S, _LISTING_TIMES = 2.0, 20.0
#: Most answers in the cache: one of 2,000 layers has some megabytes.
_MOST_KEPT = 8
#: Addresses of remote storage, which TensorBoard reads and mpinspect does not.
_REMOTE = re.compile(r"[a-zA-Z][0-9a-zA-Z.]*://")
#: The directories of a job's ranks, as ``mpinspect run`` names them.
_RANK = re.compile(r"rank\d+")


@dataclass(frozen=True)
class Found:
    """A session file.

    Args:
        id: identifies the run in requests; derived from its place, so that a request holds no path.
        name: its directory relative to the log directory, as TensorBoard names the run.
        root: the log directory.
        path: the file.
        version: changes with the file, and with other files of its run directory.
        written: when it was last written to, in seconds since 1970.
        ranks: the files of all ranks, if this is a model of several, to be added up; ``path`` is the first of them.
        has_beside: whether its run directory may be read: it lies in the log directory, and no link leads out of it.
    """

    id: str
    name: str
    root: Path
    path: Path
    version: str
    written: float
    ranks: tuple[Path, ...] = ()
    has_beside: bool = False


@dataclass
class Listing:
    """The session files found, by id, and sentences on what could not be searched."""

    runs: dict[str, Found] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)


class Runs:
    """The runs below TensorBoard's log directories, searched and read on request. Thread-safe.

    Args:
        roots: the log directories by the name that their runs begin with ("" for ``--logdir``).
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = roots
        self._listing = Listing()
        self._searched = -float("inf")
        self._took_s = 0.0
        self._searching, self._reading = threading.Lock(), threading.Lock()
        self._search: threading.Thread | None = None
        self._kept: dict[str, tuple[str, bytes]] = {}

    def any_soon(self, most_s: float = 0.2) -> bool:
        """Return whether a run has been found within ``most_s`` seconds; a thread continues the search."""
        if not self._listing.runs and (self._search is None or not self._search.is_alive()):
            self._search = threading.Thread(target=self.listing, name="mpinspect-runs", daemon=True)
            self._search.start()
            self._search.join(most_s)
        return bool(self._listing.runs)

    def listing(self) -> Listing:
        """Return the session files; searches again if the last search is some seconds old."""
        with self._searching:
            begun = time.monotonic()
            if begun - self._searched > max(_LISTING_S, _LISTING_TIMES * self._took_s):
                self._listing = _search(self._roots)
                self._searched = time.monotonic()
                self._took_s = self._searched - begun
            return self._listing

    def listed(self) -> dict[str, Any]:
        """Return the page's list: the runs by name, and sentences on directories that could not be searched."""
        found = self.listing()
        where = ", ".join(map(printable, self._roots.values())) or "no local directory"
        runs = [
            {"id": run.id, "name": printable(run.name), "written": run.written}
            for run in sorted(found.runs.values(), key=lambda run: _by_number(run.name))
        ]
        return {"runs": runs, "where": where, "troubles": found.troubles, "now": time.time()}

    def answer(self, id: str, version: str = "") -> bytes | None:
        """Return a run's report as JSON, or its version alone if that is ``version``; None if there is no such run."""
        found = self._listing.runs.get(id) or self.listing().runs.get(id)
        with self._reading:
            # The file may have grown, been deleted, or become a link since the search.
            run = found and _as_it_is(found)
            if run is None:
                return None
            if run.version == version:
                return _json({"version": version})
            known, text = self._kept.pop(id, ("", b""))
            if known != run.version:
                text = _json({"version": run.version, **_read(run)})
            self._kept[id] = (run.version, text)
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return text


def roots_of(logdir: str, logdir_spec: str) -> dict[str, str]:
    """Return TensorBoard's local log directories by the name that their runs begin with; remote ones are left out."""
    named = [("", logdir)]
    if not logdir:
        named = list(map(_named, filter(None, logdir_spec.split(","))))
    return {name: str(Path(path).expanduser()) for name, path in named if not _REMOTE.match(path)}


def _named(part: str) -> tuple[str, str]:
    """Return the name and the path of a part of ``--logdir_spec``; without a name, the path is the name."""
    name, colon, path = part.partition(":")
    if not colon or _REMOTE.match(part) or part[0] == "/" or os.path.splitdrive(part)[0]:
        return part, part
    return name, path


# -- searching ------------------------------------------------------------------------------------------------------------


def _search(roots: Mapping[str, str]) -> Listing:
    found = Listing()
    for label, root in roots.items():
        for run in _below(Path(root), label, found.troubles):
            if len(found.runs) == MOST_RUNS:
                found.troubles.append(
                    f"There are more than {MOST_RUNS:,} runs: start TensorBoard on a directory with fewer."
                )
                return found
            found.runs[run.id] = run
    sums = {run.id: run for run in _of_all_ranks(list(found.runs.values()))}
    # Rank 0 also writes a sum of these files, which is a little older.
    kept = {run.path.parent.parent.parent / ALL_RANKS / run.path.parent.name for run in sums.values()}
    found.runs = {id: run for id, run in found.runs.items() if run.path.parent not in kept} | sums
    return found


def _of_all_ranks(runs: list[Found]) -> Iterator[Found]:
    """Yield a run for each model that several ranks recorded: rank0/Net and rank1/Net of one directory."""
    groups: dict[Path, list[Found]] = {}
    for run in sorted(runs, key=lambda run: _by_number(run.name)):
        model = run.path.parent
        if _RANK.fullmatch(model.parent.name):
            groups.setdefault(model.parent.parent / model.name, []).append(run)
    for group in groups.values():
        if len(group) > 1:
            *above, _, model_name = ("", *group[0].name.rsplit("/", 2))
            yield _together(group, "/".join(filter(None, (*above, f"{model_name} of {len(group)} ranks"))))


def _together(group: list[Found], name: str) -> Found:
    paths = tuple(run.path for run in group)
    id = hashlib.sha256(b"\0".join(map(os.fsencode, paths))).hexdigest()[:16]
    version = hashlib.sha256(" ".join(run.version for run in group).encode()).hexdigest()[:16]
    first, written = group[0], max(run.written for run in group)
    return Found(id, name, first.root, paths[0], version, written, paths, first.has_beside)


def _as_it_is(found: Found) -> Found | None:
    """Return a run with the present state of its files; None if all were deleted."""
    if not found.ranks:
        return _looked_at(found.root, found.path)
    group = [run for path in found.ranks if (run := _looked_at(found.root, path)) is not None]
    return _together(group, found.name) if group else None


def _below(root: Path, label: str, troubles: list[str]) -> Iterator[Found]:
    """Yield the session files below a directory; links that lead out of it are not followed."""
    try:
        root = root.resolve(strict=True)
    except OSError as error:
        troubles.append(f"{printable(str(root))} can't be searched: {error.strerror or error}.")
        return

    def failed(error: OSError) -> None:
        troubles.append(f"{printable(str(error.filename))} can't be searched: {error.strerror or error}.")

    links = 0
    for folder, folders, files in os.walk(root, onerror=failed):
        links += sum(_leads_out(root, Path(folder) / name) for name in folders)
        if FILE_NAME in files:
            run = _looked_at(root, Path(folder) / FILE_NAME, label)
            if run is not None:
                yield run
            else:
                links += 1
    if links:
        troubles.append(f"Not followed: {links:,} links out of {printable(str(root))}.")


def _leads_out(root: Path, folder: Path) -> bool:
    return folder.is_symlink() and not folder.resolve().is_relative_to(root)


def _looked_at(root: Path, path: Path, label: str = "") -> Found | None:
    """Return the session file's present state; None if it was deleted, or is a link out of the log directory."""
    try:
        if not path.resolve(strict=True).is_relative_to(root):
            return None
        status = path.stat()
    except OSError:
        return None
    below = path.parent.relative_to(root).as_posix()
    name = below
    if label:
        name = label if below == "." else f"{label}/{below}"
    id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    beside = _beside(root, path)
    version = "-".join(f"{each.st_mtime_ns}-{each.st_size}-{each.st_ino}" for each in (status, *beside))
    return Found(id, name, root, path, version, status.st_mtime, has_beside=bool(beside))


def _beside(root: Path, path: Path) -> list[os.stat_result]:
    """Return the status of each file of the session's run directory; () if it lies outside or a link leads out."""
    place = path.parent.parent
    if not place.is_relative_to(root):
        return []
    found = []
    for name in BESIDE:
        # A loop of links is a RuntimeError before Python 3.13.
        with suppress(OSError, RuntimeError):
            if not (place / name).resolve(strict=True).is_relative_to(root):
                return []
            found.append((place / name).stat())
    return found


def _by_number(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts rank2 before rank10."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


# -- reading --------------------------------------------------------------------------------------------------------------


def _read(run: Found) -> dict[str, Any]:
    """Return a run's verdict, findings and map, or a sentence on why it can't be read. Never raises."""
    from mpinspect.ranges.analyse import analyse
    from mpinspect.ranges.analysis.ranks import NotOneModelError
    from mpinspect.ranges.store import SessionError, read_session
    from mpinspect.run.reading import run_of_model
    from mpinspect.run.report import ModelPart, RunReport

    try:
        report = analyse(_added_up(run) if run.ranks else read_session(run.path))
        part = ModelPart(run.path.parent.name, report)
        whole = run_of_model(run.path, part) if run.has_beside else RunReport("", "", (part,))
        return _shown(whole, whole.parts.index(part))
    except NotOneModelError as error:
        return {"error": printable(f"The ranks can't be added up ({error}): open each rank by itself.")}
    except (SessionError, OSError) as error:
        return {"error": printable(str(error))}
    except Exception as error:
        return {
            "error": printable(f"mpinspect failed to read {run.path} ({error!r}): please report this, with the file.")
        }


def _added_up(run: Found) -> Session:
    """Return the sum of the ranks, with measurements of the ranks that ended early."""
    from mpinspect.ranges.analysis.ranks import RankSum
    from mpinspect.ranges.store import read_session
    from mpinspect.run.ranks import early_end
    from mpinspect.run.record import read_record

    total = RankSum()
    for path in run.ranks:
        total.add(read_session(path))
    places = [path.parent.parent for path in run.ranks if run.has_beside]
    left = [early_end(place.name, read_record(place)) for place in places]
    return total.session(ended_early=[each for each in left if each is not None])


def _shown(run: Any, place: int) -> dict[str, Any]:
    """Return the page's data of one model of a run."""
    from mpinspect.ranges.kinds import UPDATE
    from mpinspect.ranges.report.document import title, verdict_blocks
    from mpinspect.ranges.report.explorer import packed
    from mpinspect.ranges.report.layers import seen_layers
    from mpinspect.ranges.report.scale_line import steps_and_samples
    from mpinspect.reporting.document import Code, Line
    from mpinspect.reporting.escaping import escaped
    from mpinspect.reporting.finding import gravest_first, inferred
    from mpinspect.run.report.module_notes import module_notes

    run = escaped(run)
    name, report = run.parts[place].name, run.parts[place].ranges
    progress = report.session.progress
    blocks = verdict_blocks(report.verdict)
    lines = {block.text: block.tone for block in blocks if isinstance(block, Line)}
    code = {block.text: "code" for block in blocks if isinstance(block, Code)}
    verdict = [{"text": text, "tone": tone} for text, tone in (lines | code).items()]
    findings = [
        {
            "severity": finding.severity,
            "id": f"{finding.id}{inferred(finding)}",
            "message": finding.message,
            "fix": finding.fix,
            "code": finding.code,
        }
        for finding in gravest_first(report.findings)
    ]
    has_map = any(layer.kind != UPDATE for layer in seen_layers(report))
    return {
        "title": title(report),
        "ended": progress.ended,
        "steps": steps_and_samples(progress, progress.so_far),
        "verdict": verdict,
        "findings": findings,
        "notes": [*run.saw, *report.session.notes],
        "map": packed(report, module_notes(run)[name]) if has_map else None,
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
