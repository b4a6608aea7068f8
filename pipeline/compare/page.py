"""The comparison as one HTML file that needs nothing else: no server, no network, no script."""

from html import escape
from pathlib import Path

from pipeline.compare.answers import answers
from pipeline.compare.drawing import COLOURS, Line, chart
from pipeline.compare.groups import CODE, Group, differing, shared
from pipeline.compare.table import Table, experiments, runs, shown

LIGHT = ("#0b62c4", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#b91c1c", "#6d28d9", "#4d7c0f")
DARK = ("#6cb2ff", "#ff9d5c", "#5fd38d", "#e58bf0", "#5cd0e6", "#ff8f8f", "#b99bff", "#b3d66b")
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--faint:#d8dde3;--soft:#5b6570;LIGHT}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e6e9ed;--faint:#343b44;--soft:#9aa5b1;DARK}}
body{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--faint)}th{color:var(--soft);font-weight:500}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}
figure{margin:0}figcaption{color:var(--soft);font-size:.9rem}svg{width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}@media (max-width:40rem){svg text{font-size:18px}}
.grid{stroke:var(--faint)}.line{fill:none;stroke:currentColor;stroke-width:2}
.band{fill:currentColor;opacity:.18}g:hover .line{stroke-width:3.5}
.key{display:inline-block;width:1.6em;border-top:3px solid currentColor;vertical-align:middle;margin-right:.4em}COLOURS
"""


def page(groups: list[Group], params: Path) -> str:
    """Return the whole page."""
    number = sum(len(group.results) for group in groups)
    title = f"{number} run{'s' * (number > 1)} of {len(groups)} experiment{'s' * (len(groups) > 1)}"
    told = "".join(f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in answers(groups, params))
    parts = [
        f"<h1>{title}</h1><dl>{told}</dl>",
        f"<h2>Experiments</h2><p>{escape(explained())}</p>{table(experiments(groups), groups)}",
        f'<h2>Curves</h2><p>{legend(groups)}</p><div class="charts">{"".join(charts(groups))}</div>',
        f"<h2>Runs</h2>{table(runs(groups), [group for group in groups for _ in group.results])}",
        f"<h2>Settings</h2>{settings(groups)}",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{style()}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def explained() -> str:
    return (
        "Runs that differ in seed and number of ranks alone are one experiment; figures are mean ± standard deviation over its seeds. "
        "The best is the one with the highest validation accuracy; test accuracy is told and not chosen by."
    )


def style() -> str:
    """The style sheet, with a colour for each experiment."""
    light, dark = (";".join(f"--c{number}:{colour}" for number, colour in enumerate(colours)) for colours in (LIGHT, DARK))
    classes = "".join(f".c{number}{{color:var(--c{number})}}" for number in range(COLOURS))
    return STYLE.replace("LIGHT", light).replace("DARK", dark).replace("COLOURS", classes)


def legend(groups: list[Group]) -> str:
    own = {name: values for name, values in differing(groups).items() if not name.startswith(CODE)}
    names = (", ".join(f"{name} {shown(values[number])}" for name, values in own.items()) for number in range(len(groups)))
    keys = (
        f'<span class="key c{number % COLOURS}"></span>{group.letter} {escape(name)}'
        for number, (group, name) in enumerate(zip(groups, names, strict=True))
    )
    return " &nbsp; ".join(keys)


def charts(groups: list[Group]) -> list[str]:
    """Accuracy and losses over samples seen, as bands over seeds; accuracy over time, a line a run."""
    wanted = (
        ("validation/accuracy", "validation accuracy"),
        ("validation/loss", "validation loss"),
        ("train/loss", "training loss"),
    )
    drawn = [
        captioned(f"{name.capitalize()} over samples: mean, lowest and highest of the seeds", over_samples(groups, key, name))
        for key, name in wanted
    ]
    drawn.append(captioned("Validation accuracy over time: one line a run, dashed by its number of ranks", over_time(groups)))
    return drawn


def captioned(caption: str, drawing: str) -> str:
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def over_samples(groups: list[Group], key: str, name: str) -> str:
    """One line an experiment, over the samples it has seen."""
    lines: list[Line] = []
    for number, group in enumerate(groups):
        batch, curve = group.results[0].global_batch, group.curve(key)
        points = [(float(step * batch), found.mean) for step, found, _, _ in curve]
        band = [(float(step * batch), low, high) for step, _, low, high in curve] if len(group.seeds) > 1 else []
        lines.append(Line(group.letter, number, points, band))
    return chart(f"{name} over samples", "samples", name, lines)


def over_time(groups: list[Group]) -> str:
    """One line a run, over the time it took."""
    sizes = sorted({tuple(result.ranks) for group in groups for result in group.results})
    longest = max((result.hours or 0 for group in groups for result in group.results), default=0)
    unit, per_hour = ("hours", 1) if longest >= 2 else ("minutes", 60)
    lines = [
        Line(
            f"{group.letter}, seed {result.seed}, {' then '.join(map(str, result.ranks))} ranks",
            number,
            [(point.hours * per_hour, point.value) for point in points if point.hours is not None],
            dash=sizes.index(tuple(result.ranks)),
        )
        for number, group in enumerate(groups)
        for result, points in group.lines("validation/accuracy")
    ]
    return chart("validation accuracy over time", unit, "validation accuracy", lines)


def table(table: Table, groups: list[Group]) -> str:
    """A table whose rows have the colours of their experiments."""
    header, rows = table
    order = {letter: number for number, letter in enumerate(dict.fromkeys(group.letter for group in groups))}
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr><td><span class="key c{order[row[0]] % COLOURS}"></span>{escape(row[0])}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def settings(groups: list[Group]) -> str:
    """What differs, whole; and what all share, folded."""
    rows = [[name, *map(shown, values)] for name, values in differing(groups).items()]
    differ = plain(["", *(group.letter for group in groups)], rows) if rows else "<p>All the same but for the seed.</p>"
    same = plain(["", "all"], [[name, shown(value)] for name, value in sorted(shared(groups).items())])
    return f"{differ}<details><summary>What all have in common</summary>{same}</details>"


def plain(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
