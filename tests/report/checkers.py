"""axe-core and html-validate, as scripts/fetch_page_checkers.sh installs them."""

import json
import pathlib
import subprocess

FOLDER = pathlib.Path(__file__).resolve().parents[2] / ".checkers" / "node_modules"
AXE = FOLDER / "axe-core" / "axe.min.js"
HTML_VALIDATE = FOLDER / "html-validate" / "bin" / "html-validate.mjs"
CONFIG = pathlib.Path(__file__).resolve().parent / "npm" / "htmlvalidate.json"

# Rules of axe that are off, and why. All others run, best practices and experiments too.
OFF = {
    "color-contrast-enhanced": "asks for 7:1 (level AAA); the page keeps 4.5:1 (level AA)",
}


def are_here():
    return AXE.exists() and HTML_VALIDATE.exists()


def axe_problems(page):
    """What axe-core has against the page as it is now."""
    page.evaluate(AXE.read_text() + "; 0")
    rules = page.evaluate("axe.getRules().map(({ ruleId }) => ruleId)")
    enabled = {rule: {"enabled": rule not in OFF} for rule in rules}
    found = page.evaluate(f"""
        axe.run(document, {{ rules: {json.dumps(enabled)}, resultTypes: ["violations"] }})
          .then(({{ violations, passes }}) => ({{ passes: passes.length, violations: violations.flatMap(({{ id, nodes }}) =>
            nodes.map((node) => `${{id}}: ${{node.html.slice(0, 200)}}: ${{node.failureSummary}}`)) }}))""")
    if found["passes"] < 20:
        return [f"axe ran only {found['passes']} of its rules"]
    return found["violations"]


def html_problems(text, folder):
    """What html-validate has against an HTML text."""
    path = folder / "validated.html"
    path.write_text(text)
    return html_problems_of_files([path], folder).get(path.name, [])


def html_problems_of_files(paths, folder, config=CONFIG):
    """What html-validate has against HTML files, by their names. `folder` is for its results."""
    results = folder / "validated.json"
    results.unlink(missing_ok=True)
    done = subprocess.run(
        ["node", str(HTML_VALIDATE), "--config", str(config), "--formatter", f"json={results}", *map(str, paths)],
        capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 1) or not results.exists():
        return {paths[0].name: [f"html-validate failed: {done.stderr or done.stdout}"]}
    return {pathlib.Path(result["filePath"]).name: [
        f"{message['ruleId']}, line {message['line']}: {message['message']}" for message in result["messages"]]
        for result in json.loads(results.read_text()) if result["messages"]}
