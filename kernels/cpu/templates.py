"""Kernel templates: Python functions that are specialised for constants before numba compiles them.

In addition to the Python that numba compiles, a template may use

* names in upper case for numbers of its module, and for constants of the specialisation (a format's bits);
* ``for i in static_range(N)``, which is unrolled N times;
* ``x[i]``, ``x[i, j]`` with constant indices: separate variables (``x_0``, ``x_1_2``), not memory.  An array of SIMD
  registers is written this way;
* ``if CONSTANT:``, which is replaced by the branch taken;
* ``f(*w[0:8])`` for ``f(w[0], …, w[7])``, and ``w[0:8] = f()`` for ``w[0], …, w[7] = f()``,
  where f ends with ``return (*w[0:8],)``;
* ``step(x, address)`` as a statement, where ``step`` is itself a template: its body replaces the call.
  A parameter annotated `Registers` is the caller's array itself.

The syntax tree is transformed, and errors still show the line numbers of the file.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast


def static_range(n: int) -> range:
    """Mark a loop to be unrolled; see the module's docstring."""
    return range(n)


#: Annotation of a template's parameter that is an array of registers.
Registers = Any


class Template:
    """A function to specialise."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        #: Includes the module, because two modules may have templates of the same name.
        self.full_name = f"{function.__module__}.{self.name}"

    @functools.cached_property
    def tree(self) -> ast.FunctionDef:
        """The function's syntax tree, parsed only to compile a kernel, because a warm start does not need it."""
        lines, first = inspect.getsourcelines(self.function)
        module = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(module, first - 1)
        return cast(ast.FunctionDef, module.body[0])

    @functools.cached_property
    def file(self) -> str:
        return inspect.getsourcefile(self.function) or "<kernel>"

    @functools.cached_property
    def registers(self) -> set[str]:
        """Parameters annotated `Registers`: arrays of variables, passed by name."""
        return {a.arg for a in self.tree.args.args if getattr(a.annotation, "id", None) == "Registers"}

    def specialise(self, constants: Mapping[str, Any]) -> tuple[ast.FunctionDef, dict[str, Any]]:
        """Return the function's syntax tree specialised for ``constants``, and the names that it needs."""
        tree = copy.deepcopy(self.tree)
        scope: dict[str, Any] = {}
        specialiser = _Specialiser({}, scope, itertools.count()).inside(self, constants)
        tree.body = specialiser.statements(tree.body)
        return tree, {**scope, **constants}


class DeviceFunction(Template):
    """A template that is compiled once and called, instead of replacing its calls (LLVM inlines it).

    It takes and returns values, not register arrays.  Code that is repeated for every register should be a device
    function, because numba's time is proportional to the number of statements.
    """


def template(function: Callable[..., Any]) -> Template:
    """Decorate a function as a template, whose body replaces calls in kernels."""
    return Template(function)


def device(function: Callable[..., Any]) -> DeviceFunction:
    """Decorate a function as a device function, which kernels call."""
    return DeviceFunction(function)


