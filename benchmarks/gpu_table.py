"""The results of gpu.py as a Markdown table, next to the figures of peers if there are any."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]


def table(found: dict[str, Any]) -> str:
    """One row per measurement. With peers, the rows have their figures too, and how many times as
    fast burnish is; what a peer did not measure is stated in rows of its own."""
    own: dict[str, Any] = {}
    for name, value in found.items():
        own |= value if name == "rollouts" else {} if name == "peers" else {name: value}
    peers: dict[str, dict[str, Figures]] = found.get("peers", {})
    if not peers:
        rows = [[name, shown(value)] for name, value in own.items()]
        return markdown(["measurement", ""], rows)
    rows = []
    for name, value in own.items():
        theirs = {peer: answers[name] for peer, answers in peers.items() if name in answers}
        cells = [f"{peer}: {shown(figures)}" for peer, figures in theirs.items()]
        cells += [f"{peer}: failed" for peer, answers in peers.items() if name in lacking(answers)]
        ratios = [times_as_fast(value, figures) for figures in theirs.values()]
        rows.append([name, shown(value), "; ".join(cells), "; ".join(filter(None, ratios))])
    for peer, answers in peers.items():
        if "about" in answers:
            rows.append([peer, "", shown(answers["about"]), ""])
        if "failure" in answers:
            rows.append([f"{peer} failed", "", reason(answers["failure"]), ""])
    return markdown(["measurement", "burnish", "peer", "burnish is … times as fast"], rows)


def lacking(answers: dict[str, Figures]) -> list[str]:
    """Return the names of the measurements that a failed peer lacks."""
    return answers.get("failure", {}).get("missing", [])


def reason(failure: Figures) -> str:
    """The reason of a failure with the last error in the output, or else its last line."""
    lines = [line.strip() for line in reversed(failure["output"]) if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return ": ".join([failure["reason"], *(errors or lines)[:1]])


def times_as_fast(own: Any, peer: Figures) -> str:
    """The ratio of tokens per second, or of the seconds of whole steps; "" if there is none."""
    if "tokens/s" in own and peer.get("tokens/s"):
        return f"{own['tokens/s'] / peer['tokens/s']:.2f}"
    if "whole" in own and own["whole"] and "whole" in peer:
        return f"{peer['whole'] / own['whole']:.2f}"
    return ""


def shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(
        f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in value.items()
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    return "\n".join("|" + "|".join(f" {x} " if x else " " for x in line) + "|" for line in lines)
