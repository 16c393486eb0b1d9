"""The page's scripts: their types and sizes, and joining their modules."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from node_places import NODE_PLACES

import mpinspect
from mpinspect.reporting.scripts import bundled

PACKAGE = Path(mpinspect.__file__).parent
MODULES = [*(PACKAGE / "ranges" / "report" / "explorer_js").glob("*.js"), PACKAGE / "integrations" / "tensorboard.js"]
NODE = shutil.which("node")
TYPESCRIPT = next((place / "typescript" for place in NODE_PLACES if (place / "typescript").is_dir()), None)

needs_typescript = pytest.mark.skipif(
    NODE is None or TYPESCRIPT is None, reason="needs Node.js and TypeScript: make .venv/.js"
)


def node(*arguments: str, **given: str) -> str:
    assert NODE is not None
    ended = subprocess.run([NODE, *arguments], capture_output=True, text=True, check=False, **given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_typescript
def test_the_types_of_every_module_agree(tmp_path):
    options = {
        "allowJs": True,
        "checkJs": True,
        "noEmit": True,
        "strict": True,
        "target": "es2023",
        "module": "esnext",
        "lib": ["es2023", "dom", "dom.iterable"],
        # TensorBoard serves both folders' modules from one.
        "rootDirs": sorted({str(path.parent) for path in MODULES}),
    }
    config = tmp_path / "tsconfig.json"
    config.write_text(json.dumps({"compilerOptions": options, "files": list(map(str, MODULES))}))
    node(str(TYPESCRIPT / "bin" / "tsc"), "--project", str(config))


SIZES = """
const [typescript, ...files] = process.argv.slice(1);
const ts = require(typescript);
const found = {};
for (const file of files) {
  const source = ts.createSourceFile(file, require("fs").readFileSync(file, "utf8"), ts.ScriptTarget.Latest, true);
  const lineOf = (at) => source.getLineAndCharacterOfPosition(at).line;
  const visit = (node) => {
    const name = () => `${file}:${node.name?.getText() ?? lineOf(node.pos)}`;
    if (ts.isFunctionLike(node) && node.body) found[name()] = lineOf(node.end) - lineOf(node.getStart()) + 1;
    ts.forEachChild(node, visit);
  };
  visit(source);
}
console.log(JSON.stringify(found));
"""


@needs_typescript
def test_no_function_is_longer_than_a_screen():
    lengths = json.loads(node("--eval", SIZES, str(TYPESCRIPT), *map(str, MODULES)))
    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}


def test_no_module_is_longer_than_a_few_screens():
    assert {path.name: lines for path in MODULES if (lines := len(path.read_text("utf-8").splitlines())) > 300} == {}


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_modules_are_joined_without_imports(tmp_path):
    script = tmp_path / "script.mjs"
    script.write_text(bundled("mpinspect.ranges.report", "explorer"), "utf-8")
    assert "import {" not in script.read_text("utf-8")
    # Node reports names that two modules declare, and imports that no module exports.
    driver = f'const all = await import("{script.as_uri()}"); console.log(Object.keys(all).includes("render"));'
    assert node("--input-type=module", "--eval", driver) == "true\n"
