"""Output methods of report objects: the only place where analysis imports the reporting code, and only on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from mpinspect.reporting.finding import Finding


class RendersItself:
    """Mixin for reports: ``str()``, ``_repr_html_()`` for notebooks, ``show()``, ``to_json()`` and ``save(path)``."""

    #: The kind of report, a key of ``forms.KINDS``.
    kind: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def findings(self) -> tuple[Finding, ...]: ...

    def __repr__(self) -> str:
        """Return one line, for a prompt or a debugger, since the fields hold every count of a run."""
        return f"<{type(self).__name__}: {len(self.findings)} findings; print() shows it, save() writes it>"

    def __str__(self) -> str:
        from mpinspect.reporting.forms import render

        return render(self, ".txt")

    def _repr_html_(self) -> str:
        from mpinspect.reporting.forms import document
        from mpinspect.reporting.html import fragment

        return fragment(document(self))

    def show(self) -> None:
        """Show the report's page in a notebook, in a separate frame that runs the page's scripts.

        Raises:
            ModuleNotFoundError: IPython is not installed.
        """
        try:
            from IPython.display import HTML, display
        except ImportError as error:
            raise ModuleNotFoundError(
                "show() needs a notebook (IPython is not installed); save('report.html') opens in any browser"
            ) from error
        from html import escape

        from mpinspect.reporting.forms import render

        page = escape(render(self, ".html"))
        frame = '<iframe sandbox="allow-scripts" style="width:100%;height:56rem;border:0"'
        display(HTML(f'{frame} srcdoc="{page}"></iframe>'))

    def to_json(self) -> str:
        """Return the report as JSON text (schemas: docs/report-schema.md, shape-lint.md, tensor-cores.md, run.md)."""
        from mpinspect.reporting.forms import render

        return render(self, ".json")

    def save(self, path: str | Path) -> Path:
        """Write the report in the form that the suffix selects: .txt .md .html .json, or .png if the kind has a plot.

        Returns:
            The path. Parent directories are created.

        Raises:
            ValueError: the suffix is another one.
            OSError: the file can't be written.
        """
        from mpinspect.reporting.forms import save

        return save(self, path)
