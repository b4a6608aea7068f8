"""Curves as SVG: they scale with the page, and take its colours, by day and by night."""

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 12, 44
DASHES = ("", "6 3", "2 3", "8 3 2 3")
COLOURS = 8
# About so many to an axis.
TICKS = 5


@dataclass(frozen=True)
class Line:
    """Points of one curve, and between which values it lies where it stands for several."""

    label: str
    colour: int
    points: list[tuple[float, float]]
    band: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    dash: int = 0


def chart(title: str, x_name: str, y_name: str, lines: list[Line]) -> str:
    """Return a chart as an SVG element; what it shows is told in its title, for those who cannot see it."""
    lines = [line for line in lines if line.points]
    if not lines:
        return f"<p>{escape(title)}: nothing to draw.</p>"
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for line in lines for _, low, high in line.band for y in (low, high)]
    across, up = Axis.over(0, max(xs), LEFT, WIDTH - RIGHT), Axis.over(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    drawn = [*(grid(across, up)), *(one(line, across, up) for line in lines)]
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    names = (
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>'
        f'<text transform="translate(14 {centre}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>{"".join(drawn)}{names}</svg>'


@dataclass(frozen=True)
class Axis:
    """Where values lie on a page, and which of them are named."""

    ticks: list[float]
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float) -> "Axis":
        """An axis over a range, whose ticks are round numbers."""
        span = high - low or abs(high) or 1.0
        rough = span / TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.floor(low / step), math.ceil(high / step)
        ticks = [number * step for number in range(first, max(last, first + 1) + 1)]
        return cls(ticks, ticks[0], ticks[-1], start, end)

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def grid(across: Axis, up: Axis) -> list[str]:
    """The lines behind the curves, with their values."""
    lines = [f'<path class="grid" d="M{LEFT} {up.at(y)}H{WIDTH - RIGHT}"/>' for y in up.ticks]
    rows = [f'<text x="{LEFT - 6}" y="{up.at(y) + 4}" text-anchor="end">{number(y)}</text>' for y in up.ticks]
    columns = [f'<text x="{across.at(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(x)}</text>' for x in across.ticks]
    return lines + rows + columns


def number(value: float) -> str:
    """A tick's value, short."""
    if abs(value) >= 10000:
        return f"{value / 1000:,.6g}k"
    return f"{round(value, 10):.6g}"


def one(line: Line, across: Axis, up: Axis) -> str:
    """A curve and its band, with its name where a pointer rests on it."""
    path = "".join(f"{'L' if number else 'M'}{across.at(x)} {up.at(y)}" for number, (x, y) in enumerate(line.points))
    if len(line.points) == 1:
        # Else nothing would be seen.
        path += "h.1"
    dash = f' stroke-dasharray="{DASHES[line.dash % len(DASHES)]}"' if line.dash % len(DASHES) else ""
    band = ""
    if line.band:
        top = [f"{across.at(x)} {up.at(high)}" for x, _, high in line.band]
        bottom = [f"{across.at(x)} {up.at(low)}" for x, low, _ in reversed(line.band)]
        band = f'<path class="band" d="M{"L".join(top + bottom)}Z"/>'
    return f'<g class="c{line.colour % COLOURS}"><title>{escape(line.label)}</title>{band}<path class="line"{dash} d="{path}"/></g>'
