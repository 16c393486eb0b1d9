"""Renders the front of a page as HTML: a bar, the picture, and a panel with the verdict, the change and the findings."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator

from mpinspect.reporting.document import Block, Document, Front, Listed, Tab
from mpinspect.reporting.finding import SEVERITIES_EXPLAINED, in_counts, inferred
from mpinspect.reporting.words import filled

STYLE = """
.mpinspect.front{padding:0}
main>.mpinspect.front{padding:0}
.mpinspect .bar{display:flex;flex-wrap:wrap;align-items:center;gap:.1em 1em;padding:.35em 1em;border-bottom:1px solid var(--line);
background:var(--raised);min-height:40px;box-sizing:border-box;font-size:.93em}
.mpinspect .bar h1{font-size:1.08em;margin:0;max-width:34em;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.mpinspect .state{border:1px solid currentColor;border-radius:3px;padding:0 .5em;font-weight:600;white-space:nowrap}
.mpinspect .state.good::before{content:var(--good-mark)}
.mpinspect .state.warning::before,.mpinspect .panel .warning>summary b::before{content:var(--warning-mark)}
.mpinspect .state.error::before,.mpinspect .panel .error>summary b::before{content:var(--error-mark)}
.mpinspect .facts{color:var(--soft);display:flex;flex-wrap:wrap;gap:0 1em;min-width:9em;line-height:1.5}
.mpinspect .facts span{white-space:nowrap;overflow:hidden;text-overflow:ellipsis;max-width:100%}
.mpinspect .screen{display:grid;grid-template-columns:minmax(0,1fr) clamp(20em,24.5vw,27em);position:relative}
.mpinspect .panel{grid-column:2;grid-row:1;padding:.7em 1em 1em;border-left:1px solid var(--line);overflow:auto;min-width:0}
.mpinspect .picture{grid-column:1;grid-row:1;padding:.4em 0 0 1em;min-width:0}
.mpinspect .panel h2{font-size:1em;margin:1em 0 .3em}.mpinspect .panel>:first-child{margin-top:0}
.mpinspect .panel p{text-wrap:pretty}.mpinspect .panel p.alarm{padding:.3em .6em;color:var(--error);font-size:1.05em}
.mpinspect .panel p.alarm.warning{color:var(--warning);border-color:currentColor}
.mpinspect .panel p.follows{font-size:1em;font-weight:400}
/* Room for 44 columns, the longest line of code. */
.mpinspect .panel pre{margin-bottom:.7em;padding:.5em .4em;font-size:.82em}
.mpinspect .panel ul{list-style:none;padding:0;margin:0}.mpinspect .panel li{margin:.15em 0}
.mpinspect .panel .dim{font-size:.93em}
.mpinspect .finding.warning{border-left-style:double}.mpinspect .panel .finding summary::marker{color:var(--soft)}
.mpinspect .panel .finding{border-left-width:4px;padding:.2em .6em;margin:.25em 0;background:var(--raised)}
.mpinspect .panel .finding summary{cursor:pointer}.mpinspect .panel .finding .place{color:var(--soft);margin-left:.5em}
.mpinspect .panel .finding .id{margin-left:.4em}
.mpinspect a{color:var(--info)}
.mpinspect .screen:not(:has(.explorer)) pre{user-select:all}
.mpinspect .screen:not(:has(.explorer,.tab)){display:block}.mpinspect .screen:not(:has(.explorer,.tab)) .panel{border:0}
.mpinspect.front>.terms{padding:0 clamp(.8em,3vw,2.5em) 1em}
.mpinspect .below{padding:1.2em clamp(.8em,3vw,2.5em) 0}
.mpinspect .below>:first-child{margin-top:0}
.mpinspect .tabs{display:flex;gap:.3em}.mpinspect .tabs input{position:absolute;opacity:0;margin:0;width:0}
.mpinspect .tabs label{border:1px solid var(--line);border-radius:3px;padding:0 .6em;cursor:pointer;background:var(--ground)}
.mpinspect .tabs input:checked+label{background:var(--ink);border-color:var(--ink);color:var(--ground)}
.mpinspect .tabs input:focus-visible+label{outline:2px solid var(--info);outline-offset:1px}
.mpinspect .tab{grid-column:1;grid-row:1;padding:.7em 1em 1em;min-width:0;overflow:auto}
.mpinspect .tab>:first-child{margin-top:0}
@media screen{.mpinspect:has(.tabs [value=ranges]:not(:checked)) .picture{display:none!important}
.mpinspect:has(.tabs [value=kernels]:not(:checked)) .tab.kernels,
.mpinspect:has(.tabs [value=shapes]:not(:checked)) .tab.shapes{display:none}}
@supports not selector(:has(a)){.mpinspect .tab{grid-row:auto}}
.mpinspect .panel .infos>summary{margin:.7em 0 .3em;cursor:pointer;font-weight:600}
@media (min-width:1001px){.mpinspect .bar{flex-wrap:nowrap;height:42px}.mpinspect .bar>*{flex:none}
.mpinspect .bar h1{flex:0 1 auto;min-width:3em}
/* Facts without room in the one line wrap out of sight, each as a whole. */
.mpinspect .bar .facts{flex:0 999 auto;min-width:0;height:1.5em;overflow:hidden}
.mpinspect .screen:has(.explorer,.tab){height:calc(100vh - 42px);min-height:34em}
.mpinspect .screen:has(.explorer,.tab)>*{min-height:0;height:100%;box-sizing:border-box}}
@media (scripting:none){.mpinspect .screen:has(.explorer,.tab){height:auto;min-height:0}}
/* One column: the verdict with its change, the picture, then the rest of the panel. */
@media screen and (max-width:1000px){.mpinspect .screen{display:flex;flex-direction:column}.mpinspect .panel{display:contents}
.mpinspect .panel>*{margin-inline:1em!important}.mpinspect .panel>:is(.dim,h2,ul,section,details){order:2}
.mpinspect .bar .facts{flex:1}
.mpinspect .panel>:first-child{margin-top:.7em}.mpinspect .panel>:last-child{margin-bottom:1em}
.mpinspect .picture,.mpinspect .tab{order:1;padding:.4em 1em 0;min-height:0}}
@media screen and (max-width:760px){.mpinspect .bar .facts{flex:1 1 100%;max-height:3em;overflow:hidden}}
@media print{.mpinspect .tabs{display:none}
.mpinspect .screen{display:block;height:auto!important}.mpinspect .panel{border:0;overflow:visible}
.mpinspect .screen>*{height:auto!important}.mpinspect .tab{overflow:visible}
.mpinspect .panel details::details-content{content-visibility:visible;height:auto}}
"""

_EXPLAINED = f' title="{SEVERITIES_EXPLAINED}"'
#: Renders a block at a level of headings.
Render = Callable[[Block, int], Iterator[str]]
#: Renders a document at a level of headings.
RenderDocument = Callable[[Document, int], Iterator[str]]
#: Turns text into HTML.
Escape = Callable[[str], str]


def front(
    document: Document, shown: Front, escape: Escape, render: Render, render_document: RenderDocument
) -> Iterator[str]:
    """Yield the parts of the front of a page.

    Args:
        document: the document, which must already be escaped.
        shown: its front.
        escape: turns text into HTML.
        render: renders a block.
        render_document: renders the document of a tab.
    """
    yield '<header class="bar">'
    yield f'<h1 title="{html.escape(document.title)}">{escape(shown.name)}</h1>'
    yield f'<span class="state {shown.tone}"{_EXPLAINED}>{escape(shown.state)}</span>'
    yield from _switch(shown, escape)
    if shown.facts:
        yield f'<span class="facts" title="{html.escape("; ".join(shown.facts))}">'
        yield from (f"<span>{escape(fact)}</span>" for fact in shown.facts)
        yield "</span>"
    yield "</header>"
    yield '<div class="screen">'
    yield '<section class="panel" tabindex="0" aria-label="Verdict, change and findings">'
    if shown.headline:
        yield f'<p class="{shown.tone}">{escape(shown.headline)}</p>'
    # The document's alarm may be of another model than the headline.
    if alarm := shown.alarm or (not shown.headline and document.alarm):
        classes = f"alarm {shown.tone}{' follows' * bool(shown.headline)}"
        yield f'<p class="{classes}">{escape(alarm)}</p>'
    for block in shown.verdict:
        yield from render(block, 1)
    yield from _findings(shown, escape)
    yield from (f'<p class="dim">{escape(note)}</p>' for note in shown.notes)
    yield "</section>"
    if shown.picture is not None:
        yield from render(shown.picture, 1)
    for tab in shown.tabs:
        name = tab.title.lower()
        yield f'<section class="tab {name}" tabindex="0" aria-label="{html.escape(tab.title)}">'
        yield from render_document(tab.document, 1)
        yield "</section>"
    if shown.picture is None and not shown.tabs:
        yield f'<p class="picture strong">{escape(shown.without)}</p>'
    yield "</div>"


def _findings(shown: Front, escape: Escape) -> Iterator[str]:
    """Yield the findings that ask for a change; below them, closed, the others."""
    for is_alarm, opens, closes in (
        (True, "<h2{}>{}</h2><ul>", "</ul>"),
        (False, '<details class="infos"><summary{}>{}</summary><ul>', "</ul></details>"),
    ):
        listed = [each for each in shown.findings if each.finding.is_alarm == is_alarm]
        if listed:
            yield opens.format(_EXPLAINED, in_counts(each.finding for each in listed))
            yield from (f"<li>{''.join(_listed(each, escape))}</li>" for each in listed)
            yield closes


def _switch(shown: Front, escape: Escape) -> Iterator[str]:
    """Yield the switch between the picture and the tabs, which needs no script; nothing if there is only one of them."""
    titles = [*(("Ranges",) if shown.picture is not None else ()), *map(_titled, shown.tabs)]
    if len(titles) < 2:
        return
    yield '<span class="tabs" role="radiogroup" aria-label="What is shown">'
    for place, title in enumerate(titles):
        name = title.split(" ")[0].lower()
        checked = "" if place else " checked"
        yield f'<input type="radio" name="tab" id="tab-{name}" value="{name}"{checked}>'
        yield f'<label for="tab-{name}">{escape(title)}</label>'
    yield "</span>"


def _titled(tab: Tab) -> str:
    return tab.title + filled(" ({})", tab.alarms)


def _listed(listed: Listed, escape: Escape) -> Iterator[str]:
    """Yield a finding that opens; one whose message stands in the verdict above is only a line."""
    finding = listed.finding
    step = filled(' data-step="{}"', finding.step)
    thing = filled(' data-thing="{}"', html.escape(listed.thing))
    places = (
        listed.thing,
        *listed.others,
        listed.place or filled("'{}'", finding.layer),
        filled("step {}", finding.step),
    )
    where = ", ".join(filter(None, places))
    yield (
        f'<details class="finding {html.escape(finding.severity)}" data-layer="{html.escape(finding.layer)}"{step}{thing}>'
        f'<summary><b>{escape(finding.severity)}</b><span class="id">{escape(finding.id)}</span>'
        f'<span class="place">{escape(inferred(finding))} {escape(where)}</span></summary>'
    )
    if finding.message:
        yield f"<p>{escape(finding.message)}</p>"
    if finding.fix:
        yield f'<p class="fix">{escape(finding.fix)}</p>'
    if finding.code:
        yield code_block(finding.code)
    if listed.link:
        yield f'<p><a href="{html.escape(listed.link)}">about {escape(finding.id)}</a></p>'
    yield "</details>"


def code_block(code: str) -> str:
    """Return code as HTML. Each line is an element: it wraps between words, indented, and is not taken for two lines."""
    escaped = (html.escape(line, quote=False) for line in code.split("\n"))
    lines = "\n".join(f"<span{' class=comment' * line.lstrip().startswith('#')}>{line}</span>" for line in escaped)
    return f"<pre>{lines}</pre>"
