"""The examples as a newcomer runs them: the chat, also with losses, training, the notebook."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL = ["--conversations", "2", "--turns", "2", "--tokens", "8"]
SUMMARY = re.compile(
    r"summary: (\d+) tokens, ([\d.]+)% reused, (\d+) replayed, (\d+) refilled; "
    r"([\d.]+) times sooner; (\d+) wrong answers"
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs one example with arguments; its exit status and its lines."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def main(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        status = __import__(name).main()
        return status, capsys.readouterr().out.splitlines()

    return main


def totals(lines):
    """The numbers of the last line: tokens, % reused, replayed, refilled, faster, wrong."""
    found = SUMMARY.fullmatch(lines[-1])
    assert found, lines[-1]
    return [float(x) for x in found.groups()]


def test_chat_reuses_and_is_right(run):
    status, lines = run("chat", *SMALL)
    tokens, reused, replayed, refilled, _, wrong = totals(lines)
    assert (status, wrong, replayed, refilled) == (0, 0, 0, 0)
    assert 75 < reused < 100
    said = [line for line in lines if "tokens equal" in line]
    assert len(said) == 2 * 3 and all(line.endswith("8 of 8 tokens equal: right") for line in said)
    text = "\n".join(lines)
    counts = [re.findall(rf"(\d+) {what}", text) for what in ("of them stored", "prefilled")]
    assert tokens == sum(int(n) for n in sum(counts, []))  # all that is stored is reused
    assert any("branches off conversation 0" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_chat_replays_lost_windows_and_tails(run):
    status, lines = run("chat", *SMALL, "--drop", "window,tail")
    _, reused, replayed, refilled, _, wrong = totals(lines)
    assert (status, wrong, refilled) == (0, 0, 0)
    assert replayed > 0 and reused > 50
    assert any(re.match(r"\s+\d+-\d+ +REUSE +RECOVER +RECOVER +REUSE", line) for line in lines)


def test_chat_runs_cold_again_without_indexer_keys(run):
    status, lines = run("chat", *SMALL, "--drop", "indexer")
    _, reused, replayed, _, _, wrong = totals(lines)
    assert (status, wrong, replayed) == (0, 0, 0)
    assert 0 < reused < 50  # the first turn still shares the system prompt
    assert any(re.match(r"\s+\d+-\d+ +REUSE +- +- +RECOMPUTE", line) for line in lines)


def foreign(folder):
    """A checkpoint of another architecture."""
    config = json.loads((EXAMPLES / "checkpoints/dsv4/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))


def damaged(folder):
    """A checkpoint whose weights end early."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(EXAMPLES / "checkpoints/dsv4" / name, folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(100_000)


@pytest.mark.parametrize(
    "arguments, spoil, said",
    [
        (["--drop", "window,nothing"], None, r"`--drop` names \['nothing'\]; forms are compressed"),
        (["--turns", "99"], None, "`--turns` is 99; give 1 to "),
        (["--conversations", "0"], None, "`--conversations` is 0; give 1 or more"),
        (["--conversations", "99"], None, "there are 7 scenes"),
        (["--model", "/nowhere"], None, "`--model`: .*'/nowhere'.*check the path"),
        ([], foreign, "`--model`: .*gemma3"),
        ([], damaged, "`--model`: `model.safetensors` is not readable"),
    ],
)
def test_chat_refuses_with_a_clear_error(run, capsys, tmp_path, arguments, spoil, said):
    if spoil:
        spoil(tmp_path)
        arguments = ["--model", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        run("chat", *arguments)
    assert stopped.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_training_refuses_what_the_old_weights_stored(run):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        status, lines = run("finetune")
    assert status == 0, lines[-1]
    assert re.match(r"summary: \d+ segments of epoch 0 refused, and the rest as it", lines[-1])
    assert sum(line.startswith("yes ") for line in lines) == 4
    assert sum("computed with other weights" in line for line in lines) >= 3
    assert max(map(len, lines)) <= 100


def shown(notebook):
    """What every cell prints and shows."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return [o.get("text") or o["data"].get("text/html") or o["data"]["text/plain"] for o in outputs]


@pytest.mark.filterwarnings("ignore")  # of the notebook's client, not of ours
def test_the_notebook_shows_what_it_stores():
    notebook = nbformat.read(EXAMPLES / "query.ipynb", as_version=4)
    stored = shown(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert shown(notebook) == stored
    assert sum("<table>" in text for text in stored) == 3
    assert "equal to the cold run: True" in "".join(stored)


@pytest.mark.skipif(os.environ.get("HKV_FULL") != "1", reason="compiles in three processes")
def test_restart_resumes_from_the_disk_and_is_right(run):
    status, lines = run("restart", "--tokens", "8", "--conversations", "2")
    found = re.fullmatch(
        r"summary: (\d+) tokens, ([\d.]+)% reused, (\d+) segments fetched, 0 records rejected; "
        r"0 wrong answers", lines[-1],
    )  # fmt: skip
    assert status == 0 and found, lines
    assert float(found[2]) > 70 and int(found[3]) > 0
