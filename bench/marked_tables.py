"""Tables of recorded figures between two marks of a document: `<!-- SCRIPT: WHICH -->` and `<!-- to here -->`."""

import re
import sys


def markdown(rows):
    """Rows of cells, the first the heads, as a table."""
    lines = list(rows)
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def fill(script, source, documents, table, check):
    """Puts table(WHICH) between the marks of each document, or, with check, ends the program where it is not there."""
    marks = re.compile(rf"(<!-- {re.escape(script)}: ([^>]*) -->\n).*?(<!-- to here -->\n)", re.DOTALL)
    for document in documents:
        with open(document, encoding="utf-8") as file:
            text = file.read()
        made, tables = marks.subn(lambda m: m[1] + table(m[2]) + m[3], text)
        if tables == 0:
            sys.exit(f"{script}: {document} has no marks of a table")
        if check and made != text:
            sys.exit(f"{script}: {document} does not have the figures of {source}; run bench/{script} {source} {document}")
        if not check:
            with open(document, "w", encoding="utf-8") as file:
                file.write(made)
