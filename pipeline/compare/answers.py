"""What a person asks of several runs: which is best, is that fair, is it real, can I have it again."""

import math
import shlex
from pathlib import Path

from pipeline.compare.groups import CODE, DATA, Group, Spread, differing, same_seed_results

# Of the difference of two means, in standard errors: less than these may be the seeds' doing.
FEW_ERRORS = 2.0


def answers(groups: list[Group], params: Path) -> list[tuple[str, str]]:
    """Return question and answer, in the order in which people ask."""
    return [
        ("Best", best(groups)),
        ("Differs", differs(groups)),
        ("Fair", f"no: {why}" if (why := "; ".join(unfair(groups))) else "yes: the same data, code, seeds and images seen, all finished"),
        ("Same bits", same_bits(groups)),
        ("Again", again(groups, params)),
    ]


def best(groups: list[Group]) -> str:
    """The experiment with the highest validation accuracy, and whether its seeds alone could have put it there."""
    ranked = [(group, accuracy) for group in groups if (accuracy := group.over_seeds("accuracy"))]
    if not ranked:
        return "unknown: no run has come to the end of an epoch"
    (first, accuracy), *others = ranked
    text = f"{first.letter}, validation accuracy {accuracy}"
    tested = first.over_seeds("test_accuracy")
    text += f", test accuracy {tested}" if tested else ", not evaluated"
    if not others:
        return text
    second, other = others[0]
    ahead, error = accuracy.mean - other.mean, standard_error(accuracy, other)
    text += f"; ahead of {second.letter} by {ahead:.4f}"
    if error is None:
        return f"{text}, from one seed: how much of it is chance is unknown"
    return f"{text} ± {error:.4f} (standard error)" + (", which the seeds alone may explain" if ahead < FEW_ERRORS * error else "")


def standard_error(first: Spread, second: Spread) -> float | None:
    """Return that of the difference of two means."""
    if first.deviation is None or second.deviation is None:
        return None
    return math.sqrt(first.deviation**2 / first.n + second.deviation**2 / second.n)


def differs(groups: list[Group]) -> str:
    """What experiments differ in; how many modules of code."""
    found = differing(groups)
    code = [name for name in found if name.startswith(CODE)]
    names = [name for name in found if name not in code]
    names += [f"code ({', '.join(name.partition('.')[2] for name in code[:3])}{', …' if len(code) > 3 else ''})"] if code else []
    if names:
        return ", ".join(names)
    return "seed and number of ranks alone" if len(groups[0].results) > 1 else "nothing: it is one run"


def unfair(groups: list[Group]) -> list[str]:
    """Why a comparison would be unfair, a reason each."""
    found, reasons = differing(groups), list[str]()
    data = [name for name in found if name.startswith(DATA) and name != "data.augment"]
    if data:
        reasons.append(f"the data are not the same ({', '.join(data)})")
    if any(name.startswith(CODE) for name in found):
        reasons.append("the code is not the same")
    seen = {group.letter: max(result.step * result.global_batch for result in group.results) for group in groups}
    if len(set(seen.values())) > 1:
        reasons.append("not trained on as many images: " + ", ".join(f"{name} {count:,}" for name, count in seen.items()))
    if len({tuple(group.seeds) for group in groups}) > 1:
        reasons.append("not of the same seeds")
    unfinished = [result.fingerprint for group in groups for result in group.results if not result.finished]
    if unfinished:
        reasons.append(f"not finished: {', '.join(unfinished[:3])}{', …' if len(unfinished) > 3 else ''}")
    dirty = sum(result.dirty for group in groups for result in group.results)
    if dirty:
        reasons.append(f"{dirty} trained by code that is in no commit")
    return reasons


def same_bits(groups: list[Group]) -> str:
    """Whether runs of one fingerprint have come to one digest."""
    several = same_seed_results([result for group in groups for result in group.results])
    if not several:
        return "each was trained once; python -m pipeline verify computes one again"
    other = [runs[0].fingerprint for runs in several if len({run.weights_sha256 for run in runs}) > 1]
    if other:
        return f"NO: several digests of {', '.join(other)}, though nothing that should change a bit is another one"
    ranks = sorted({size for runs in several for run in runs for size in run.ranks})
    sizes = " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
    return f"yes: {len(several)} fingerprints were trained more than once, on {sizes} ranks, and each has one SHA-256 of the weights"


def again(groups: list[Group], params: Path) -> str:
    """The command that computes the best run once more, of those that are finished."""
    results = next((found for group in groups if (found := [result for result in group.results if result.finished])), [])
    if not results:
        return "nothing is finished"
    result = max(results, key=lambda one: one.accuracy or 0.0)
    where = [] if params == Path("params.yaml") else ["--params", str(params)]
    return shlex.join(["python", "-m", "pipeline", "verify", *where, result.name])
