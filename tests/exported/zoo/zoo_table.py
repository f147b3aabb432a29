"""The table of docs/exported.md, from a whole run of the zoo."""

import datetime
import os
import platform
import re

BEGIN, END = "<!-- zoo -->", "<!-- /zoo -->"


def write(page, results, seconds):
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page} has no {BEGIN} and {END} for the table")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.write_text(f"{head}{BEGIN}\n{table(results, seconds)}\n{END}{tail}")


def table(results, seconds):
    import torch
    import transformers

    rows = [row(results, line) for line in results.models]
    passed = sum("| passes" in line for line in rows)
    lines = [
        f"{passed} of {len(rows)} models pass. torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, "
        f"{os.cpu_count()} cores ({platform.machine()}), {datetime.date.today()}: `make zoo`, {seconds / 60:.0f} minutes.",
        "",
        "| model | kind | nodes | parameters | in C++ | planned memory: saved, peak |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines)


def row(results, line):
    kind = line["family"] + (", plain torch" if line["source"] == "torch" else "")
    what = line["what"] + (", tied" if line["name"].endswith("_tied") else "")
    if "why" in line:
        why = line["why"].split(" does not export: ", 1)[-1]
        return f"| {what} | {kind} | | | does not export: {sentence(why)} | |"
    outcomes = results.checks[line["name"]]
    failed = {key: outcome for key, outcome in outcomes.items()
              if any(wrong for _, wrong in results.case_of(line["name"], *key, outcome))}
    if failed:
        (world, check), outcome = next(iter(failed.items()))
        said = f"fails ({check}, {world} ranks): {sentence(outcome)}"
    else:
        said = "passes"
        refused = [outcome for (_, check), outcome in outcomes.items()
                   if check.startswith("recompute") and outcome not in ("ok", "no blocks")]
        if refused:
            said += f"; blocks cannot be recomputed: {sentence(refused[0].removeprefix('rank 0: '))}"
        if "why_not_double" in line:
            said += " in float32; Python itself cannot run it in double"
        if line["difference"]:
            said += f"; the export itself differs from Python's eager mode by {line['difference']:.0e}"
    planned = results.planned[line["name"]].get("plain")
    return f"| {what} | {kind} | {line['nodes']:,} | {line['parameters']:,} | {said} | {planned.text() if planned else ''} |"


def sentence(text):
    """The first sentence, fit for a cell of a table."""
    text = " ".join(text.split())
    text = re.split(r"(?<=[a-z)\]'])\. ", text, 1)[0][:240]
    return text.replace("|", "\\|")
