"""What `against` has measured, as tables and a plot in docs/performance.md and a sentence in README.md: `python bench/page.py`."""

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
KEPT, PLOT = ROOT / "bench" / "against.json", ROOT / "docs" / "pictures" / "performance.svg"
PAGES = ("README.md", "docs/performance.md")
# What is the same for all models of a page.
CONDITIONS = ("machine", "cpu", "cpus", "torch", "precisions")
Results = dict[str, dict[str, dict[str, list[float]]]]


def title(model: str) -> str:
    return {"lenet": "LeNet", "resnet18": "ResNet-18"}.get(model, "MobileNetV3-small" if "mobilenet" in model else model)


def told(values: list[float], form: str = ".2f") -> str:
    """The median, and in brackets the lowest and the highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def refuse_a_mixture(found: dict[str, Any], models: Sequence[str]) -> None:
    """End where a page would show models side by side that were measured under other conditions."""
    kept = json.loads(KEPT.read_text())
    others = [name for name in CONDITIONS if kept[name] != found[name]]
    if others and kept["models"].keys() - set(models):
        told = "; ".join(f"{name}: {kept[name]}, here {found[name]}" for name in others)
        raise SystemExit(f"{KEPT}: figures of other conditions ({told}); measure all models, or leave --publish out")


def merged(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What was kept, with the models that were measured anew."""
    if any(kept[name] != found[name] for name in CONDITIONS):
        return found
    return found | {name: kept[name] | found[name] for name in ("commits", "work", "models")}


def table(models: Results, kind: str, form: str = ".2f") -> str:
    """A row for each figure, a column for each model."""
    rows = list(dict.fromkeys(name for found in models.values() for name in found[kind]))
    lines = [f"| | {' | '.join(map(title, models))} |", f"|---{'|---' * len(models)}|"]
    for name in rows:
        cells = [told(found[kind][name], form) if name in found[kind] else "" for found in models.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def texts(results: dict[str, Any]) -> dict[str, str]:
    """What stands between the marks of a page, by mark."""
    models: Results = results["models"]
    numbers = {len(values) for found in models.values() for values in found["images_per_second"].values()}
    rounds = " to ".join(map(str, sorted({min(numbers), max(numbers)})))
    where = f"{results['cpus']} cores of {results['machine']}, torch {results['torch']}, gloo, {rounds} rounds in turn"
    work = [
        f"{title(name)} at commit {results['commits'][name]}, {one['steps']} steps of {one['images a rank']} images a rank"
        for name, one in results["work"].items()
    ]
    precision = next(iter(next(iter(models.values()))["images_per_second"])).partition(", ")[2]
    parts = [
        f"On {where} (CPU: {results['cpu']}); medians (lowest to highest).",
        "![Images a second of every arm, as a multiple of pytorch/examples' loop](pictures/performance.svg)",
        f"Each model in rounds of its own: {'; '.join(work)}.",
        "Ratios of images/s, medians of the rounds' ratios:",
        table(models, "ratios"),
        "Images/s:",
        table(models, "images_per_second", ",.0f"),
        "As a multiple of what matrix products of 1,024 by 1,024 reach in the same round, by the operations of direct convolutions; "
        "Winograd's need fewer:",
        table(models, "share of the peak"),
        f"Shares of a step's time in {precision}, on rank 0, of three trainings:",
        table(models, "share of a step"),
    ]
    sentences = []
    for name, found in models.items():
        ratios = {one: found["ratios"][f"{one} / examples"] for one in found["images_per_second"] if f"{one} / examples" in found["ratios"]}
        figures = [f"{statistics.median(values):.2f} in {one.partition(', ')[2]}" for one, values in ratios.items()]
        sentences.append(f"{title(name)} {' and '.join(figures)}")
    counts = {title(name): one["images a rank"] for name, one in results["work"].items()}
    images = f"images a rank: {'; '.join(f'{name} {one}' for name, one in counts.items())}"
    if len(set(counts.values())) == 1:
        images = f"{min(counts.values())} images a rank"
    readme = (
        "Images/s of a training with tracking (and for LeNet two checkpoints), over those of a loop like pytorch/examples', which "
        "computes in fp32 and reads images one by one, without DataLoader workers: "
        f"{'; '.join(sentences)}; medians on {where} ({images}; [performance](docs/performance.md))."
    )
    return {"against": "\n\n".join(parts), "speed": readme}


def filled(page: str, parts: dict[str, str]) -> str:
    """A page with what stands between its marks replaced."""
    for name, text in parts.items():
        marked = re.compile(rf"(<!-- {name}: [^>]* -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page = marked.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


def draw(models: Results, path: Path) -> None:
    """Bars of images a second, as a multiple of pytorch/examples' loop in the same round."""
    matplotlib.use("svg")
    # The same bytes from the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "lockstep"
    figure, axes = pyplot.subplots(1, len(models), figsize=(3 + 3 * len(models), 3.6), sharey=True, layout="constrained", squeeze=False)
    for one, (name, found) in zip(axes[0], models.items(), strict=True):
        speeds = found["images_per_second"]
        others = speeds["examples"]
        multiples = {arm: [speed / other for speed, other in zip(values, others, strict=True)] for arm, values in speeds.items()}
        for place, (arm, values) in enumerate(reversed(multiples.items())):
            middle = statistics.median(values)
            spread = [[middle - min(values)], [max(values) - middle]]
            one.barh(place, middle, xerr=spread, color="tab:blue" if arm.startswith("product") else "tab:gray", capsize=2)
        one.set_yticks(range(len(multiples)), list(reversed(multiples)), fontsize=8)
        one.set_title(title(name))
        one.axvline(1, color="black", linewidth=0.5)
    figure.supxlabel("images/s, as a multiple of examples (fp32)", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def publish(found: dict[str, Any] | None = None) -> None:
    """Write what was kept into the pages, after what was found anew."""
    results = json.loads(KEPT.read_text())
    if found is not None:
        results = merged(results, found)
        KEPT.write_text(json.dumps(results, indent=2) + "\n")
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(), texts(results)))
    draw(results["models"], PLOT)


if __name__ == "__main__":
    publish()
