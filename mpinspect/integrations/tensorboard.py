"""TensorBoard's page "Ranges": the routes of its plugin. TensorBoard imports this module when it starts, and little with it.

The page (``tensorboard.js``) is a frame of TensorBoard's. It asks these routes for the runs below the log directory and
for a run's verdict and map, and again every few seconds while a run is being written.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from mpinspect.integrations.tensorboard_runs import Runs, roots_of


class RangesPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The page "Ranges". Reads session files below the log directory only."""

    plugin_name = "mpinspect_ranges"

    def __init__(self, context: Any) -> None:
        flags = context.flags
        self._runs = Runs(roots_of(context.logdir or "", getattr(flags, "logdir_spec", "") or ""))

    def frontend_metadata(self) -> Any:
        """Return what TensorBoard needs to show the page."""
        return base_plugin.FrontendMetadata(es_module_path="/tensorboard.js", tab_name="Ranges", disable_reload=True)

    def is_active(self) -> bool:
        """Return whether there is a run to show; takes 0.2 s at most."""
        return self._runs.any_soon()

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return the page's routes."""
        return {
            "/tensorboard.js": Request.application(_page),
            "/explorer.js": Request.application(_explorer),
            "/style.css": Request.application(_style),
            "/runs": Request.application(self._serve_runs),
            "/run": Request.application(self._serve_run),
        }

    def _serve_runs(self, request: Request) -> Response:
        return _respond(request, self._runs.listed(), "application/json")

    def _serve_run(self, request: Request) -> Response:
        answer = self._runs.answer(request.args.get("id", ""), request.args.get("version", ""))
        if answer is None:
            return _respond(
                request, {"error": "This run is no longer in the log directory."}, "application/json", code=404
            )
        return _respond(request, answer, "application/json")


def _page(request: Request) -> Response:
    return _respond(request, _text("mpinspect.integrations", "tensorboard.js"), "text/javascript")


def _explorer(request: Request) -> Response:
    from mpinspect.reporting.scripts import bundled

    return _respond(request, bundled("mpinspect.ranges.report", "explorer"), "text/javascript")


def _style(request: Request) -> Response:
    from mpinspect.reporting.html import STYLE

    sheets = (
        STYLE,
        _text("mpinspect.ranges.report", "explorer.css"),
        _text("mpinspect.integrations", "tensorboard.css"),
    )
    return _respond(request, "".join(sheets), "text/css")


def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text("utf-8")


def _respond(request: Request, content: Any, kind: str, code: int = 200) -> Response:
    response: Response = http_util.Respond(request, content, kind, code=code)
    return response
