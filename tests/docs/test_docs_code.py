"""The code in the documentation runs, and what is drawn or made from the code is up to date."""

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sklearn.utils import Bunch

from dlo_framework.run import runs
from dlo_tasks.imagenet import digits
from support.dlo_process import DloProcess
from support.doc_pages import read_blocks
from support.named_sets import isolate_named_sets

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = DOCS.parent / "examples"


def python_blocks() -> dict[str, list[str]]:
    """Each page's blocks of Python, without those that `docs/fill.py` fills."""
    pages = {path.relative_to(DOCS).as_posix(): read_blocks(path) for path in DOCS.rglob("*.md")}
    pages = {page: [block.text for block in found if block.language == "python"] for page, found in pages.items()}
    return {page: found for page, found in pages.items() if found}


@pytest.mark.parametrize("page", python_blocks())
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    """With a fifth of the digits."""
    whole = digits.read_digits()
    fewer = Bunch(images=whole.images[::5], target=whole.target[::5])
    monkeypatch.setattr(digits, "read_digits", lambda: fewer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(runs.ENVIRONMENT, raising=False)
    monkeypatch.syspath_prepend(EXAMPLES)
    isolate_named_sets(monkeypatch)
    names: dict[str, object] = {"__name__": "page"}
    for code in python_blocks()[page]:
        exec(compile(code, page, "exec"), names)


def dlo(*words: str, cwd: Path) -> str:
    process = DloProcess(list(words), cwd, {**os.environ, "OMP_NUM_THREADS": "1"})
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder in which a reader has made the files of "Write your own"."""
    for file in EXAMPLES.glob("own_data.*"):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_the_example_trains(project):
    dlo("fit", "--config", "own_data.yaml", "--trainer.max_epochs", "8", cwd=project)
    summary = json.loads((project / "runs/own_data/version_0/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["best_metric"]["val_acc1"] > 0.93
    assert set(summary) == set(documented_fields())


def test_the_example_of_a_plugin_joins_a_run(project):
    shutil.copy(EXAMPLES / "own_plugin.py", project)
    words = ["--plugins", "[./own_data.py, ./own_plugin.py]", "--trainer.callbacks+", "LargestGradient"]
    out = dlo("fit", "--config", "own_data.yaml", "--trainer.max_epochs", "2", *words, cwd=project)
    assert re.search(r"the largest gradient norm was [\d.]+, in step \d+", out)


def test_the_example_of_a_module_is_the_readmes():
    """`test_python_api` runs it."""
    script = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert (EXAMPLES / "own_module.py").read_text().partition('"""\n\n')[2] == script


def test_the_example_of_a_fine_tuned_model_is_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    turns = [("user", "What is {0} plus {0}?"), ("assistant", "It is {1}.")]
    chats = ([{"role": role, "content": text.format(n, 2 * n)} for role, text in turns] for n in range(80))
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    shutil.copy(EXAMPLES / "finetune_and_export.yaml", tmp_path)
    dlo("fit", "--config", "finetune_and_export.yaml", "--trainer.max_epochs", "1", cwd=tmp_path)
    dlo("checkpoint", "export", "best", "my-model", "--run", "finetune_and_export", cwd=tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    assert model.config.model_type == "llama"
    assert not any("lora" in name for name, _ in model.named_parameters())


def documented_fields() -> list[str]:
    text = (DOCS / "concepts/run-folder.md").read_text().partition("## summary.json")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_the_scaffolded_callback_joins_a_run_as_the_page_says(project):
    dlo("plugins", "new", "callback", "epoch_clock", cwd=project)
    words = ["--plugins", "[./own_data.py, ./epoch_clock.py]", "--trainer.callbacks+", "EpochClock"]
    out = dlo("fit", "--config", "own_data.yaml", "--trainer.max_epochs", "1", *words, cwd=project)
    assert "epoch_seconds" in out


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The site's own module, imported as mkdocs does: with its folder on the path."""
    monkeypatch.syspath_prepend(DOCS)
    for name in ("fill", "griffe_markup", "hooks", "markup", "pictures", "pictures.imports"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("hooks")
    assert Path(str(module.__file__)) == DOCS / "hooks.py"
    return module


def test_the_default_of_an_option_is_shown_as_its_number(hooks):
    griffe = importlib.import_module("griffe")
    extensions = griffe.load_extensions(importlib.import_module("griffe_markup").Markup)
    code = {"__init__.py": "_SIZE = 25.0\ndef cut(size=_SIZE, by=len): ..."}
    with griffe.temporary_visited_package("sizes", code, extensions=extensions) as package:
        assert [str(parameter.default) for parameter in package["cut"].parameters] == ["25.0", "len"]


def test_pages_hold_the_code_and_the_tables_that_are_in_the_tree(hooks):
    fill = importlib.import_module("fill")
    texts = {path: path.read_text() for path in DOCS.rglob("*.md")}
    used = {match for text in texts.values() for match in re.findall("<!-- fill: (\\w+)", text)}
    assert used == {"code", "kinds", "pages", "recipe_list", "scaffold", "tags"}
    stale = [str(path.relative_to(ROOT)) for path, text in texts.items() if fill.fill(text) != text]
    assert stale == [], "run python docs/fill.py"


def test_the_notebook_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(runs.ENVIRONMENT, raising=False)
    notebook = json.loads((DOCS / "notebooks/first_steps.ipynb").read_text())
    assert (notebook["nbformat"], {cell["cell_type"] for cell in notebook["cells"]}) == (4, {"markdown", "code"})
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), names)
    assert "finished 22 steps" in capsys.readouterr().out
    assert names["trainer"].current_epoch == 2


def test_llms_txt_lists_every_page(hooks):
    fill = importlib.import_module("fill")
    text = (DOCS / "llms.txt").read_text()
    assert text == fill.llms_txt(), "run python docs/fill.py"
    links = re.findall(r"\]\((.+?)\)", text)
    assert sorted(links) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
