"""The parts of the figures that scripts of this folder draw, as SVG elements."""

import json


def text(x, y, words, size=12, anchor="start", colour="#333333", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" {more}>{words}</text>'


def line(points, colour, dashes="", width=1.8):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'


def rule(x1, y1, x2, y2, colour="#dddddd", dashes=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-dasharray="{dashes}"/>'


def last_run(path):
    """The results of the last run in a file of JSON lines."""
    with open(path, encoding="utf-8") as lines:
        results = [json.loads(each) for each in lines]
    last = max(r["environment"]["time"] for r in results)
    return [r for r in results if r["environment"]["time"] == last]


def write(path, width, height, parts):
    with open(path, "w", encoding="utf-8") as out:
        out.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n')
        out.write(f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n')
        out.write("\n".join(parts) + "\n</svg>\n")
