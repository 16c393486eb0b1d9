"""Shared fixtures and hooks: the --update-golden switch, a deterministic torch, and GPU tests skipped with a reason."""

import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# A caller such as a CI may force colours, which would change the output that tests check.
for name in ("FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(name, None)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files in tests/golden, then look at the diff"
    )


def pytest_configure() -> None:
    """Disable hypothesis's deadline, which a busy machine would exceed."""
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("unhurried", settings(), deadline=None)
    settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during collection, whose thousands of objects all stay alive."""
    gc.disable()
    collected = yield
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    reason = _why_no_gpu()
    if reason:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionstart() -> None:
    """Ensure that SIGINT and SIGHUP reach the processes that tests start.

    A run in the background (``nohup ... &``) ignores both signals, and children would inherit this. A signal that has a
    handler is reset to its default in a child.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_IGN:
        # An empty handler: under nohup, the run itself must survive its terminal.
        signal.signal(hangup, lambda number, frame: None)


@pytest.fixture(scope="session", autouse=True)
def _what_counts_is_compiled() -> None:
    """Compile the counting loops before the first test, so that no process prints a line about compiling to stderr.

    One process compiles and the others load its loops, so the cache stays unchanged while tests run.
    """
    from filelock import FileLock

    from mpinspect.counting import fastest

    with FileLock(Path(tempfile.gettempdir()) / "mpinspect-tests-compile.lock"):
        fastest.warm_up(compile_here=True)


@pytest.fixture(scope="module", autouse=True)
def _nothing_passes_from_file_to_file() -> Iterator[None]:
    """Hide a million existing objects from the garbage collector and from code that searches its objects; check the threads.

    A file that leaves torch with two threads would make the trainings of all later files take six times as long. Dynamo counts
    what earlier files compiled, and a step in a process with compiled code is not computed twice. torchao remembers that an
    earlier file has converted a model, so that a model without a converted layer would be reported.
    """
    import torch

    converter = sys.modules.get("torchao.float8._inductor_patch")
    if converter is not None:
        converter._PATCHED = False  # type: ignore[attr-defined]

    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()
    threads = torch.get_num_threads()
    gc.collect()
    gc.freeze()
    _hidden["modules"] = len(sys.modules)
    yield
    assert torch.get_num_threads() == threads


@pytest.fixture(autouse=True)
def _imports_are_hidden_too(_nothing_passes_from_file_to_file: None) -> None:
    """Hide the objects of large packages that a file's earlier tests imported, as those of earlier files."""
    if len(sys.modules) > _hidden.get("modules", 0) + 200:
        gc.collect()
        gc.freeze()
        _hidden["modules"] = len(sys.modules)


_hidden: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _torch_is_seeded() -> None:
    """Seed torch with 0, so that a test computes the same alone, in its file, and in any order."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` asserts that the text equals tests/golden/``name``; --update-golden rewrites the file."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: run pytest with --update-golden and look at what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; if that is meant, run with --update-golden"

    return check


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set torch's number of threads; restore it afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make a gloo process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def deterministic_torch() -> Iterator[int]:
    """Seed torch with 0 and use deterministic algorithms; restore both afterwards. Yields the seed."""
    import torch

    before, state = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield 0
    torch.use_deterministic_algorithms(before)
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'mpinspect[browser]'")
    program = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium, which is not installed")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=options)
        yield running
        running.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``show(report)`` opens a report's page, or a file, without a network; no page may print or request anything.

    ``awaited`` selects an element that the page is waited for; the other options are those of a browser's context.
    """
    troubles: list[str] = []
    numbers = itertools.count()

    def opened(
        report: Any, address: str = "", *, awaited: str = ".explorer tbody tr[data-name]", **options: Any
    ) -> Any:
        path = report if isinstance(report, Path) else report.save(tmp_path / f"{next(numbers)}.html")
        page = browser.new_context(offline=True, **{"viewport": {"width": 1440, "height": 900}, **options}).new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: troubles.extend([] if request.url.startswith("file:") else [request.url]))
        page.goto(f"file://{path}{address}")
        if awaited:
            page.wait_for_selector(awaited)
        return page

    yield opened
    assert troubles == []


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, which checks the accessibility of a page."""
    from node_places import NODE_PLACES

    found = next((path for place in NODE_PLACES if (path := place / "axe-core" / "axe.min.js").is_file()), None)
    if found is None:
        pytest.skip("needs axe-core: make .venv/.js")
    return found.read_text("utf-8")


@pytest.fixture
def peak_mb() -> Iterator[Callable[[], float]]:
    """``peak_mb()`` returns the peak memory of Python objects and NumPy arrays since the test began, in MB."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()


def _why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    built = "torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
    return f"needs a CUDA device: {built}"
