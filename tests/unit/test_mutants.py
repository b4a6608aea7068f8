"""The faults that `make mutate` makes, and whom it believes to have noticed them."""

import ast

import pytest
import yaml

from tests.kit.experiment import ROOT
from tests.kit.mutants import file_of, mutants


def keys(source: str) -> list[str]:
    return [mutant.key.partition(": ")[2] for mutant in mutants(ast.parse(source))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("return_ = a and b", ["a and b -> a or b", "a and b -> b", "a and b -> a"]),
        ("x = {'a': b} | c", ["{'a': b} | c -> {'a': b}", "{'a': b} | c -> c", "{'a': b} -> {}", "{'a': b} -> {'': b}"]),
        ("x = f(a, b)", ["f(a, b) -> a", "f(a, b) -> f(b, a)"]),
        ("x = a[1:]", ["a[1:] -> a[:]", "a[1:] -> a[2:]", "a[1:] -> a[0:]"]),
        ("A = tuple[int, int]", []),
        ("x = f'{a:03d} b'", ["f'{a:03d} b' -> ''", "f'{a:03d} b' -> f'{a} b'"]),
        ("def f():\n    '''A word.'''\n    return a", ["return a -> return None"]),
        ("def f(a: int | None = 0) -> int: ...", ["0 -> 1", "0 -> -1"]),
        ("class A(B):\n    a: int | None", ["int | None -> int", "int | None -> None"]),
        ("class A:\n    a: int | None", []),
        ("assert a == 1", []),
        ("@cache\ndef f(): ...", ["@cache f ->  f"]),
        ("try:\n    a\nexcept (B, C):\n    b", ["(B, C) -> (C,)", "(B, C) -> (B,)"]),
    ],
)
def test_a_module_is_broken_in_every_small_way(source: str, expected: list[str]) -> None:
    found = [key for key in keys(source) if not key.startswith(("except", "a -> nothing", "b -> nothing"))]
    assert found == expected


def test_mutants_that_look_alike_are_numbered_and_a_tree_is_as_it_was_after_each() -> None:
    source = (ROOT / "pipeline" / "data" / "order.py").read_text()
    tree = ast.parse(source)
    found = mutants(tree)
    assert len({mutant.key for mutant in found}) == len(found) > 20
    assert ast.dump(tree) == ast.dump(ast.parse(source))
    changed = set()
    for mutant in found:
        before = mutant.apply()
        changed.add(ast.dump(ast.fix_missing_locations(tree)))
        compile(tree, "order.py", "exec")
        put_back(mutant, before)
    assert ast.dump(tree) == ast.dump(ast.parse(source))
    assert len(changed) == len(found)


def put_back(mutant, before: ast.AST) -> None:
    if mutant.index is None:
        setattr(mutant.parent, mutant.field, before)
    else:
        getattr(mutant.parent, mutant.field)[mutant.index] = before


def test_every_listed_module_has_its_tests_and_every_explained_survivor_is_a_mutant() -> None:
    for module, listed in yaml.safe_load((ROOT / "tests" / "mutation.yaml").read_text()).items():
        path = file_of(module)
        found = {mutant.key for mutant in mutants(ast.parse(path.read_text()))}
        for test in listed["tests"]:
            assert (ROOT / test.split("::")[0]).exists(), test
        for why, survivors in listed.get("survivors", {}).items():
            assert why
            assert set(survivors) <= found, f"{module} has changed: run make mutate MODULE={module} and mend tests/mutation.yaml"
