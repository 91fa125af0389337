"""The language of kernels: the code that templates expand to, run as plain Python."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from localllm.kernels.cpu.templates import Registers, Template, device, static_range, template

THREE = 3


def build(function: Template, **constants: Any) -> Callable[..., Any]:
    tree, scope = function.specialise(constants)
    tree.decorator_list = []
    exec(compile(ast.fix_missing_locations(ast.Module([tree], [])), "<built>", "exec"), scope)
    built: Callable[..., Any] = scope[tree.name]
    return built


def text(function: Template, **constants: Any) -> str:
    tree, _ = function.specialise(constants)
    return ast.unparse(tree)


def test_constant_loops_are_unrolled() -> None:
    @template
    def powers(x):
        total = 0
        for i in static_range(THREE):
            for j in static_range(i + N):
                total = total + x ** (10 * i + j)
        return total

    built = build(powers, N=1)
    assert built(2) == sum(2 ** (10 * i + j) for i in range(3) for j in range(i + 1))
    assert "for" not in text(powers, N=1)


def test_other_loops_stay() -> None:
    @template
    def count(n):
        total = 0
        for i in range(n):
            total += i * THREE
        return total

    assert build(count)(5) == 30
    assert "for i in range(n)" in text(count)


def test_each_register_is_a_variable() -> None:
    @template
    def swap(a, b):
        for i in static_range(2):
            x[i] = a + i
            y[i, 1] = b + i
        x[1], y[0, 1] = y[0, 1], x[1]
        return x[0], x[1], y[0, 1], y[1, 1]

    assert build(swap)(10, 20) == (10, 20, 11, 21)
    assert "x_1, y_0_1 = (y_0_1, x_1)" in text(swap)


def test_indices_may_be_expressions_of_constants() -> None:
    @template
    def pick(a):
        for i in static_range(4):
            x[i] = a + i
        return x[N // 2], x[min(N, THREE)], x[max(N - 9, 0)]

    assert build(pick, N=5)(10) == (12, 13, 10)


def test_an_unknown_index_is_an_error() -> None:
    @template
    def pick(i):
        return x[i]

    with pytest.raises(NameError):
        build(pick)


def test_only_the_chosen_branch_remains() -> None:
    @template
    def choose(x):
        if BITS == 4:
            return x + 4
        elif BITS == 5:
            return x + 5
        else:
            return nonsense(x)

    assert build(choose, BITS=4)(1) == 5
    assert build(choose, BITS=5)(1) == 6
    assert "nonsense" not in text(choose, BITS=5)
    assert "nonsense" in text(choose, BITS=6)


def test_a_condition_on_arguments_stays() -> None:
    @template
    def absolute(x):
        if x < 0:
            return -x
        return x

    assert build(absolute)(-3) == build(absolute)(3) == 3


def test_runs_of_registers_are_spread_and_filled() -> None:
    @template
    def reverse(a):
        w[0:3] = triple(a)
        v[0:2] = (w[2], w[1])
        return joined(*v[0:2], 0, *w[0:3]), (*w[1:3],)

    built = build(reverse, triple=lambda a: (a, a + 1, a + 2), joined=lambda *values: values)
    assert built(5) == ((7, 6, 0, 5, 6, 7), (6, 7))


@template
def add_squares(total: Registers, n, x):
    """A template with a docstring, a local variable, and a variable with the name of a caller's variable."""
    step = x * x
    i = step
    for k in static_range(n):
        total[k] = total[k] + i + k


@template
def twice(sums: Registers, x):
    add_squares(sums, 2, x)
    add_squares(sums, 2, x + 1)


def test_templates_are_inlined_into_their_callers() -> None:
    @template
    def caller(x):
        i = 100
        step = 1000
        sums[0] = 0
        sums[1] = 0
        twice(sums, x)
        return sums[0], sums[1], i, step

    assert build(caller)(3) == (9 + 16, 9 + 1 + 16 + 1, 100, 1000)
    assert "docstring" not in text(caller)
    assert "add_squares(" not in text(caller)


def test_arguments_are_evaluated_once() -> None:
    @template
    def use(out: Registers, x):
        out[0] = x + x + x

    @template
    def caller():
        use(out, noted())
        return out[0]

    calls: list[int] = []

    def noted() -> int:
        calls.append(1)
        return 7

    assert build(caller, use=use, noted=noted)() == 21
    assert len(calls) == 1


def test_a_parameter_can_be_changed_without_changing_the_callers_variable() -> None:
    @template
    def walk(out: Registers, x):
        x += 1
        out[0] = x
        x = x * 2
        out[1] = x

    @template
    def caller(x):
        walk(out, x)
        walk(more, 5)
        return out[0], out[1], more[0], more[1], x

    assert build(caller, walk=walk)(1) == (2, 4, 6, 12, 1)


def test_constants_reach_inner_templates() -> None:
    @template
    def inner(out: Registers, n):
        if n == BITS:
            out[n] = 1
        else:
            out[n] = 0

    @template
    def caller():
        for n in static_range(4):
            inner(bit, n)
        return bit[0], bit[1], bit[2], bit[3]

    assert build(caller, inner=inner, BITS=2)() == (0, 0, 1, 0)


def test_a_template_can_be_a_constant() -> None:
    """Formats pass the template of their tile to the matrix kernel."""

    @template
    def caller(x):
        total[0] = 0
        total[1] = 0
        ADD(total, 2, x)
        return total[0], total[1]

    assert build(caller, ADD=add_squares)(4) == (16, 17)


def test_device_functions_are_called() -> None:
    @device
    def double(x):
        return x + x

    @template
    def caller(x):
        return double(x)

    assert "return double(x)" in text(caller, double=double)


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    @template
    def caller(x):
        add_squares(x)

    with pytest.raises(ValueError):
        build(caller)


def test_line_numbers_are_those_of_the_file() -> None:
    first = test_line_numbers_are_those_of_the_file.__code__.co_firstlineno

    @template
    def caller(x):
        sums[0] = 0
        for i in static_range(2):
            sums[0] = sums[0] + x
        return sums[0]

    tree, _ = caller.specialise({})
    assert [node.lineno - first for node in tree.body] == [5, 7, 7, 8]
    assert caller.file == __file__


def test_specialising_twice_gives_the_same() -> None:
    assert text(twice) == text(twice)
    assert text(add_squares, n=1) == text(add_squares, n=1) != text(add_squares, n=2)