class _Specialiser(ast.NodeTransformer):
    """Rewrites statements for one set of constants."""

    def __init__(self, constants: Mapping[str, Any], scope: dict[str, Any], expansions: Iterator[int]) -> None:
        self.constants = constants
        self.scope = scope
        self.expansions = expansions

    def inside(self, inner: Template, constants: Mapping[str, Any]) -> _Specialiser:
        """Return the specialiser for a template's body, with its module's upper-case names and templates."""
        names = inner.function.__globals__
        self.scope.update(names)
        constant_names = {k: v for k, v in names.items() if k.isupper() or isinstance(v, Template)}
        return _Specialiser({**constant_names, **constants}, self.scope, self.expansions)

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            result = self.visit(copy.deepcopy(statement))
            out += result if isinstance(result, list) else [result]
        return out

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of a constant expression.

        Raises:
            NameError: it depends on a value that is only known when the kernel runs.
        """
        code = compile(ast.Expression(node), "<constant>", "eval")
        return eval(code, {"__builtins__": {"min": min, "max": max}}, dict(self.constants))

    def constant(self, node: ast.expr) -> Any:
        """Return the value of an expression, or None if it is only known when the kernel runs."""
        try:
            return self.evaluate(node)
        except NameError:
            return None

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.constants.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, (int, float)):
            return ast.copy_location(ast.Constant(value), node)
        return node

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", None) == "static_range"):
            return self.generic_visit(node)
        name = cast(ast.Name, node.target).id
        unrolled: list[ast.stmt] = []
        for i in range(self.evaluate(call.args[0])):
            unrolled += _Specialiser({**self.constants, name: i}, self.scope, self.expansions).statements(node.body)
        return unrolled

    def visit_If(self, node: ast.If) -> Any:
        condition = self.constant(node.test)
        if condition is None:
            return self.generic_visit(node)
        return self.statements(node.body if condition else node.orelse)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        index = self.evaluate(node.slice)
        indices = index if isinstance(index, tuple) else (index,)
        register = "_".join([cast(ast.Name, node.value).id, *map(str, indices)])
        return ast.copy_location(ast.Name(register, node.ctx), node)

    def called(self, node: ast.AST) -> Template | None:
        """Return the template that an expression calls, or None."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            value = self.constants.get(node.func.id)
            return value if isinstance(value, Template) and not isinstance(value, DeviceFunction) else None
        return None

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = self.spread(node.args)
        return cast(ast.expr, self.generic_visit(node))

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        node.elts = self.spread(node.elts)
        return cast(ast.expr, self.generic_visit(node))

    def spread(self, nodes: list[ast.expr]) -> list[ast.expr]:
        """Expand ``*w[0:8]`` among expressions."""
        out: list[ast.expr] = []
        for node in nodes:
            out += self.registers(cast(ast.Subscript, node.value)) if isinstance(node, ast.Starred) else [node]
        return out

    def registers(self, node: ast.Subscript) -> list[ast.expr]:
        """Return the elements of ``w[0:8]``."""
        bounds = cast(ast.Slice, node.slice)
        low, high = (self.evaluate(cast(ast.expr, b)) for b in (bounds.lower, bounds.upper))
        elements = [ast.Subscript(node.value, ast.Constant(i), node.ctx) for i in range(low, high)]
        return [ast.fix_missing_locations(ast.copy_location(e, node)) for e in elements]

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        target = node.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice):
            node.targets = [ast.copy_location(ast.Tuple(self.registers(target), ast.Store()), target)]
        return cast(ast.stmt, self.generic_visit(node))

    def visit_Expr(self, node: ast.Expr) -> Any:
        inner = self.called(node.value)
        return self.generic_visit(node) if inner is None else self.expand(inner, cast(ast.Call, node.value))

    def own_names(self, body: ast.AST) -> set[str]:
        """Return the variables and register arrays that a body assigns, directly or through templates."""
        names = set()
        for node in ast.walk(body):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Subscript):
                names.add(cast(ast.Name, node.value).id)
            elif inner := self.called(node):
                pairs = zip(inner.tree.args.args, cast(ast.Call, node).args, strict=True)
                names |= {cast(ast.Name, value).id for p, value in pairs if p.arg in inner.registers}
        return names

    def expand(self, inner: Template, call: ast.Call) -> list[ast.stmt]:
        """Return the body of a template, in place of a call."""
        tag = f"{inner.name}{next(self.expansions)}"
        body = copy.deepcopy(inner.tree.body)
        if ast.get_docstring(inner.tree) is not None:
            del body[0]
        wrapper = ast.Module(body, [])
        inside = self.inside(inner, {})
        assigned = inside.own_names(wrapper)
        renamed = {name: f"{tag}_{name}" for name in assigned}
        bound: list[ast.stmt] = []
        known_constants = dict(self.constants)
        for parameter, value in zip(inner.tree.args.args, call.args, strict=True):
            if parameter.arg in inner.registers:
                renamed[parameter.arg] = cast(ast.Name, value).id
            elif (number := self.constant(value)) is not None and parameter.arg not in assigned:
                known_constants[parameter.arg] = number
            else:
                renamed[parameter.arg] = f"{tag}_{parameter.arg}"
                target = ast.Name(renamed[parameter.arg], ast.Store())
                bound.append(ast.fix_missing_locations(ast.copy_location(ast.Assign([target], value), call)))
        for name in ast.walk(wrapper):
            if isinstance(name, ast.Name) and name.id in renamed:
                name.id = renamed[name.id]
        return self.statements(bound) + self.inside(inner, known_constants).statements(wrapper.body)
