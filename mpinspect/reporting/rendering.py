"""What a report can do about itself: the one place in which analysis reaches the reports, and only when it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from mpinspect.reporting.finding import Finding


class RendersItself:
    """``str()``, ``_repr_html_()`` for notebooks, ``to_json()`` and ``save(path)`` of a report."""

    #: What kind of report it is, a key of ``forms.KINDS``.
    kind: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def findings(self) -> tuple[Finding, ...]: ...

    def __repr__(self) -> str:
        """Return one line, for a prompt or a debugger: the fields hold every count of a run."""
        return f"<{type(self).__name__}: {len(self.findings)} findings; print() shows it, save() writes it>"

    def __str__(self) -> str:
        from mpinspect.reporting.forms import render

        return render(self, ".txt")

    def _repr_html_(self) -> str:
        from mpinspect.reporting.forms import document
        from mpinspect.reporting.html import fragment

        return fragment(document(self))

    def show(self) -> None:
        """Show the page in a notebook, in a frame of its own in which its scripts run.

        Raises:
            ModuleNotFoundError: there is no IPython.
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
        """Return the report as JSON text (schemas: docs/report-schema.md, docs/shape-lint.md, docs/tensor-cores.md)."""
        from mpinspect.reporting.forms import render

        return render(self, ".json")

    def save(self, path: str | Path) -> Path:
        """Write the report in the form that the suffix names: .txt .md .html .json, and .png where there is a picture of it.

        Returns:
            The path. Parent directories are made.

        Raises:
            ValueError: another suffix.
            OSError: the file can't be written.
        """
        from mpinspect.reporting.forms import save

        return save(self, path)
