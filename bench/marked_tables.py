"""Generated tables between two marks of a document: `<!-- SCRIPT: WHICH -->` and `<!-- to here -->`."""

import re
import sys


def markdown(rows):
    """Returns rows of cells, the first of them the header, as a table."""
    lines = list(rows)
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def fill(script, documents, table):
    """Puts table(WHICH) between the marks of each document."""
    marks = re.compile(rf"(<!-- {re.escape(script)}: ([^>]*) -->\n).*?(<!-- to here -->\n)", re.DOTALL)
    for document in documents:
        with open(document, encoding="utf-8") as file:
            text = file.read()
        made, tables = marks.subn(lambda m: m[1] + table(m[2]) + m[3], text)
        if tables == 0:
            sys.exit(f"{script}: {document} has no marks of a table")
        with open(document, "w", encoding="utf-8") as file:
            file.write(made)
