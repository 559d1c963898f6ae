"""Checks this repository's Python files without installing anything: they compile, say what they are for, and fit.

Usage: check_python.py FILE...
"""

import ast
import pathlib
import sys

LINE_MAX = 120


def problems(path: pathlib.Path) -> list[str]:
    """What is wrong with one file, as lines for a person."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    found = [] if ast.get_docstring(tree) else [f"{path}:1: no docstring that says why the file exists"]
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LINE_MAX:
            found.append(f"{path}:{number}: longer than {LINE_MAX} characters")
        if line != line.rstrip():
            found.append(f"{path}:{number}: white space at the end")
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{path}:{node.lineno}: a bare except hides what went wrong")
    return found


def main() -> int:
    """Checks every file named on the command line."""
    found = [line for name in sys.argv[1:] for line in problems(pathlib.Path(name))]
    print("\n".join(found) or f"{len(sys.argv) - 1} Python files are fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
