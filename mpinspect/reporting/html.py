"""Renders documents as HTML: a self-contained page, or a fragment for notebooks, each with light and dark schemes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources

from mpinspect.reporting.document import (
    Block,
    Cell,
    Code,
    Column,
    Document,
    Findings,
    Item,
    Items,
    Line,
    Parts,
    Section,
    Strip,
    Tables,
    Widget,
    item_words,
    legend_words,
    shown_items,
    shown_parts,
    shown_tables,
    static,
    without_front_sections,
)
from mpinspect.reporting.escaping import escaped
from mpinspect.reporting.finding import Finding, gravest_first, inferred
from mpinspect.reporting.html_front import STYLE as FRONT_STYLE
from mpinspect.reporting.html_front import code_block, front
from mpinspect.reporting.page import said_once
from mpinspect.reporting.palette import css_variables
from mpinspect.reporting.scripts import bundled
from mpinspect.reporting.terms import explained
from mpinspect.reporting.words import filled, optional

STYLE = f"""
.mpinspect{{color-scheme:light dark;{css_variables()}}}
@media (prefers-color-scheme:dark){{.mpinspect{{{css_variables(is_dark=True)}}}}}
@media print{{.mpinspect{{{css_variables()}color-scheme:light}}}}
"""
STYLE += """
.mpinspect{background:var(--ground);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;text-align:left;padding:1px 0;
overflow-wrap:anywhere}
.mpinspect h1,.mpinspect h2,.mpinspect h3,.mpinspect h4{line-height:1.25;margin:1.6em 0 .5em;font-weight:600;color:inherit}
.mpinspect h1{font-size:1.5em;margin-top:.4em}.mpinspect h2{font-size:1.15em}.mpinspect h3{font-size:1em}
.mpinspect h4{font-size:1em;color:var(--soft)}
.mpinspect p{margin:.35em 0;max-width:62em}.mpinspect ul{margin:.35em 0;padding-left:1.3em;max-width:62em}
.mpinspect li{margin:.2em 0}.mpinspect ul.plain{list-style:none;padding-left:0}
.mpinspect .alarm{border-left:4px solid var(--error);background:var(--raised);padding:.6em .9em;font-weight:600}
.mpinspect .strong{font-weight:600}.mpinspect .dim,.mpinspect .legend,.mpinspect .rest,.mpinspect small{color:var(--soft)}
.mpinspect .legend{font-size:.86em;margin-top:.6em}.mpinspect .good{color:var(--good)}.mpinspect .warning{color:var(--warning)}
.mpinspect .error{color:var(--error)}.mpinspect .unknown{color:var(--unknown)}.mpinspect .info{color:var(--info)}
.mpinspect p.good,.mpinspect p.error,.mpinspect p.warning{font-weight:600}
.mpinspect .finding{border-left:4px solid currentColor;background:var(--raised);margin:.5em 0;padding:.5em .9em;max-width:61em}
.mpinspect .finding p{color:var(--ink);margin:.15em 0}.mpinspect .finding .id{font-weight:600;margin-left:.5em;color:var(--ink)}
.mpinspect .finding .fix::before{content:"Fix: ";font-weight:600}
.mpinspect pre{background:var(--raised);border:1px solid var(--line);padding:.5em .8em;margin:.4em 0;overflow-x:auto;
max-width:60em;font:.92em/1.45 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;color:var(--ink);white-space:pre-wrap}
.mpinspect pre .comment{color:var(--soft)}
.mpinspect pre span{display:inline-block;width:100%;box-sizing:border-box;padding-left:2ch;text-indent:-2ch}
.mpinspect .scroll{overflow-x:auto;margin:.4em 0}
.mpinspect table{border-collapse:collapse;font-size:.93em;font-variant-numeric:tabular-nums;margin:0;background:none;border:0}
.mpinspect th,.mpinspect td{padding:.28em .7em;text-align:right;vertical-align:top;border:0;border-bottom:1px solid var(--line);
background:none;white-space:nowrap;color:inherit}
.mpinspect th{font-weight:600;vertical-align:bottom;border-bottom:2px solid var(--line);color:var(--soft);
white-space:normal;overflow-wrap:normal}
.mpinspect thead td{border-bottom:2px solid var(--line)}
.mpinspect th.left,.mpinspect td.left{text-align:left}.mpinspect td.name{white-space:normal;min-width:11em}
.mpinspect td.long{white-space:normal;min-width:18em}
.mpinspect td small{display:block;white-space:normal;max-width:46em}
.mpinspect tbody tr:hover{background:var(--raised)}
.mpinspect td.good,.mpinspect td.warning,.mpinspect td.error,.mpinspect td.unknown{font-weight:600}
.mpinspect .strip{display:inline-flex;background:var(--raised);height:1em;vertical-align:-.1em}
.mpinspect .strip span{display:flex;border-left:1px solid var(--soft)}.mpinspect .strip span:first-child{border-left:0}
.mpinspect .strip i{width:4px;height:100%;background:var(--fill);opacity:0}
.mpinspect .strip .s1{opacity:.16}.mpinspect .strip .s2{opacity:.34}.mpinspect .strip .s3{opacity:.62}
.mpinspect .strip .s4{opacity:1}
.mpinspect table:has(.amount){width:100%}.mpinspect td:has(.amount){width:38%}
.mpinspect table:has(.amount) td.name{min-width:16em}
.mpinspect .amount{display:inline-block;width:calc(100% - 5em);margin-right:.7em;vertical-align:-.1em}
.mpinspect .amount i{display:block;height:1em;min-width:1px;background:currentColor}
.mpinspect .part{border-top:1px solid var(--line);margin-top:2em}.mpinspect .part>h2{color:var(--soft);font-weight:400}
@media (max-width:1200px){.mpinspect td:has(.amount){width:22%}}
@media (max-width:760px){.mpinspect .p3,.mpinspect .p4{display:none}.mpinspect th,.mpinspect td{padding:.28em .45em}}
@media (max-width:480px){.mpinspect .amount{width:11vw}.mpinspect table:has(.amount) td.name{min-width:7.5em}
.mpinspect .p1,.mpinspect .p2{display:none}
.mpinspect td.name{min-width:7.5em}.mpinspect td.long{min-width:12em}
.mpinspect th,.mpinspect td{padding:.28em .3em}}
.mpinspect dfn{font-style:normal;border-bottom:1px dotted var(--soft);cursor:help;position:relative}
.mpinspect dfn .meaning{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.mpinspect dfn:hover .meaning,.mpinspect dfn:focus .meaning{clip-path:none;width:max-content;max-width:min(24em,70vw);height:auto;
left:0;top:1.5em;z-index:9;background:var(--ink);color:var(--ground);padding:.3em .6em;border-radius:3px;font-weight:400;
white-space:normal}
.mpinspect .terms dt{font-weight:600}.mpinspect .terms dd{margin:0 0 .4em 0;max-width:62em}
@media print{.mpinspect .scroll{overflow:visible}.mpinspect .finding,.mpinspect tr,.mpinspect figure{break-inside:avoid}
.mpinspect :is(.amount,.strip) i{print-color-adjust:exact}
.mpinspect .strip{max-width:24em}.mpinspect .strip :is(span,i){flex:0 1 auto;min-width:0}}
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'{scripts_allowed}">
<title>{title}</title>
<style>{style}body{{margin:0}}
main>.mpinspect{{padding:1.2em clamp(.8em,3vw,2.5em) 3em;min-height:100vh;box-sizing:border-box}}</style>
</head>
<body>
<main>
{body}
</main>{scripts}
</body>
</html>
"""
#: Columns with a cell of more characters than this are wrapped.
_LONG = 48
#: Smallest share of each shade of a strip, from the second shade on.
_SHADES = (1e-3, 1e-2, 1e-1)
_STRIP_LEGEND = (
    "the picture: the stronger the colour, the larger the share (under 0.1%, under 1%, under 10%, 10% or more); the lines are "
    "the format's edges"
)


#: A power of two, as every form writes it, and the digits that a page raises.
_POWER = re.compile(r"\b2\^(-?\d+(?:\.\d+)?)")
_RAISED = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")


def escape(text: str) -> str:
    """Return text escaped for use between HTML tags, with powers of two as superscripts and arrows that no line breaks."""
    escaped = html.escape(text, quote=False).replace(" -&gt; ", " → ")
    return _POWER.sub(lambda match: f"2{match[1].translate(_RAISED)}", escaped)


def render(document: Document) -> str:
    """Return a complete, styled page that works offline; every name in it is escaped.

    Only the scripts of the document's widgets run: the page's security policy lists their hashes and allows no others.
    """
    document = said_once(escaped(document))
    body = _article(document)
    picture = getattr(document.front, "picture", None)
    kinds = {(widget.package, widget.name): widget for widget in _widgets(filter(None, (picture, *document.blocks)))}
    scripts = [bundled(*kind) + "\nstart();\n" for kind in kinds]
    hashes = [base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts]
    return _PAGE.format(
        title=escape(document.title),
        style=STYLE + FRONT_STYLE * bool(document.front) + "".join(_sheet(*kind) for kind in kinds),
        body=body,
        scripts_allowed=filled("; script-src{}", "".join(f" 'sha256-{hash}'" for hash in hashes)),
        scripts="".join(f'\n<script type="module">{script}</script>' for script in scripts),
    )


def fragment(document: Document) -> str:
    """Return the document, without widgets, as an HTML element for a notebook cell; its style affects only itself."""
    return f"<style>{STYLE}</style>\n{_article(static(said_once(escaped(document))))}\n"


def _sheet(package: str, name: str) -> str:
    return resources.files(package).joinpath(f"{name}.css").read_text("utf-8")


def _widgets(blocks: Iterable[Block]) -> Iterator[Widget]:
    """Yield all widgets of the blocks, also in nested documents."""
    for block in blocks:
        if isinstance(block, Widget):
            yield block
        elif isinstance(block, Parts):
            parts, _ = shown_parts(block, page=True)
            for part in parts:
                yield from _widgets(part.document.blocks)


def _article(document: Document) -> str:
    """Return the document, which must already be escaped, as an HTML element."""
    if document.front is None:
        body = explained("\n".join(_document(document, 1)), document.terms)
        return f'<article class="mpinspect">\n{body}\n</article>'
    below = [text for block in without_front_sections(document.below) for text in _block(block, 1)]
    parts = [*front(document, document.front, escape, _block, _document), '<div class="below">', *below, "</div>"]
    return f'<article class="mpinspect front">\n{explained(chr(10).join(parts), document.terms)}\n</article>'


def _document(document: Document, level: int) -> Iterator[str]:
    if document.title:
        yield _heading(document.title, level)
    if document.alarm:
        yield f'<p class="alarm">{escape(document.alarm)}</p>'
    for block in document.page:
        yield from _block(block, level)


def _heading(title: str, level: int) -> str:
    tag = f"h{min(level, 4)}"
    return f"<{tag}>{escape(title)}</{tag}>"


def _block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Line):
        yield _lead(block.text) if block.tone == "lead" else _tagged("p", block.text, block.tone)
    elif isinstance(block, Code):
        yield code_block(block.text)
    elif isinstance(block, Section):
        yield "<section>"
        yield _heading(block.title, level + 1)
        for inner in block.blocks:
            yield from _block(inner, level + 1)
        yield "</section>"
    elif isinstance(block, Items):
        yield from _items(block)
    elif isinstance(block, Findings):
        for finding in gravest_first(block.findings):
            yield from _finding(finding)
    elif isinstance(block, Tables):
        yield from _tables(block, level)
    elif isinstance(block, Widget):
        yield from _widget(block, level)
    else:
        yield from _parts(block, level)


def _widget(block: Widget, level: int) -> Iterator[str]:
    place = ' class="picture"'
    if block.title:
        yield _heading(block.title, level + 1)
        place = ""
    packed = " ".join(make() for _, make in block.data)
    names = html.escape(json.dumps([name for name, _ in block.data]))
    more = filled(" data-first={}", block.first or None)
    if block.together:
        more = f" data-together{more}"
    if len(block.data) > 1:
        more += f' data-of="{html.escape(block.of)}"'
    yield f'<div{place} data-widget="{packed}" data-names="{names}"{more}>{_tagged("p", block.without, "dim")}</div>'


def _tagged(tag: str, text: str, *classes: str) -> str:
    return f"<{tag}{_class(*classes)}>{escape(text)}</{tag}>"


def _lead(text: str) -> str:
    """Return a paragraph whose words before the first colon are strong; a text without a colon as it is."""
    start, colon, rest = text.partition(": ")
    return f"<p><b>{escape(start + colon)}</b>{escape(rest)}</p>" if colon else _tagged("p", text)


def _class(*names: str) -> str:
    """Return a tag's attribute with the names that are not empty; "" if all are empty."""
    return filled(' class="{}"', " ".join(filter(None, names)))


def _rest(words: str) -> Iterator[str]:
    if words:
        yield f'<p class="rest">{escape(words)}</p>'


def _items(block: Items) -> Iterator[str]:
    shown, rest = shown_items(block, page=True)
    yield "<ul>" if block.marked else '<ul class="plain">'
    for item in shown:
        yield f"<li>{_item(item)}</li>"
    yield "</ul>"
    yield from _rest(rest)


def _item(item: Item) -> str:
    label = filled(f"<b{_class(item.tone)}>{{}}</b> ", escape(item.label))
    words = escape(item_words(item, page=True))
    if item.details:
        words = words if item.tone else f"<b>{words}</b>"
        words += f"<ul>{''.join(f'<li>{escape(detail)}</li>' for detail in item.details)}</ul>"
    return f"{label}{words}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f'<div class="finding {html.escape(finding.severity)}">'
    yield f'<b>{escape(finding.severity)}</b><span class="id">{escape(finding.id)}</span>{escape(inferred(finding))}'
    yield f"<p>{escape(finding.message)}</p>"
    if finding.fix:
        yield f'<p class="fix">{escape(finding.fix)}</p>'
    if finding.code:
        yield code_block(finding.code)
    yield "</div>"


def _tables(block: Tables, level: int) -> Iterator[str]:
    tables, rest = shown_tables(block, page=True)
    for table in tables:
        if table.title:
            yield _heading(table.title, level + 1)
        is_long = [any(len(row[index].text) > _LONG for row in table.rows) for index in range(len(table.columns))]
        classes = [_classes(column, long) for column, long in zip(table.columns, is_long, strict=True)]
        # A keyboard can scroll only elements that take the focus.
        yield '<div class="scroll" tabindex="0"><table>'
        headings = (_column(column, names) for column, names in zip(table.columns, classes, strict=True))
        yield f"<thead><tr>{''.join(headings)}</tr></thead>"
        yield "<tbody>"
        for row in table.rows:
            yield f"<tr>{''.join(_cell(cell, names) for cell, names in zip(row, classes, strict=True))}</tr>"
        yield "</tbody></table></div>"
    yield from _rest(rest)
    columns = [column for table in tables for column in table.columns]
    legend = legend_words(block, tables, columns, _STRIP_LEGEND)
    if legend:
        yield f'<p class="legend">{escape(legend)}</p>'


def _column(column: Column, classes: str) -> str:
    title = filled(' title="{}"', html.escape(column.meaning))
    tag = "th" if column.heading else "td"
    return f'<{tag} class="{classes}"{title}>{escape(column.heading)}</{tag}>'


def _classes(column: Column, is_long: bool) -> str:
    found = {
        "left": column.is_left or column.is_name,
        "name": column.is_name,
        "long": is_long and not column.is_name,
        f"p{min(column.priority, 4)}": column.priority,
    }
    return " ".join(name for name, holds in found.items() if holds)


def _cell(cell: Cell, classes: str) -> str:
    inside = optional(cell.strip, _strip, escape(cell.text))
    if cell.bar is not None:
        inside = f'<span class="amount"><i style="width:{100 * cell.bar:.1f}%"></i></span>{inside}'
    notes = "".join(f"<small>{escape(note)}</small>" for note in cell.notes)
    return f"<td{_class(classes, cell.tone)}>{inside}{notes}</td>"


def _strip(strip: Strip) -> str:
    """Return a strip as HTML; the share below all bins begins the first part, the share above has a part of its own."""
    first, *others = strip.parts
    parts = ((strip.below, *first), *others, (strip.above,))
    drawn = "".join(f"<span>{''.join(map(_bin, part))}</span>" for part in parts)
    return f'<span class="strip">{drawn}</span>'


def _bin(share: float) -> str:
    return f'<i class="s{1 + sum(share >= least for least in _SHADES)}"></i>' if share else "<i></i>"


def _parts(block: Parts, level: int) -> Iterator[str]:
    parts, rest = shown_parts(block, page=True)
    for part in parts:
        yield '<section class="part">'
        yield _heading(part.title, level + 1)
        yield from _document(part.document, level + 1 + bool(part.document.title))
        yield "</section>"
    yield from _rest(rest)
